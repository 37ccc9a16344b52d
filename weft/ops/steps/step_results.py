"""A step's results on their way from the device to the host.

Job: write what a step sampled into the host's memory. Does not know: what the numbers mean, when that memory may be
used again (``runner/results.py``).

The kernel writes the host's memory itself, for the reason for which that of ``inputs.py`` reads it.
"""

from __future__ import annotations

from torch import Tensor

from weft.ops.backend import Backend, with_kernel

NUM_RESULTS = 5
"""Arrays of results that a step may have."""


@with_kernel("weft.ops.steps.results")
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
