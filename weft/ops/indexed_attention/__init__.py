"""Attention over the tokens that an indexer selects (DeepSeek Sparse Attention, arXiv 2512.02556), over a paged cache.

Job: score pools of earlier tokens per query, select the best, attend to their tokens. Owns: the layout of index keys,
and which tokens a query sees. Does not know: layers, how queries and index keys are projected, normalised or pooled.

A *pool* is ``pool`` consecutive tokens of a sequence, from a multiple of ``pool`` on. Each complete pool has one index
key. A query sees the tokens of its best complete pools, and all tokens after the last complete pool, its own included.

Index keys are stored in pages as ``[num_pages, page_size, dim / pool]``: a page of ``page_size`` tokens holds
``page_size / pool`` keys of ``dim`` numbers. Pages never cut a pool. Entries of pools that are not complete may hold
anything, NaN included; they are never read.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.forward_context import Batch
from weft.ops.backend import Backend, with_kernel

_BLOCK_ELEMENTS = 1 << 22
"""Elements that the reference gathers at a time."""


def pool_entries(entries: Tensor, slot_mapping: Tensor, pool: int) -> Tensor:
    """Gather the tokens of the pool that ends with each token of a step: ``[T, pool, E]``.

    Rows of tokens that end no pool are arbitrary.

    Args:
        entries: ``[num_pages, page_size, E]``, one entry per token; this step's are written. Pages never cut a pool.
        slot_mapping: ``[T]`` int64.
    """
    offsets = torch.arange(1 - pool, 1, device=slot_mapping.device)
    return entries.flatten(0, 1)[(slot_mapping[:, None] + offsets).clamp_(min=0)]


def store_index_keys(keys: Tensor, cache: Tensor, slot_mapping: Tensor, pool: int) -> None:
    """Write the key of each pool that ends with a token of this step, in place.

    Args:
        keys: ``[T, dim]``; rows of tokens that end no pool are not written, but for page 0.
        cache: ``[num_pages, page_size, dim / pool]``.
        slot_mapping: ``[T]`` int64. Only slots of page 0 may occur more than once.
    """
    ends = slot_mapping % pool == pool - 1
    places = torch.where(ends, slot_mapping // pool, 0)
    cache.view(-1, keys.shape[1]).index_copy_(0, places, keys.to(cache.dtype))


@with_kernel("weft.ops.indexed_attention.select")
def select_pools(
    q: Tensor, weights: Tensor | None, cache: Tensor, batch: Batch, *, pool: int, count: int, backend: Backend
) -> Tensor:
    """Select the ``count`` complete pools of each token's sequence with the largest ``sum_h weights[h] relu(q[h] k)``.

    The earlier of pools with equal scores is selected.

    Args:
        q: ``[T, heads, dim]``.
        weights: ``[T, heads]``; None: all are 1.
        cache: ``[num_pages, page_size, dim / pool]`` index keys in q's dtype; this step's are written.

    Returns:
        ``[T, count]`` int32, pools in ascending order, then -1 if there are fewer. Padding rows are arbitrary.
    """
    page_size, dim = cache.shape[1], q.shape[2]
    per_page = page_size // pool
    pages, positions = token_rows(batch, q.shape[0])
    num_pools = _longest(batch, page_size) // pool
    selected = torch.full((q.shape[0], count), -1, dtype=torch.int32, device=q.device)
    if not num_pools:
        return selected
    keys = cache.view(-1, per_page, dim)
    order = torch.arange(num_pools, device=q.device)
    for rows in torch.arange(q.shape[0], device=q.device).split(max(1, _BLOCK_ELEMENTS // (num_pools * dim))):
        complete = order < ((positions[rows] + 1) // pool)[:, None]
        places = torch.where(complete, order, 0)
        found = keys[pages[rows].gather(1, places // per_page), places % per_page].float()
        scores = torch.matmul(q[rows].float(), found.transpose(1, 2)).relu()
        by_head = scores if weights is None else scores * weights[rows].float()[..., None]
        total = by_head.sum(1).masked_fill(~complete, -torch.inf)
        best = total.sort(dim=1, descending=True, stable=True).indices[:, :count]
        is_real = complete.gather(1, best)
        last = torch.where(is_real, best, num_pools).sort(dim=1).values
        selected[rows, : best.shape[1]] = torch.where(last < num_pools, last, -1).int()
    return selected


@with_kernel("weft.ops.indexed_attention.attend")
def indexed_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    selected: Tensor,
    batch: Batch,
    *,
    pool: int,
    scale: float,
    backend: Backend,
) -> Tensor:
    """``softmax(scale * q k^T) v`` of each token over the pools that are selected for it and the tokens after the last
    complete pool.

    Args:
        q: ``[T, Hq, D]``.
        k_cache, v_cache: ``[num_pages, page_size, Hkv, D]`` and ``[num_pages, page_size, Hkv, V]`` in q's dtype; Hq is
            a multiple of Hkv. Both may be views of one cache of latents.
        selected: ``[T, count]`` int32 from ``select_pools``.

    Returns:
        ``[T, Hq, V]`` in q's dtype; padding rows are zero.
    """
    num_rows, num_heads, _ = q.shape
    page_size, num_kv_heads, value_dim = v_cache.shape[1:]
    pages, positions = token_rows(batch, num_rows)
    out = q.new_zeros(num_rows, num_heads, value_dim)
    tail = (positions + 1) // pool * pool
    own = torch.arange(pool, device=q.device)
    count = min(selected.shape[1], _longest(batch, page_size) // pool)
    size = (count + 1) * pool * num_kv_heads * max(q.shape[2], value_dim)
    for rows in torch.arange(num_rows, device=q.device).split(max(1, _BLOCK_ELEMENTS // size)):
        at = positions[rows, None]
        chosen = selected[rows, :count].long()[..., None]
        first = torch.where(chosen >= 0, chosen * pool + own, -1).flatten(1)
        last = tail[rows, None] + own
        tokens = torch.cat([first, torch.where(last <= at, last, -1)], dim=1)
        # Places without a token read the query's own token: real numbers, to which the mask gives no weight.
        seen, tokens = tokens >= 0, torch.where(tokens >= 0, tokens, at)
        slots = pages[rows].gather(1, tokens // page_size) * page_size + tokens % page_size
        k, v = (c.flatten(0, 1)[slots].transpose(1, 2) for c in (k_cache, v_cache))
        queries = q[rows].unflatten(1, (num_kv_heads, -1))
        attended = F.scaled_dot_product_attention(queries, k, v, seen[:, None, None], scale=scale)
        out[rows] = attended.flatten(1, 2).masked_fill(~_is_real(batch, rows)[:, None, None], 0.0)
    return out


def token_rows(batch: Batch, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return page tables of the tokens' sequences ``[T, max_pages]``, and positions ``[T]``, both int64.

    No number is read on the host, so that a captured graph serves every batch of its size. Padding rows read page 0.
    """
    tokens = torch.arange(num_rows, device=batch.cu_seqlens_q.device)
    ends = batch.cu_seqlens_q[1:].contiguous()
    sequences = torch.searchsorted(ends, tokens, right=True).clamp_(max=ends.shape[0] - 1)
    is_real = _is_real(batch, tokens)
    positions = batch.seq_lens[sequences] - (ends[sequences] - tokens)
    pages = torch.where(is_real[:, None], batch.page_table[sequences], 0)
    return pages.long(), torch.where(is_real, positions, 0).long()


def _is_real(batch: Batch, tokens: Tensor) -> Tensor:
    return tokens < batch.cu_seqlens_q[-1]


def _longest(batch: Batch, page_size: int) -> int:
    """Upper bound on a sequence's tokens: the batch's own, or that of its page table if the batch stands for others."""
    most = batch.page_table.shape[1] * page_size
    return most if batch.mixed is not None or batch.token_count is not None else min(most, batch.max_seq_len)
