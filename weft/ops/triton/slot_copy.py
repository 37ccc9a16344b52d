"""The slot copy kernel: one launch for all layers' tensors of one slot size.

Job: move bytes. Owns: the width of the words moved. Does not know: what they mean.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK_WORDS = 4096


@triton.jit
def _copy_kernel(addresses, src, dst, WORDS: tl.constexpr, BLOCK: tl.constexpr, WORD: tl.constexpr, ALIGN: tl.constexpr):
    """One block of words of one slot of one tensor."""
    i_block, i_tensor, i_pair = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    source, target = tl.load(src + i_pair).to(tl.int64), tl.load(dst + i_pair).to(tl.int64)
    if source == target:
        return
    base = tl.load(addresses + i_tensor).to(tl.pointer_type(WORD))
    words = i_block * BLOCK + tl.arange(0, BLOCK)
    p_source = tl.multiple_of(base + source * WORDS, ALIGN)
    p_target = tl.multiple_of(base + target * WORDS, ALIGN)
    tl.store(p_target + words, tl.load(p_source + words, mask=words < WORDS), mask=words < WORDS)


def copy_slots_triton(addresses: Tensor, slot_bytes: int, src: Tensor, dst: Tensor) -> None:
    """Copy slot ``src[i]`` to ``dst[i]`` in each tensor.

    Args:
        addresses: ``[num_tensors]`` int64, where each tensor begins (aligned to 16 bytes, as allocators do).
        slot_bytes: bytes of one slot, the same in all of them.
        src, dst: ``[N]`` int32.
    """
    if not src.numel():
        return
    word_bytes = next(n for n in (4, 2, 1) if slot_bytes % n == 0)
    words = slot_bytes // word_bytes
    block = min(_BLOCK_WORDS, triton.next_power_of_2(words))
    _copy_kernel[(triton.cdiv(words, block), addresses.shape[0], src.shape[0])](
        addresses, src, dst,
        WORDS=words, BLOCK=block, WORD={4: tl.int32, 2: tl.int16, 1: tl.int8}[word_bytes],
        ALIGN=16 if slot_bytes % 16 == 0 else word_bytes, num_warps=4,
    )  # fmt: skip
