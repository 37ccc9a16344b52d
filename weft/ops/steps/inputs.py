"""The kernel of ``weft/ops/steps``, which reads the host's pinned memory.

The launch is an ordinary one, since the kernel writes metadata that later kernels read before waiting
(``early_launch.py``).
"""

import triton.language as tl

from weft.ops.backend import launches
from weft.ops.steps import load_step_inputs
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv

_BLOCK = 512
"""Numbers of a program: 4 KB, so that many programs wait for the bus at the same time."""


@jit(do_not_specialize=["stride", "size", "num_tokens", "num_updates"])
def _load_kernel(
    host, block, page_table, stride, size, num_tokens, num_updates, ARRAYS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Programs of the arrays' beginnings, then of what follows the arrays, then of the page table."""
    part, place = tl.program_id(0), tl.arange(0, BLOCK)
    parts = tl.cdiv(num_tokens, BLOCK)
    rest = part - ARRAYS * parts
    last = rest - tl.cdiv(size - ARRAYS * stride, BLOCK)
    if last >= 0:
        at = size + 2 * (last * BLOCK + place)
        mask = last * BLOCK + place < num_updates
        index = tl.load(host + at, mask=mask, other=0)
        tl.store(page_table + index, tl.load(host + at + 1, mask=mask, other=0).to(tl.int32), mask=mask)
    else:
        if rest >= 0:
            at = ARRAYS * stride + rest * BLOCK + place
            mask = at < size
        else:
            token = (part % parts) * BLOCK + place
            at = (part // parts) * stride + token
            mask = token < num_tokens
        tl.store(block + at, tl.load(host + at, mask=mask), mask=mask)


@launches(load_step_inputs, invariant={})
def load_step_inputs_triton(host, block, page_table, num_arrays, stride, num_tokens, num_updates) -> None:
    """``load_step_inputs`` of ``weft/ops/steps``, with one launch."""
    size = block.shape[0]
    rest = cdiv(size - num_arrays * stride, _BLOCK)
    _load_kernel[(num_arrays * cdiv(num_tokens, _BLOCK) + rest + cdiv(num_updates, _BLOCK),)](
        host, block, page_table, stride, size, num_tokens, num_updates, ARRAYS=num_arrays, BLOCK=_BLOCK, num_warps=4
    )
