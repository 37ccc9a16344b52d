"""Paged attention of all heads over one latent per token (MLA, absorbed).

Job: ``latent_attention`` on the GPU, prefill and decode in one launch. Steps that only decode are split over the keys,
and a second launch merges. In a verification each token is such a decode. With a fixed order of sums every decode is
split, in launches of its own. Owns: tile shapes, the size of a split. Does not know: layers, or who filled the pages.

All heads share the latent, so the heads of one or more tokens are rows of one tile (``row = token * heads + head``).
The tile reads a latent once, as key and as value. The latent's two parts are separate operands, because their total
width is no power of two.

Graph-safe: the grid depends on padded sizes alone; which rows are real is read on the device.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from weft.config.sum_order import LONGER_SPLITS_FROM
from weft.forward_context import Batch
from weft.ops.attention import latent_attention
from weft.ops.attention.merge import merge_kernel, most_splits, split_of
from weft.ops.attention.tiles import METADATA, sequence_of_block
from weft.ops.backend import launches
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.elementwise import LOG2_E
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, is_hopper, is_small, next_power_of_2, precision, shared_bytes

_MOST_HEADS = 64
"""Most heads of a launch. The sums of 128 rows of 512 columns do not fit in the registers of a program. On an H200,
128 heads in one launch reached 71 TFLOP/s in prefills, and 16 heads 270."""

_MANY_ROWS = 1024
"""Least rows (tokens times heads) for which tiles hold several tokens."""

_MOST_KEYS = 64
"""Most keys of a tile. On Hopper many rows have as many if two such tiles fit in shared memory with the rows. On an
H200, Kimi-Linear then takes 2,126 us for 4,096 tokens (``kernels-latent-h200.json``). With half as many keys it takes
2,885 (``kernels-latent-32-keys-h200.json``). For Blackwell the compiler asks for more memory than there is. A fixed
order of sums keeps the keys of decodes."""

_FIXED_SPLIT = 256
"""Tokens of the shortest split where the order of sums follows from a token's position alone (``split_of``)."""

_LEAST_SPLIT, _MOST_SPLITS = 128, 1024
"""Tokens of a split, and splits of all sequences together: each has 64 KiB of partial results with 32 heads of 512."""


class Fixed(NamedTuple):
    """Compile-time parameters of the kernel.

    Attributes:
        num_heads, rank, shared, entry, page_size: of the layer; an entry has ``rank + shared`` columns and padding.
        tokens, rows, keys, block_r, block_s: of a tile.
        precision: of products of float32 operands.
        stages: of the pipeline.
        mixture: how many sequences are real is known to the device only.
        split: tokens of the shortest split of sequences with one query token; 0: a program takes all keys.
        least_tokens: query tokens of a sequence from which a program takes all keys.
        skips_begun: sequences without tokens before this step are left out.
    """

    num_heads: int
    rank: int
    shared: int
    entry: int
    page_size: int
    tokens: int
    rows: int
    keys: int
    block_r: int
    block_s: int
    precision: str
    stages: int
    mixture: bool
    split: int
    least_tokens: int
    skips_begun: bool


@jit(
    do_not_specialize=["num_seqs", "max_splits", "double_from", "stride_table"],
    do_not_specialize_on_alignment=METADATA,
)
def _latent_attention_kernel(
    q, latents, page_table, seq_lens, cu_seqlens_q, counts, out, partial, partial_lse, scale_log2, num_seqs, max_splits,
    double_from, stride_q, stride_head, stride_table,
    FIXED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """All heads of some tokens of one sequence, over all keys or those of one split."""
    enter(EARLY)
    HEADS: tl.constexpr = FIXED.num_heads
    RANK: tl.constexpr = FIXED.rank
    PAGE_SIZE: tl.constexpr = FIXED.page_size
    TOKENS: tl.constexpr = FIXED.tokens
    ROWS: tl.constexpr = FIXED.rows
    KEYS: tl.constexpr = FIXED.keys
    PRECISION: tl.constexpr = FIXED.precision
    BLOCK_R: tl.constexpr = FIXED.block_r
    SPLIT: tl.constexpr = FIXED.split
    first = 0
    if SPLIT > 0:
        seq = tl.program_id(0)
        begin = tl.load(cu_seqlens_q + seq)
        query_len = tl.load(cu_seqlens_q + seq + 1) - begin
        if query_len != 1:
            return
    else:
        block = tl.num_programs(0) - 1 - tl.program_id(0)  # the last blocks of a sequence see most keys: they go first
        if FIXED.mixture:
            num_seqs = tl.load(counts + 1)
        total = tl.load(cu_seqlens_q + num_seqs)
        if block >= total // TOKENS + num_seqs:
            return
        seq = sequence_of_block(cu_seqlens_q, block, 0, 0, num_seqs, TOKENS)
        begin = tl.load(cu_seqlens_q + seq)
        query_len = tl.load(cu_seqlens_q + seq + 1) - begin
        first = (block - (begin // TOKENS + seq)) * TOKENS
        if (first >= query_len) | (query_len < FIXED.least_tokens):
            return
        if FIXED.skips_begun:  # noqa: SIM102 (known to the compiler)
            if tl.load(seq_lens + seq) == query_len:
                return
    lanes, o_r, o_s = tl.arange(0, ROWS), tl.arange(0, BLOCK_R), tl.arange(0, FIXED.block_s)
    tokens = first + lanes // HEADS
    valid = (lanes < TOKENS * HEADS) & (tokens < query_len)
    in_rank, in_shared = (o_r < RANK)[None, :], (o_s < FIXED.shared)[None, :]
    rows = (begin + tokens).to(tl.int64)[:, None]
    p_q = q + rows * stride_q + (lanes % HEADS)[:, None] * stride_head
    q_rank = tl.load(p_q + o_r[None, :], mask=valid[:, None] & in_rank, other=0.0)
    q_shared = tl.load(p_q + RANK + o_s[None, :], mask=valid[:, None] & in_shared, other=0.0)
    kv_len = tl.load(seq_lens + seq)
    before = kv_len - query_len
    start_key = 0
    end = before + tl.minimum(first + TOKENS, query_len)
    if SPLIT > 0:
        split = split_of(kv_len, double_from, SPLIT)
        start_key = tl.program_id(1) * split
        if start_key >= kv_len:
            return
        end = tl.minimum(end, start_key + split)
    table = page_table + seq.to(tl.int64) * stride_table
    acc = tl.zeros([ROWS, BLOCK_R], dtype=tl.float32)
    row_sum = tl.zeros([ROWS], dtype=tl.float32)
    row_max = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    for start in tl.range(start_key, end, KEYS, num_stages=FIXED.stages):
        keys = start + tl.arange(0, KEYS)
        inside = keys < end
        page = tl.load(table + keys // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        p_latent = latents + (page * PAGE_SIZE + keys % PAGE_SIZE)[:, None] * FIXED.entry
        values = tl.load(p_latent + o_r[None, :], mask=inside[:, None] & in_rank, other=0.0)
        shared = tl.load(p_latent + RANK + o_s[None, :], mask=inside[:, None] & in_shared, other=0.0)
        scores = tl.dot(q_rank, tl.trans(values), input_precision=PRECISION)
        scores = tl.dot(q_shared, tl.trans(shared), scores, input_precision=PRECISION)
        visible = keys[None, :] <= (before + tokens)[:, None]
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        shrink = tl.exp2(row_max - new_max)
        p = tl.exp2(scores * scale_log2 - new_max[:, None])
        row_sum = row_sum * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION)
        row_max = new_max
    acc = acc / row_sum[:, None]
    mask = valid[:, None] & in_rank
    if SPLIT > 0:  # noqa: SIM102 (known to the compiler, so not one condition with the next)
        if kv_len > split:
            place = (seq.to(tl.int64) * max_splits + tl.program_id(1)) * HEADS + lanes % HEADS
            tl.store(partial_lse + place, row_max + tl.log2(row_sum), mask=valid)
            tl.store(partial + place[:, None] * RANK + o_r[None, :], acc, mask=mask)
            return
    p_out = out + rows * (HEADS * RANK) + (lanes % HEADS)[:, None] * RANK + o_r[None, :]
    tl.store(p_out, acc.to(out.dtype.element_ty), mask=mask)


@launches(latent_attention, invariant={"fixed": True})
def latent_attention_triton(q, latents, batch, *, rank, scale, skips_begun, fixed: bool = False) -> Tensor:
    """``fixed``: kernels, tiles and splits follow from the model's shapes and a token's position alone."""
    assert latents.is_contiguous() and q.stride(2) == 1 and latents.shape[2] >= q.shape[2]
    assert latents.shape[2] % 8 == 0, "entries of pages are read in vectors of 16 bytes, whatever their place"
    if q.shape[1] > _MOST_HEADS:
        given = {"rank": rank, "scale": scale, "skips_begun": skips_begun, "fixed": fixed}
        heads = q.split(_MOST_HEADS, dim=1)
        return torch.cat([latent_attention_triton(each, latents, batch, **given) for each in heads], dim=1)
    if batch.verification is not None:
        batch = _as_decodes(batch, batch.verification.query_len)
    fresh = torch.empty if skips_begun else torch.zeros
    out = fresh(*q.shape[:2], rank, dtype=q.dtype, device=q.device)
    only_decodes = batch.max_query_len == 1 and batch.mixed is None
    table_tokens, num_seqs = batch.page_table.shape[1] * latents.shape[1], batch.seq_lens.shape[0]
    if fixed:
        split, double_from = _FIXED_SPLIT, LONGER_SPLITS_FROM
    else:
        split = max(_LEAST_SPLIT, next_power_of_2(cdiv(table_tokens * num_seqs, _MOST_SPLITS)))
        double_from = table_tokens
    splits = only_decodes or (fixed and (batch.num_decodes > 0 or batch.mixed is not None))
    if splits:
        _launch_splits(q, latents, batch, out, rank, scale, split, double_from)
    if not only_decodes:
        many = fixed or q.shape[0] * q.shape[1] >= _MANY_ROWS
        _launch(
            q, latents, batch, out, rank, scale, rows=64 if many else 1, left_out=(splits, skips_begun),
            many_keys=many and not fixed,
        )  # fmt: skip
    return out


def _as_decodes(batch: Batch, query_len: int) -> Batch:
    """Make every token of a batch of verifications a sequence that decodes."""
    earlier = torch.arange(query_len - 1, -1, -1, dtype=torch.int32, device=batch.seq_lens.device)
    seq_lens = (batch.seq_lens[:, None] - earlier).flatten()
    bounds = torch.arange(len(seq_lens) + 1, dtype=torch.int32, device=seq_lens.device)
    pages = batch.page_table.repeat_interleave(query_len, 0)
    return replace(batch, max_query_len=1, seq_lens=seq_lens, cu_seqlens_q=bounds, page_table=pages)


def _launch_splits(
    q: Tensor, latents: Tensor, batch: Batch, out: Tensor, rank: int, scale: float, split: int, double_from: int
) -> None:
    """Attend from the sequences with one query token: all splits, then their merge."""
    num_heads, num_seqs = q.shape[1], batch.seq_lens.shape[0]
    max_splits = most_splits(batch.page_table.shape[1] * latents.shape[1], double_from, split)
    merges = max_splits > 1
    shape = (num_seqs, max_splits, num_heads) if merges else (1, 1, 1)
    partial = torch.empty((*shape, rank), dtype=torch.float32, device=q.device)
    lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    _launch(q, latents, batch, out, rank, scale, splits=(split, max_splits, double_from, partial, lse))
    if merges:
        merge_kernel[(num_heads, num_seqs)](
            out, partial, lse, batch.seq_lens, batch.cu_seqlens_q, batch.seq_lens, num_seqs, max_splits, double_from,
            out.stride(0),
            HEAD_DIM=rank, NUM_HEADS=num_heads, SPLIT=split, SPLITS=16, BLOCK_D=max(16, next_power_of_2(rank)),
            QUERY_LEN=1, MIXTURE=False, num_warps=4, **early_launch(q.device),
        )  # fmt: skip


def _launch(
    q: Tensor, latents: Tensor, batch: Batch, out: Tensor, rank: int, scale: float, *, rows: int = 1,
    left_out: tuple[bool, bool] = (False, False), splits: tuple[int, int, int, Tensor, Tensor] | None = None,
    many_keys: bool = False,
) -> None:  # fmt: skip
    """``rows``: least rows of a tile. ``left_out``: whether sequences are that decode, and those that begin.
    ``splits``: tokens of the shortest, most of them, lengths with longer ones, and memory for their sums."""
    (num_rows, num_heads, entry), num_seqs, mixture = q.shape, batch.seq_lens.shape[0], batch.mixed
    is_wide = q.element_size() == 4
    split, max_splits, double_from, partial, lse = splits or (0, 1, 1, out, out)
    rows = max(16, next_power_of_2(num_heads), 1 if is_wide else rows)
    tokens, block_r = rows // num_heads, max(16, next_power_of_2(rank))
    block_s = max(16, next_power_of_2(entry - rank))
    keys = (16384 if rows < 64 or not is_small(q.device) else 8192) // block_r
    needed = (rows + 2 * _MOST_KEYS) * (block_r + block_s) * q.element_size()
    if many_keys and is_hopper(q.device) and needed <= shared_bytes(q.device):
        keys = _MOST_KEYS
    fixed = Fixed(
        num_heads, rank, entry - rank, latents.shape[2], latents.shape[1], tokens, rows,
        max(16, min(_MOST_KEYS, keys)), block_r, block_s,
        precision(q), 1 if is_wide else 2, mixture is not None, split, 2 if left_out[0] else 1, left_out[1],
    )  # fmt: skip
    counts = batch.seq_lens if mixture is None else mixture.counts
    _latent_attention_kernel[(num_seqs if split else num_rows // tokens + num_seqs, max_splits)](
        q, latents, batch.page_table, batch.seq_lens, batch.cu_seqlens_q, counts, out, partial, lse,
        scale * LOG2_E.value, num_seqs, max_splits, double_from, q.stride(0), q.stride(1), batch.page_table.stride(0),
        FIXED=fixed, num_warps=8, **early_launch(q.device),
    )  # fmt: skip
