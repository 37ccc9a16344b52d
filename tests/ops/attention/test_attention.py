"""Paged attention and the writes to the KV cache, against plain attention over contiguous tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.oracles import PAGE_SIZE, make_batch
from weft.forward_context import Batch
from weft.ops.attention import copy_pages, paged_attention, store_kv
from weft.ops.backend import Backend

TORCH = Backend.TORCH


def plain_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    """The last ``len(q)`` of ``len(k)`` positions attend causally, in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1).double() for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    offset = k.shape[0] - q.shape[0]
    future = torch.arange(k.shape[0])[None] > torch.arange(q.shape[0])[:, None] + offset
    scores = scores.masked_fill(future, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, len(q), 1)], dim=2)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[:, :, : len(k)], v)


def filled_cache(batch: Batch, keys: list[Tensor], heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """A cache of NaN in which only the sequences' own entries are numbers; values are keys + 1."""
    pages = int(batch.page_table.max()) + 1
    k_cache, v_cache = (torch.full((pages, PAGE_SIZE, heads, dim), torch.nan) for _ in range(2))
    for s, k in enumerate(keys):
        positions = torch.arange(k.shape[0])
        slots = batch.page_table[s].long()[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        store_kv(k, k + 1, k_cache, v_cache, slots)
    return k_cache, v_cache


CASES = {
    "decode": ([1, 1, 1], [0 + 5, 209, 16], 3),
    "one decode": ([1], [64], 1),
    "prefill": ([1, 63, 65], [0, 0, 0], 0),
    "chunked prefill": ([7, 64], [33, 146], 0),
    "mixed": ([1, 1, 1, 130, 3], [4, 15, 0, 0, 62], 2),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
def test_equals_plain_attention(case: str, heads: tuple[int, int]) -> None:
    query_lens, contexts, num_decodes = CASES[case]
    hq, hkv = heads
    batch = make_batch(query_lens, contexts, num_decodes=num_decodes, pad_tokens=3, pad_seqs=2)
    keys = [torch.randn(q + c, hkv, 8) for q, c in zip(query_lens, contexts, strict=True)]
    k_cache, v_cache = filled_cache(batch, keys, hkv, 8)
    q = torch.randn(batch.num_tokens + 3, hq, 8)
    q[batch.num_tokens :] = torch.nan
    given, sinks = torch.full_like(q, torch.nan), torch.randn(hq) + 1.0 if heads == (6, 2) else None
    out = paged_attention(q, k_cache, v_cache, batch, scale=0.3, sinks=sinks, backend=TORCH, out=given)
    assert out is given
    assert (out[batch.num_tokens :] == 0).all()
    starts = batch.cu_seqlens_q.tolist()
    for s, k in enumerate(keys):
        rows = slice(starts[s], starts[s + 1])
        expected = plain_attention(q[rows], k, k + 1, 0.3, sinks)
        torch.testing.assert_close(out[rows].double(), expected, atol=2e-6, rtol=1e-5)


def test_store_kv_writes_only_its_slots() -> None:
    k_cache, v_cache = torch.zeros(2, 3, PAGE_SIZE, 2, 5).bfloat16().unbind(0)
    k, v = torch.randn(2, 3, 2, 5)
    slots = torch.tensor([5, 11, 0])
    store_kv(k, v, k_cache, v_cache, slots)
    for cache, given in ((k_cache, k), (v_cache, v)):
        flat = cache.view(-1, 2, 5)
        assert torch.equal(flat[slots], given.bfloat16())
        assert flat.count_nonzero() == given.numel()


def test_store_kv_takes_strided_views() -> None:
    qkv = torch.randn(3, 6, 5)
    k_cache, v_cache = torch.zeros(2, 2, PAGE_SIZE, 2, 5).unbind(0)
    store_kv(qkv[:, 2:4], qkv[:, 4:], k_cache, v_cache, torch.tensor([4, 5, 6]))
    assert torch.equal(k_cache[1, :3], qkv[:, 2:4])
    assert torch.equal(v_cache[1, :3], qkv[:, 4:])


def test_copy_pages_reads_before_it_writes() -> None:
    caches = [torch.arange(4.0)[:, None].repeat(1, 3), torch.arange(4.0) * 10]
    copy_pages(caches, torch.tensor([1, 2], dtype=torch.int32), torch.tensor([2, 3], dtype=torch.int32))
    assert caches[0][:, 0].tolist() == [0, 1, 1, 2]
    assert caches[1].tolist() == [0, 10, 10, 20]
