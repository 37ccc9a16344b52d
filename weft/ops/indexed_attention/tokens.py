"""Parts that the kernels of indexed attention share: positions of tokens, and numbers of visible tokens.

Does not know: layers, or who filled the pages.
"""

import triton
import triton.language as tl
from torch import Tensor

from weft.forward_context import Batch

METADATA = ["page_table", "seq_lens", "cu_seqlens_q", "counts"]
"""Slices of a step's packed buffer, so their alignment changes from step to step: no reason to compile again."""


def metadata(batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:
    """``page_table``, ``seq_lens``, ``cu_seqlens_q``, ``counts``, ``num_seqs`` and the stride of the page table.

    If ``num_seqs`` is negative, ``counts`` holds it.
    """
    counts, num_seqs = (batch.seq_lens, batch.seq_lens.shape[0]) if batch.mixed is None else (batch.mixed.counts, -1)
    return batch.page_table, batch.seq_lens, batch.cu_seqlens_q, counts, num_seqs, batch.page_table.stride(0)


def longest(batch: Batch, page_size: int) -> int:
    """Upper bound on a sequence's tokens: the batch's own, or that of its page table if the batch stands for others."""
    most = batch.page_table.shape[1] * page_size
    return most if batch.mixed is not None or batch.token_count is not None else min(most, batch.max_seq_len)


def is_decode(batch: Batch) -> bool:
    """Whether no sequence has several tokens."""
    return batch.max_query_len == 1 and batch.mixed is None


@triton.jit
def place_of(token, seq_lens, cu_seqlens_q, counts, num_seqs):
    """The token's sequence, and its position there; the position of a padding token is -1."""
    if num_seqs < 0:
        num_seqs = tl.load(counts + 1)
    low = tl.full([], 0, tl.int32)
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q + middle + 1) <= token:
            low = middle + 1
        else:
            high = middle
    position = tl.full([], -1, tl.int32)
    if low < num_seqs:
        position = tl.load(seq_lens + low) - (tl.load(cu_seqlens_q + low + 1) - token)
    return low, position


@triton.jit
def num_seen(position, COUNT: tl.constexpr, POOL: tl.constexpr):
    """How many tokens of selected pools, and how many tokens in all, the token at ``position`` sees."""
    complete = (position + 1) // POOL
    selected = tl.minimum(complete, COUNT) * POOL
    return selected, selected + (position + 1) % POOL


@triton.jit
def dense_segment(
    token, seq, seq_lens, cu_seqlens_q, COUNT: tl.constexpr, POOL: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """The tokens of one sequence in the block of ``TOKENS`` that holds ``token``.

    Returns their first place, their end, the number of keys up to the last token, and whether they read all keys.
    Reading all keys once took less time on an H200 than 16 selections, up to 6.4 times the selected keys.
    """
    end = tl.load(cu_seqlens_q + seq + 1)
    block = token // TOKENS * TOKENS
    first = tl.maximum(block, tl.load(cu_seqlens_q + seq))
    last = tl.minimum(block + TOKENS, end)
    length = tl.load(seq_lens + seq) - (end - last)
    return first, last, length, 2 * (last - first) * tl.minimum(length, COUNT * POOL) >= 5 * length
