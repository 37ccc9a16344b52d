"""Attention over latents that are expanded to keys and values of every head, for Hopper: prompts of many tokens.

Job: ``expanded_latent_attention`` on the GPU. The matrix library expands this step's latents, a kernel lays queries,
keys and values out as the pages of a cache, and the prefill kernel for Hopper (``prefill_hopper.py``) reads those.
Owns: the pages, which live for one call, and which batches pay. Does not know: layers, the cache of latents.

Every sequence begins at a page. With sequences counted from the first that does not decode, page ``p`` belongs to the
sequence that ``sequence_of_block`` finds for block ``p``, so the number of pages follows from padded sizes alone.
Sequences with tokens before this step get length 0 here: the prefill kernel finds no key for their rows, and leaves
them as they are.

Graph-safe: which sequences begin is read on the device. ``_place_kernel`` runs before the products, because the prefill
kernel reads lengths and pages before its wait (``ops/triton/early_launch.py``): an ordinary launch is in between.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from weft.forward_context import Batch
from weft.ops.attention import AttentionCall, expanded_latent_attention
from weft.ops.attention.tiles import METADATA, sequence_of_block
from weft.ops.backend import launches
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.gluon import GLUON_IS_KNOWN
from weft.ops.triton.hopper import runs_gluon
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv

if GLUON_IS_KNOWN:
    from weft.ops.attention.prefill_hopper import launch_prefill_hopper

_PAGE = 16
_HEAD_DIMS = (64, 128, 256)
"""Columns of a head in the pages, as many as a tile of the prefill kernel has."""

_ROWS_EACH = 128
"""Least rows per sequence that does not decode. A program of the prefill kernel has so many rows of one head."""


def takes(own: Tensor, shared_dim: int, value_dim: int, batch: Batch) -> bool:
    """Whether sequences may begin in the step, and the kernels support their tensors and pay."""
    if batch.num_begun == 0 or own.dtype != torch.bfloat16 or not GLUON_IS_KNOWN or not runs_gluon(own.device):
        return False
    if batch.mixed is not None:
        prefills = batch.mixed.max_prefills > 0
    else:
        num_rows = _ROWS_EACH * (batch.num_seqs - batch.num_decodes)
        prefills = batch.max_query_len > 1 and num_rows <= own.shape[0]
    return prefills and max(own.shape[2] + shared_dim, value_dim) <= _HEAD_DIMS[-1]


class Sizes(NamedTuple):
    """Compile-time sizes of a head's tile.

    Attributes:
        key, shared, of_value: columns of a head's own key, of the shared part, and of its value.
        width, of_values: columns of a head in the pages of keys and of values.
        page: tokens of a page.
        mixture: how many sequences are real, and how many decode, is known to the device only.
    """

    key: int
    shared: int
    of_value: int
    width: int
    of_values: int
    page: int
    mixture: bool


@jit(do_not_specialize=["num_seqs", "num_decodes"], do_not_specialize_on_alignment=METADATA)
def _place_kernel(
    seq_lens, cu_seqlens_q, counts, lengths, page_table, is_new, num_seqs, num_decodes, stride_table,
    SIZES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Note the page, the length of its sequence, and which rows are new, if the sequence begins in this step."""
    enter(EARLY)
    page = tl.program_id(0)
    seq, begin, query_len, first = _page_of(cu_seqlens_q, counts, page, num_seqs, num_decodes, SIZES)
    if first < query_len:
        begins = tl.load(seq_lens + seq) == query_len
        if begins:
            tl.store(lengths + seq, query_len)
            tl.store(page_table + seq.to(tl.int64) * stride_table + first // SIZES.page, page)
            tokens = first + tl.arange(0, SIZES.page)
            tl.store(is_new + begin + tokens, tl.full([SIZES.page], 1, tl.int8), mask=tokens < query_len)


@jit(do_not_specialize=["num_seqs", "num_decodes"], do_not_specialize_on_alignment=METADATA)
def _lay_out_kernel(
    own, of_shared, shared, keys, values, seq_lens, cu_seqlens_q, counts, q_out, k_pages, v_pages, num_seqs,
    num_decodes, stride_own, stride_own_head, stride_of_shared, stride_of_shared_head, stride_shared,
    SIZES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Lay out one page of one head: queries, keys and values, with zeros behind their columns."""
    enter(EARLY)
    page, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    seq, begin, query_len, first = _page_of(cu_seqlens_q, counts, page, num_seqs, num_decodes, SIZES)
    if first < query_len:
        if tl.load(seq_lens + seq) != query_len:
            return
        KEY: tl.constexpr = SIZES.key
        VALUE: tl.constexpr = SIZES.of_value
        WIDTH: tl.constexpr = SIZES.width
        V_WIDTH: tl.constexpr = SIZES.of_values
        places, columns = tl.arange(0, SIZES.page), tl.arange(0, WIDTH)
        valid = (first + places < query_len)[:, None]
        rows = (begin + first + places).to(tl.int64)[:, None]
        in_own = valid & (columns < KEY)[None, :]
        in_shared = valid & ((columns >= KEY) & (columns < KEY + SIZES.shared))[None, :]
        p_own = own + rows * stride_own + head * stride_own_head + columns[None, :]
        p_of_shared = of_shared + rows * stride_of_shared + head * stride_of_shared_head + (columns - KEY)[None, :]
        q = tl.load(p_own, mask=in_own, other=0.0)
        q = tl.where(in_own, q, tl.load(p_of_shared, mask=in_shared, other=0.0))
        tl.store(q_out + (rows * heads + head) * WIDTH + columns[None, :], q, mask=valid)
        k = tl.load(keys + (rows * heads + head) * KEY + columns[None, :], mask=in_own, other=0.0)
        p_shared = shared + rows * stride_shared + (columns - KEY)[None, :]
        k = tl.where(in_own, k, tl.load(p_shared, mask=in_shared, other=0.0))
        slots = (page * SIZES.page + places).to(tl.int64)[:, None]
        tl.store(k_pages + (slots * heads + head) * WIDTH + columns[None, :], k, mask=valid)
        columns = tl.arange(0, V_WIDTH)
        in_value = valid & (columns < VALUE)[None, :]
        v = tl.load(values + (rows * heads + head) * VALUE + columns[None, :], mask=in_value, other=0.0)
        tl.store(v_pages + (slots * heads + head) * V_WIDTH + columns[None, :], v, mask=valid)


@triton.jit
def _page_of(cu_seqlens_q, counts, page, num_seqs, num_decodes, SIZES: tl.constexpr):
    """The sequence of a page, its first row, its tokens, and the first token of the page. Beyond the last page the
    first token is beyond the tokens."""
    if SIZES.mixture:
        num_seqs = tl.load(counts + 1)
        num_decodes = tl.load(counts + 2)
    PAGE: tl.constexpr = SIZES.page
    seq = num_decodes
    begin = 0
    query_len = 0
    first = 0
    total = tl.load(cu_seqlens_q + num_seqs)
    if page < (total - num_decodes) // PAGE + num_seqs - num_decodes:
        seq = sequence_of_block(cu_seqlens_q, page, num_decodes, num_decodes, num_seqs, PAGE)
        begin = tl.load(cu_seqlens_q + seq)
        query_len = tl.load(cu_seqlens_q + seq + 1) - begin
        first = (page - ((begin - num_decodes) // PAGE + seq - num_decodes)) * PAGE
    return seq, begin, query_len, first


@launches(expanded_latent_attention)
def expanded_latent_attention_triton(own, of_shared, entries, k, v, batch, *, scale, others) -> Tensor:
    (num_rows, heads, key_dim), (_, value_dim, rank), shared_dim = own.shape, v.shape, of_shared.shape[2]
    assert own.stride(2) == of_shared.stride(2) == entries.stride(1) == 1
    num_seqs, device, mixture = batch.seq_lens.shape[0], own.device, batch.mixed
    num_prefills = num_seqs - batch.num_decodes if mixture is None else mixture.max_prefills
    width = next(size for size in _HEAD_DIMS if size >= max(key_dim + shared_dim, value_dim))
    v_width = 128 if width == 256 and value_dim <= 128 else width
    sizes = Sizes(key_dim, shared_dim, value_dim, width, v_width, _PAGE, mixture is not None)
    num_pages = num_rows // _PAGE + num_prefills
    lengths = torch.zeros_like(batch.seq_lens)
    page_table = batch.seq_lens.new_empty(num_seqs, cdiv(num_rows, _PAGE))
    is_new = torch.zeros(num_rows, dtype=torch.int8, device=device)
    counts = batch.seq_lens if mixture is None else mixture.counts
    _place_kernel[(num_pages,)](
        batch.seq_lens, batch.cu_seqlens_q, counts, lengths, page_table, is_new, num_seqs, batch.num_decodes,
        page_table.stride(0), SIZES=sizes, num_warps=1, **early_launch(device),
    )  # fmt: skip
    latents, shared = entries.split([rank, shared_dim], dim=-1)
    keys, values = (F.linear(latents, weight.flatten(0, 1)) for weight in (k, v))
    q = own.new_empty(num_rows, heads, width)
    k_pages, v_pages = (own.new_empty(num_pages, _PAGE, heads, columns) for columns in (width, v_width))
    _lay_out_kernel[(num_pages, heads)](
        own, of_shared, shared, keys, values, batch.seq_lens, batch.cu_seqlens_q, counts, q, k_pages, v_pages,
        num_seqs, batch.num_decodes, own.stride(0), own.stride(1), of_shared.stride(0), of_shared.stride(1),
        shared.stride(0), SIZES=sizes, num_warps=4, **early_launch(device),
    )  # fmt: skip
    del keys, values  # their memory is free for what follows: the largest step of a start may not have come here
    attended = own.new_empty(num_rows, heads, v_width)
    batch = replace(batch, seq_lens=lengths, page_table=page_table)
    launch_prefill_hopper(AttentionCall(q, k_pages, v_pages, batch, scale, attended), skip_decodes=False)
    attended = attended[..., :value_dim]
    if others is None:
        return attended.contiguous()
    return torch.where(is_new.view(torch.bool)[:, None, None], attended, others)
