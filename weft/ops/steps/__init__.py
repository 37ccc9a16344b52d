"""A step's inputs and results on their way between host and device.

Job: copy the packed inputs of a step (``runner/buffers.py``) to the device, enter its new pages in the page table
there, and write the sampled tokens into the host's memory. Does not know: what the numbers mean, or when the host's
memory may be used again (``runner/results.py``).

The kernels read and write the host's memory themselves. Copies by the copy engine make the device change from one
engine to another and back, which takes longer than a few kilobytes do.
"""

import torch
from torch import Tensor

from weft.ops.backend import Backend, with_kernel
from weft.ops.rows import whole


@with_kernel("weft.ops.steps.inputs", whole)
def load_step_inputs(
    host: Tensor,
    block: Tensor,
    page_table: Tensor,
    num_arrays: int,
    stride: int,
    num_tokens: int,
    num_updates: int,
    *,
    backend: Backend,
) -> None:
    """Fill ``block``, and then write ``num_updates`` entries of the page table. The host does not wait.

    Args:
        host: ``[B + U]`` int64: the content of ``block``, then pairs of an index in the flat page table and a page. On
            a GPU it is pinned memory, and must not change before the device has read it.
        block: ``[B]`` int64 on the device; it may be the same memory as ``host[:B]``.
        page_table: int32 on the device, contiguous.
        num_arrays, stride: ``block`` begins with ``num_arrays`` arrays of ``stride`` numbers, of which only the first
            ``num_tokens`` need be copied.
    """
    size = len(block)
    if host.data_ptr() != block.data_ptr():
        block.copy_(host[:size], non_blocking=True)
    if num_updates:
        updates = host[size : size + 2 * num_updates].to(block.device, non_blocking=True).view(-1, 2)
        page_table.view(-1).index_copy_(0, updates[:, 0], updates[:, 1].to(torch.int32))


NUM_RESULTS = 5
"""Arrays of results that a step may have."""


@with_kernel("weft.ops.steps.results", whole)
def store_step_results(
    host: Tensor,
    token_ids: Tensor,
    failed: Tensor,
    counted: Tensor,
    prefill_failed: Tensor,
    drafts: Tensor,
    *,
    backend: Backend,
) -> None:
    """Fill the beginnings of the rows of ``host``, each with one of the others. The host does not wait.

    Args:
        host: ``[NUM_RESULTS, N]`` int64, on a GPU pinned memory, which must not become anybody else's before the
            device has done this: torch does not know of it.
        token_ids, drafts: contiguous int64 of any shape, of up to N numbers.
        failed, counted, prefill_failed: ``[up to N]`` bool, contiguous; they arrive as 0 and 1.
    """
    for row, values in zip(host, (token_ids, failed, counted, prefill_failed, drafts), strict=True):
        row[: values.numel()].copy_(values.view(-1), non_blocking=True)
