"""The merge of attention's splits: partial results of one row over parts of its keys become one result.

Job: the second kernel of paged decode attention, and what its first kernels share: the length of splits, and which
splits a program computes. Owns: the layout of partial results on the reading side. Does not know: how splits are
computed.
"""

import triton
import triton.language as tl

from weft.ops.triton.early_launch import release, wait
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv


@triton.jit
def split_of(kv_len, double_from, SPLIT: tl.constexpr):
    """Tokens per split of a sequence: ``SPLIT``, twice that beyond ``double_from`` tokens, four times that beyond eight
    times as many."""
    return SPLIT * tl.where(kv_len > 8 * double_from, 4, tl.where(kv_len > double_from, 2, 1))


@triton.jit
def decode_programs(
    DECODE: tl.constexpr, ZERO: tl.constexpr, inputs, strides, results, counts, scale_log2, num_rows, num_seqs,
    double_from, FIXED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Run a program of a decode kernel: ``DECODE`` every ``step``-th split of its sequences, with its key head, and
    ``ZERO`` rows of padding. In a mixture, prefills and padding are the other kernel's."""
    kv_head = tl.program_id(0)
    if FIXED.mixture:
        num_decodes = tl.load(counts + 2)
        if (num_decodes > 0) | (tl.program_id(0) + tl.program_id(1) == 0):  # one waits for all that have no work
            wait(EARLY)
        if num_decodes > 0:
            step = tl.maximum(1, tl.num_programs(1) // num_decodes)
            first_split = tl.program_id(1) % step
            seqs_at_once = tl.num_programs(1) // step
            first_seq = tl.program_id(1) // step
            if first_seq < seqs_at_once:
                seq = first_seq
                while seq < num_decodes:
                    DECODE(
                        inputs, strides, results, scale_log2, double_from, kv_head, seq, first_split, step, FIXED, False
                    )  # fmt: skip
                    seq += seqs_at_once
    else:
        if FIXED.splits_last:
            seq = tl.program_id(1)
            first_split = tl.program_id(2)
            step = tl.num_programs(2)
        else:
            first_split = tl.program_id(1)
            seq = tl.program_id(2)
            step = tl.num_programs(1)
        if FIXED.query_len == 1:  # noqa: SIM102 (known to the compiler)
            if (seq >= tl.load(inputs[5] + num_seqs)) & (seq < num_rows) & (first_split == 0):  # cu_seqlens_q
                wait(EARLY)
                ZERO(results[0], results[5], seq, kv_head, FIXED)  # out, stride_out
        DECODE(inputs, strides, results, scale_log2, double_from, kv_head, seq, first_split, step, FIXED, EARLY)


def most_splits(table_tokens: int, double_from: int, split: int) -> int:
    """Compute the largest number of splits that a sequence of this page table can have."""
    lengths = min(table_tokens, double_from), min(table_tokens, 8 * double_from), table_tokens
    return max(1, *(cdiv(length, split << doublings) for doublings, length in enumerate(lengths)))


@triton.jit
def _merge(
    out, partial, partial_lse, seq_lens, cu_seqlens_q, max_splits, double_from, stride_out, head, seq,
    HEAD_DIM: tl.constexpr, NUM_HEADS: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, BLOCK_D: tl.constexpr,
    QUERY_LEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The splits of one sequence, query token and head (``head`` counts through all tokens), in order, if the sequence
    has so many tokens and several splits. With EARLY this is where the program waits for the kernels before it."""
    row = tl.load(cu_seqlens_q + seq)
    query_len = tl.load(cu_seqlens_q + seq + 1) - row
    kv_len = tl.load(seq_lens + seq)
    num_splits = tl.cdiv(kv_len, split_of(kv_len, double_from, SPLIT))
    wait(EARLY)
    if (query_len == QUERY_LEN) & (num_splits > 1):
        dims = tl.arange(0, BLOCK_D)
        acc = tl.zeros([BLOCK_D], dtype=tl.float32)
        weight_sum = 0.0
        largest = float("-inf")
        for start in range(0, num_splits, SPLITS):
            splits = start + tl.arange(0, SPLITS)
            valid = splits < num_splits
            place = (seq.to(tl.int64) * max_splits + splits) * (NUM_HEADS * QUERY_LEN) + head
            lse = tl.load(partial_lse + place, mask=valid, other=float("-inf"))
            mask = valid[:, None] & (dims < HEAD_DIM)[None, :]
            values = tl.load(partial + place[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
            new_largest = tl.maximum(largest, tl.max(lse, 0))
            shrink = tl.exp2(largest - new_largest)
            weights = tl.exp2(lse - new_largest)
            acc = acc * shrink + tl.sum(values * weights[:, None], 0)
            weight_sum = weight_sum * shrink + tl.sum(weights, 0)
            largest = new_largest
        result = (acc / weight_sum).to(out.dtype.element_ty)
        p_out = out + (row + head // NUM_HEADS).to(tl.int64) * stride_out + head % NUM_HEADS * HEAD_DIM
        tl.store(p_out + dims, result, mask=dims < HEAD_DIM)


@jit(
    do_not_specialize=["num_seqs", "max_splits", "double_from"],
    do_not_specialize_on_alignment=["seq_lens", "cu_seqlens_q", "counts"],
)
def merge_kernel(
    out, partial, partial_lse, seq_lens, cu_seqlens_q, counts, num_seqs, max_splits, double_from, stride_out,
    HEAD_DIM: tl.constexpr, NUM_HEADS: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, BLOCK_D: tl.constexpr,
    QUERY_LEN: tl.constexpr, MIXTURE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    release(EARLY, 64)  # more programs stand behind an attention that fills the GPU: what followed would start unevenly
    head = tl.program_id(0)
    seq = tl.program_id(1)
    if MIXTURE:
        num_seqs = tl.load(counts + 2)
        if (num_seqs > 0) | (head + seq == 0):  # one waits for all that have no work
            wait(EARLY)
        while seq < num_seqs:
            _merge(
                out, partial, partial_lse, seq_lens, cu_seqlens_q, max_splits, double_from, stride_out, head, seq,
                HEAD_DIM, NUM_HEADS, SPLIT, SPLITS, BLOCK_D, QUERY_LEN, False,
            )  # fmt: skip
            seq += tl.num_programs(1)
    else:
        _merge(
            out, partial, partial_lse, seq_lens, cu_seqlens_q, max_splits, double_from, stride_out, head, seq,
            HEAD_DIM, NUM_HEADS, SPLIT, SPLITS, BLOCK_D, QUERY_LEN, EARLY,
        )  # fmt: skip
