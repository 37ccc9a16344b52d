"""Paged attention on the GPU: which of its kernels a batch needs.

Job: ``paged_attention`` in Triton. Owns: nothing. Does not know: layers, or who filled the pages.

Graph-safe: grids depend on tensor shapes alone; which rows are real, and which sequences decode, is read on the
device. Only *whether* each kernel is launched depends on the batch's host fields: a graph of a mixture launches both,
and serves any batch of its size.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

from weft.config.sum_order import LONGER_SPLITS_FROM, MOST_QUERY_ROWS
from weft.forward_context import Batch
from weft.ops.attention import AttentionCall, paged_attention
from weft.ops.attention.decode import (
    MANY_SEQUENCES,
    DecodeChoice,
    decode_tile,
    launch_decode,
)
from weft.ops.attention.prefill import launch_prefill, prefill_tile
from weft.ops.backend import launches
from weft.ops.triton.gluon import GLUON_IS_KNOWN
from weft.ops.triton.graph_branch import graph_branch
from weft.ops.triton.sizes import MULTIPROCESSORS, is_small

if GLUON_IS_KNOWN:
    from weft.ops.attention import decode_hopper
    from weft.ops.attention import prefill_hopper as hopper

_BRANCH_ROWS, _BRANCH_HEADS = 512, 128 * MULTIPROCESSORS
"""Least rows, and most heads of rows, for which decodes of a captured mixture run in parallel with its prefills. That
takes 10% less time at 512 rows of Qwen3-0.6B, 5% less at 1,024, and no less beyond. With fewer rows programs that find
no decode and leave at once are the cheaper way."""

_FIXED_SPLIT = 256
"""Tokens of the shortest split in a fixed order of sums (``benchmarks/deterministic_orders.py``)."""

_HOPPER_ROWS, _HOPPER_ROWS_EACH, _HOPPER_BLOCK = 16, 256, 128
"""For the kernel for Hopper: least rows of q, and least rows per prefilling sequence if these have more blocks than one
for each multiprocessor. Behind a context, or with heads above 128, it is enough that a sequence fills a block of so
many rows and heads of its group. Groups that leave rows of a block empty need twice as many rows."""

_SMALL_HEAD, _SMALL_ROWS, _SMALL_EACH = 64, 1 << 16, 1024
"""Without a context, the general kernel is the faster one for heads of at most so many dimensions, with at least so
many heads of rows. It is not with four times as many in sequences of more rows than the last number
(``attention-shapes-few-h200.json``)."""


@launches(paged_attention, invariant={"fixed": True})
def paged_attention_triton(
    q, k_cache, v_cache, batch, *, scale, sinks, v_scale, bias, out, fixed: bool = False
) -> Tensor:  # fmt: skip
    """``paged_attention`` of ``weft/ops/attention``; float32 inputs keep float32 accuracy.

    ``fixed``: kernels, tiles and splits follow from the model's shapes and a token's position alone.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    call = AttentionCall(q, k_cache, v_cache, batch, scale, out, sinks, v_scale, bias)
    if batch.verification is not None and verifies(q, k_cache, batch.verification.query_len):
        _decode(call, batch.verification.query_len, fixed=fixed)
        return out
    assert not (fixed and batch.verification is not None), "the prefill kernel sums in another order than decoding"
    num_rows, num_seqs = q.shape[0], batch.seq_lens.shape[0]
    only_decodes = batch.max_query_len == 1 if batch.mixed is None else batch.mixed.max_prefills == 0
    decodes = only_decodes or batch.num_decodes > 0 or batch.mixed is not None
    prefills = not only_decodes or (num_rows > num_seqs and batch.mixed is None)
    branches = decodes and prefills and batch.mixed is not None
    branches = branches and num_rows >= _BRANCH_ROWS and num_rows * q.shape[1] <= _BRANCH_HEADS
    with graph_branch(q.device) if branches else nullcontext(nullcontext()) as branch:
        if decodes:
            with branch:
                _decode(call, fixed=fixed)
        if prefills:
            _prefill(call, skip_decodes=decodes, fixed=fixed)
    return out


def _prefill(call: AttentionCall, *, skip_decodes: bool, fixed: bool) -> None:
    q, k_cache = call.q, call.k_cache
    is_plain = GLUON_IS_KNOWN and not call.has_row_terms
    if is_plain and (hopper.takes(q, k_cache) if fixed else _is_for_hopper(q, k_cache, call.batch)):
        hopper.launch_prefill_hopper(call, skip_decodes=skip_decodes, fixed=fixed)
        return
    group = q.shape[1] // k_cache.shape[2]
    num_rows, small = 1 if fixed else q.shape[0], is_small(q.device)
    tile = prefill_tile(num_rows, q.shape[1], q.shape[2], group, q.element_size(), small=small)
    launch_prefill(call, tile, skip_decodes=skip_decodes)


def _is_for_hopper(q: Tensor, k_cache: Tensor, batch: Batch) -> bool:
    """Whether that kernel takes these tensors and pays. A program of the Hopper kernel fills a multiprocessor, so
    blocks without work must not outnumber full blocks by far. Every sequence has one such block, decodes included. How
    many sequences a graph of a mixture will serve is not known: it is made for few."""
    if not GLUON_IS_KNOWN or q.shape[0] < _HOPPER_ROWS or not hopper.takes(q, k_cache):
        return False
    (num_rows, num_heads, head_dim), kv_heads = q.shape, k_cache.shape[2]
    group, rows_each, has_context, num_seqs = num_heads // kv_heads, num_rows, False, batch.seq_lens.shape[0]
    if batch.mixed is not None:
        num_seqs = batch.mixed.max_prefills
    else:
        num_prefills = max(1, batch.num_seqs - batch.num_decodes)
        rows_each, has_context = num_rows // num_prefills, batch.max_seq_len >= 2 * batch.max_query_len
        least = _HOPPER_ROWS_EACH * (1 if hopper.fills_blocks(group) else 2)
        if has_context or head_dim > 128:
            least = _HOPPER_BLOCK // group
        if kv_heads * num_prefills > MULTIPROCESSORS and rows_each < least:
            return False
    if head_dim <= _SMALL_HEAD and not has_context and num_rows * num_heads >= _SMALL_ROWS:  # noqa: SIM102
        if rows_each <= _SMALL_EACH or num_rows * num_heads < 4 * _SMALL_ROWS:
            return False
    return kv_heads * num_seqs <= 2 * MULTIPROCESSORS or num_seqs <= 2 * (num_rows // hopper.block_tokens(group))


def verifies(q: Tensor, k_cache: Tensor, query_len: int) -> bool:
    """Whether the rows of so many tokens fit in a tile of the decode kernel; the prefill kernel takes the others."""
    return query_len * (q.shape[1] // k_cache.shape[2]) <= MOST_QUERY_ROWS


def _decode(call: AttentionCall, query_len: int = 1, *, fixed: bool = False) -> None:
    q, k_cache, batch = call.q, call.k_cache, call.batch
    _, page_size, num_kv_heads, head_dim = k_cache.shape
    group, table_tokens = q.shape[1] // num_kv_heads, batch.page_table.shape[1] * page_size
    rows = group * query_len
    num_seqs = batch.seq_lens.shape[0]
    sizes, small = (q.element_size(), k_cache.element_size()), is_small(q.device)
    if fixed:
        tile = decode_tile(MANY_SEQUENCES, num_kv_heads, head_dim, rows, *sizes, table_tokens, small=small)
        choice = DecodeChoice(tile, split=_FIXED_SPLIT, double_from=LONGER_SPLITS_FROM)
        launch_decode(call, choice, query_len=query_len)
        return
    tile = decode_tile(num_seqs, num_kv_heads, head_dim, rows, *sizes, table_tokens, small=small)
    if call.has_row_terms:  # the kernels of the other ways have none
        tile = tile._replace(held_splits=0)
    is_plain = GLUON_IS_KNOWN and not call.has_row_terms
    on_hopper = is_plain and not tile.held_splits and decode_hopper.takes(q, k_cache, rows)
    choice = DecodeChoice(decode_hopper.TILE if on_hopper else tile, on_hopper)
    launch_decode(call, choice, query_len=query_len)
