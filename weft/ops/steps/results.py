"""The kernel of ``weft/ops/steps``, which writes the host's pinned memory.

It is launched as an ordinary kernel: when the host may read is said by an event behind it.
"""

import triton.language as tl

from weft.ops.backend import launches
from weft.ops.steps import store_step_results
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv

_BLOCK = 256
_SIZES = ["stride", "num_tokens", "num_failed", "num_counted", "num_prefills", "num_drafts"]
_RESULTS = ["token_ids", "failed", "counted", "prefill_failed", "drafts"]


@jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_RESULTS)
def _store_kernel(
    host, token_ids, failed, counted, prefill_failed, drafts, stride, num_tokens, num_failed, num_counted, num_prefills,
    num_drafts, BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs of so many numbers, each of all arrays."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tokens = tl.load(token_ids + at, mask=at < num_tokens, other=0)
    flags = tl.load(failed + at, mask=at < num_failed, other=0)
    counts = tl.load(counted + at, mask=at < num_counted, other=0)
    prefills = tl.load(prefill_failed + at, mask=at < num_prefills, other=0)
    next_drafts = tl.load(drafts + at, mask=at < num_drafts, other=0)
    tl.store(host + at, tokens, mask=at < num_tokens)
    tl.store(host + stride + at, flags.to(tl.int64), mask=at < num_failed)
    tl.store(host + 2 * stride + at, counts.to(tl.int64), mask=at < num_counted)
    tl.store(host + 3 * stride + at, prefills.to(tl.int64), mask=at < num_prefills)
    tl.store(host + 4 * stride + at, next_drafts, mask=at < num_drafts)


@launches(store_step_results, invariant={})
def store_step_results_triton(host, token_ids, failed, counted, prefill_failed, drafts) -> None:
    """``store_step_results`` of ``weft/ops/steps``, with one launch."""
    results = (token_ids, failed, counted, prefill_failed, drafts)
    sizes = [values.numel() for values in results]
    assert max(sizes) <= host.shape[1] and host.is_contiguous() and drafts.is_contiguous()
    _store_kernel[(cdiv(max(sizes), _BLOCK),)](host, *results, host.shape[1], *sizes, BLOCK=_BLOCK, num_warps=4)
