"""Indexed attention against a plain definition in float64, by torch and by the kernels."""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.interpreter import DEVICE
from tests.ops.oracles import PAGE_SIZE, make_batch
from tests.whole import covering, unless_long
from weft.forward_context import Batch, MixedBatch

from weft.ops.backend import Backend  # isort: skip
from weft.ops.indexed_attention import indexed_attention, pool_entries, select_pools, store_index_keys  # isort: skip
from weft.ops.indexed_attention import attend, dense, select  # isort: skip

BACKENDS = [Backend.TORCH, Backend.TRITON]
ON_GPU = DEVICE == "cuda"
DTYPES = [torch.float32, torch.bfloat16 if ON_GPU else torch.float16]
WAYS = [(Backend.TORCH, torch.float32), *((Backend.TRITON, dtype) for dtype in DTYPES)]
"""The reference rounds as torch does, so only float32 is exact there."""
CASES = {
    "decode": ([1, 1, 1], [5, 300, 16], 3),
    "first tokens": ([1, 2], [0, 0], 0),
    "prefill": ([1, 63, 65], [0, 0, 0], 0),
    "mixed": ([1, 1, 1, 70, 3], [4, 257, 0, 0, 62], 3),
}
LATE = {"late": ([70, 40], [225, 105], 0)}
"""Blocks of prompts that read nearly as many keys as blocks may, in float16 and in float32."""


def batch_of(case: str, *, as_mixture: bool = False) -> Batch:
    query_lens, contexts, num_decodes = (CASES | LATE)[case]
    batch = make_batch(query_lens, contexts, num_decodes=num_decodes, pad_tokens=3, pad_seqs=2)
    moved: dict[str, Any] = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    moved = {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in moved.items()}
    batch = Batch(**moved | {"chunks": None})
    if not as_mixture:
        return batch
    counts = torch.tensor([batch.num_tokens, batch.num_seqs, num_decodes], dtype=torch.int32, device=DEVICE)
    mixed = MixedBatch(counts, batch.state_slots, len(query_lens))
    return dataclasses.replace(batch, mixed=mixed, max_seq_len=1)  # the host's number is that of the capture


def tokens_of(batch: Batch) -> list[tuple[int, int]]:
    """Sequence and position of every real token."""
    starts, lengths = batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist()
    return [
        (s, lengths[s] - (starts[s + 1] - t)) for s in range(batch.num_seqs) for t in range(starts[s], starts[s + 1])
    ]


def slots_of(batch: Batch, seq: int, tokens: Tensor) -> Tensor:
    return batch.page_table[seq].long().cpu()[tokens // PAGE_SIZE] * PAGE_SIZE + tokens % PAGE_SIZE


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def index_keys(batch: Batch, pool: int, dim: int, dtype: torch.dtype, whole: bool) -> tuple[Tensor, list[Tensor]]:
    """A cache with NaN wherever no complete pool is, and each sequence's keys."""
    pages = int(batch.page_table.max()) + 1
    cache, keys = poisoned(pages, PAGE_SIZE, dim // pool, dtype=dtype), []
    for s in range(batch.num_seqs):
        count = int(batch.seq_lens[s]) // pool
        found = torch.randn(count, dim) if not whole else torch.randint(-1, 2, (count, dim)).float()
        keys.append(found.to(dtype).double())
        places = slots_of(batch, s, torch.arange(count) * pool) // pool
        cache.view(-1, dim)[places.to(DEVICE)] = found.to(dtype).to(DEVICE)
    return cache, keys


@pytest.mark.parametrize(
    ("case", "sizes", "whole", "backend"),
    covering(CASES, [(4, 3, 20, 5), (1, 1, 16, 17), (2, 20, 32, 9)], [False, True], BACKENDS, of=1),
)
def test_selection(case: str, sizes: tuple[int, int, int, int], whole: bool, backend: Backend) -> None:
    """Pools may have equal scores if inputs are whole numbers. The earlier pool is then selected."""
    pool, heads, dim, count = sizes
    batch = batch_of(case)
    cache, keys = index_keys(batch, pool, dim, torch.float32, whole)
    q, weights = (poisoned(batch.num_tokens + 3, *s, dtype=torch.float32) for s in ((heads, dim), (heads,)))
    shape = (batch.num_tokens, heads, dim)
    q[: batch.num_tokens] = torch.randint(-1, 2, shape).float() if whole else torch.randn(shape)
    weights[: batch.num_tokens] = torch.randint(-1, 3, shape[:2]).float() if whole else torch.randn(shape[:2])
    given = None if heads == 1 else weights
    selected = select_pools(q, given, cache, batch, pool=pool, count=count, backend=backend)
    assert selected.dtype == torch.int32 and selected.shape == (len(q), count)
    for row, (s, position) in enumerate(tokens_of(batch)):
        complete = (position + 1) // pool
        scores = (q[row].double().cpu() @ keys[s][:complete].T).relu()
        total = scores.sum(0) if given is None else (scores * weights[row].double().cpu()[:, None]).sum(0)
        best = total.sort(descending=True, stable=True).indices[:count].sort().values.tolist()
        assert selected[row].tolist() == best + [-1] * (count - len(best)), f"token {row}"


@pytest.mark.parametrize(
    ("case", "sizes", "as_mixture", "way"),
    covering(CASES, [(4, 2, 24, 24), (5, 1, 40, 32), (3, 1, 16, 16)], [False, True], WAYS, of=1),
)
def test_attention(
    case: str, sizes: tuple[int, int, int, int], as_mixture: bool, way: tuple[Backend, torch.dtype]
) -> None:
    """Separate keys and values, and latents whose first columns are the values."""
    (hq, hkv, dim, value_dim), (backend, dtype) = sizes, way
    batch, pool, count = batch_of(case, as_mixture=as_mixture), 4, 6
    pages = int(batch.page_table.max()) + 1
    k_cache = poisoned(pages, PAGE_SIZE, hkv, dim, dtype=dtype)
    v_cache = k_cache[..., :value_dim] if hkv == 1 else poisoned(pages, PAGE_SIZE, hkv, value_dim, dtype=dtype)
    for s in range(batch.num_seqs):
        slots = slots_of(batch, s, torch.arange(int(batch.seq_lens[s]))).to(DEVICE)
        k_cache.flatten(0, 1)[slots] = torch.randn(len(slots), hkv, dim, device=DEVICE).to(dtype)
        if hkv > 1:
            v_cache.flatten(0, 1)[slots] = torch.randn(len(slots), hkv, value_dim, device=DEVICE).to(dtype)
    q = poisoned(batch.num_tokens + 3, hq, dim, dtype=dtype)
    q[: batch.num_tokens] = torch.randn(batch.num_tokens, hq, dim).to(dtype)
    selected = torch.full((len(q), count), -1, dtype=torch.int32)
    expected = torch.zeros(len(q), hq, value_dim, dtype=torch.float64)
    for row, (s, position) in enumerate(tokens_of(batch)):
        complete = (position + 1) // pool
        mine = torch.randperm(complete)[:count].sort().values
        selected[row, : len(mine)] = mine.int()
        tokens = torch.cat([(mine[:, None] * pool + torch.arange(pool)).flatten(),
                            torch.arange(complete * pool, position + 1)])  # fmt: skip
        slots = slots_of(batch, s, tokens).to(DEVICE)
        k, v = (c.flatten(0, 1)[slots].double().cpu().repeat_interleave(hq // hkv, 1) for c in (k_cache, v_cache))
        scores = torch.einsum("hd,khd->hk", q[row].double().cpu(), k) * 0.3
        expected[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), v)
    out = indexed_attention(q, k_cache, v_cache, selected.to(DEVICE), batch, pool=pool, scale=0.3, backend=backend)
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    assert (out.double().cpu() - expected).abs().max().item() < tolerance


@pytest.mark.parametrize(
    ("case", "sizes", "as_mixture", "dtype"),
    covering(
        ["mixed", "prefill", *LATE], [(4, 2, 24, 24), (6, 2, 40, 32), (24, 2, 16, 16)], [False, True], DTYPES, of=1
    ),
)
def test_blocks_of_tokens(
    case: str, sizes: tuple[int, int, int, int], as_mixture: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of a prompt read all keys, others and decodes their selections. With groups of 12 some rows are empty."""
    blocks: list[Any] = []

    def attend_dense(*args: Any, **kwargs: Any) -> None:
        blocks.append(args)
        dense.attend_dense(*args, **kwargs)

    monkeypatch.setattr(attend, "_splits", lambda *_: (0, 1))
    monkeypatch.setattr(dense, "is_small", lambda _: False)
    monkeypatch.setattr(attend, "attend_dense", attend_dense)
    test_attention(case, sizes, as_mixture, (Backend.TRITON, dtype))
    assert blocks


@pytest.mark.parametrize(
    ("case", "sizes", "as_mixture", "dtype"),
    unless_long(
        [("mixed", (4, 2, 24, 24), True, DTYPES[-1])],
        product(["mixed", *LATE], [(4, 2, 24, 24), (3, 1, 16, 16)], [False, True], DTYPES),
    ),
)
def test_programs_that_share_the_keys_of_a_token(
    case: str, sizes: tuple[int, int, int, int], as_mixture: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then no token is left to blocks, whose results the merge would overwrite."""
    monkeypatch.setattr(attend, "_LEAST_SPLIT", 16)
    monkeypatch.setattr(dense, "is_small", lambda _: False)
    assert attend._splits(70, 27, 1) == (16, 2)
    test_attention(case, sizes, as_mixture, (Backend.TRITON, dtype))


@pytest.mark.parametrize("held", unless_long([32], [16, 32]))
def test_more_scores_than_a_program_holds(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And fewer rows of scores in memory than the step has."""
    monkeypatch.setattr(select, "_HELD", held)
    monkeypatch.setattr(select, "_SCORES", 400)
    for whole in (False, True):
        test_selection("mixed", (4, 3, 20, 5), whole, Backend.TRITON)


def test_keys_of_pools() -> None:
    """Keys of complete pools are stored, others are not, and padding writes to page 0 alone."""
    pool, slots = 2, torch.tensor([9, 10, 11, 12, 3, 0, 0])
    entries = torch.arange(16.0).view(4, 4, 1)
    pools = pool_entries(entries, slots, pool)
    assert pools[0].flatten().tolist() == [8, 9] and pools[2].flatten().tolist() == [10, 11]
    cache = torch.zeros(4, 4, 3)
    store_index_keys(torch.arange(1.0, 8.0)[:, None].expand(-1, 6), cache, slots, pool)
    stored = cache.view(-1, 6)[:, 0]
    assert stored[1:].tolist() == [5, 0, 0, 1, 3, 0, 0]
