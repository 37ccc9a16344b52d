"""The paged attention kernels against plain attention in float64, on the GPU or under the interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.ops.interpreter import DEVICE
from tests.ops.oracles import PAGE_SIZE, make_batch
from tests.whole import covering, unless_long
from weft.forward_context import Batch, MixedBatch, Verification

from weft.ops.attention import AttentionCall, paged_attention  # isort: skip
from weft.ops.backend import Backend  # isort: skip
from weft.config.sum_order import MOST_QUERY_ROWS  # isort: skip
from weft.ops.attention.decode import HELD_HEAD, DecodeChoice, launch_decode  # isort: skip
from weft.ops.attention.merge import most_splits  # isort: skip
from weft.ops.attention.tiles import Tile  # isort: skip
from weft.ops.triton.sizes import next_power_of_2  # isort: skip

ON_GPU = DEVICE == "cuda"
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}

CASES = {
    "decode": ([1, 1, 1], [5, 300, 16], 3),
    "split decode": ([1, 1], [256, 1100], 2),
    "one decode": ([1], [64], 1),
    "first token alone": ([1], [0], 0),
    "prefill": ([1, 63, 65], [0, 0, 0], 0),
    "chunked prefill": ([7, 64], [33, 146], 0),
    "mixed": ([1, 1, 1, 130, 3], [4, 257, 0, 0, 62], 2),
}
HEADS = [(4, 4, 16), (6, 2, 24), (5, 1, 64), (2, 2, 464)]
if ON_GPU:
    HEADS = [
        (16, 8, 128),
        (16, 2, 256),
        (14, 2, 64),
        (24, 8, 128),
        (5, 1, 80),
        (64, 4, 128),
        (64, 8, 64),
        (16, 16, 464),
    ]


def on_device(batch: Batch) -> Batch:
    moved = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    return Batch(**{k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in moved.items()})


def sinks_of(q: Tensor, heads: tuple[int, int, int]) -> Tensor | None:
    """Every other geometry has sinks by head. Some of the others with a bias have sinks by row and head."""
    if (index := HEADS.index(heads)) % 2:
        return torch.randn(heads[0], device=DEVICE).to(q.dtype) + 1.0
    if index % 4 == 0:
        return None
    sinks = torch.full(q.shape[:2], torch.nan, dtype=q.dtype, device=DEVICE)
    sinks[:] = torch.randn(sinks.shape, device=DEVICE) + 1.0
    return sinks


def bias_of(q: Tensor, heads: tuple[int, int, int]) -> Tensor | None:
    """Half of the geometries add numbers to the scores of 70 keys or, beyond most contexts, of 300."""
    index = HEADS.index(heads)
    if index % 4 < 2:
        return None
    bias = torch.full((*q.shape[:2], 70 if index % 2 else 300), torch.nan, dtype=q.dtype, device=DEVICE)
    bias[:] = torch.randn(bias.shape, device=DEVICE) / heads[2] ** -0.5
    return bias


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """The last ``len(q)`` of ``len(k)`` positions attend causally, in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k)
    offset = k.shape[0] - q.shape[0]
    distance = torch.arange(q.shape[0])[:, None] + offset - torch.arange(k.shape[0])
    if bias is not None:
        for back in range(min(bias.shape[2], k.shape[0])):
            query, key = (distance == back).nonzero().to(q.device).unbind(1)
            scores[:, query, key] += bias[query, :, back].double().T
    scores *= scale
    future = distance < 0
    scores = scores.masked_fill(future.to(q.device), -torch.inf)
    if sinks is not None:
        each = sinks.double().expand(len(q), -1).T[..., None]
        scores = torch.cat([scores, each], dim=2)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[:, :, : len(k)], v)


def run(
    case: str,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    as_mixture: bool = False,
    backend: Backend = Backend.TRITON,
) -> tuple[Tensor, list[Tensor], Batch]:
    """Return the kernel's output, the expected output of each sequence, and the batch. With ``as_mixture``, the batch
    is a graph's: only the device knows the number of sequences, and no sequence prefills."""
    query_lens, contexts, num_decodes = CASES[case]
    hq, hkv, dim = heads
    batch = on_device(make_batch(query_lens, contexts, num_decodes=num_decodes, pad_tokens=3, pad_seqs=2))
    pages = int(batch.page_table.max()) + 1
    caches = [torch.full((pages, PAGE_SIZE, hkv, dim), torch.nan, dtype=dtype, device=DEVICE) for _ in range(2)]
    q = torch.full((batch.num_tokens + 3, hq, dim), torch.nan, dtype=dtype, device=DEVICE)
    q[: batch.num_tokens] = torch.randn(batch.num_tokens, hq, dim)
    sinks, bias = sinks_of(q, heads), bias_of(q, heads)
    expected, begin = [], 0
    for s, (length, context) in enumerate(zip(query_lens, contexts, strict=True)):
        positions = torch.arange(length + context)
        slots = batch.page_table[s].long()[positions // PAGE_SIZE] * PAGE_SIZE + positions.to(DEVICE) % PAGE_SIZE
        k, v = (torch.randn(length + context, hkv, dim, device=DEVICE).to(dtype) for _ in range(2))
        for cache, values in zip(caches, (k, v), strict=True):
            cache.flatten(0, 1)[slots] = values
        rows = slice(begin, begin + length)
        added = None if bias is None else bias[rows]
        own = sinks if sinks is None or sinks.dim() == 1 else sinks[rows]
        expected.append(plain_attention(q[rows], k, v, dim**-0.5, own, added))
        begin += length
    out = torch.full_like(q, torch.nan)
    if as_mixture:
        counts = torch.tensor([batch.num_tokens, *[len(query_lens)] * 2], dtype=torch.int32, device=DEVICE)
        batch = dataclasses.replace(batch, mixed=MixedBatch(counts, batch.state_slots, max_prefills=0))
    options = {"scale": dim**-0.5, "sinks": sinks, "bias": bias}
    paged_attention(q, *caches, batch, **options, backend=backend, out=out)
    return out, expected, batch


@pytest.mark.parametrize(("case", "heads"), covering(CASES, HEADS, of=1))
@pytest.mark.parametrize("dtype", list(TOLERANCE) if ON_GPU else [torch.float32])
def test_equals_plain_attention(case: str, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    for backend in (Backend.TRITON,) if ON_GPU else (Backend.TRITON, Backend.TORCH):
        out, expected, batch = run(case, heads, dtype, backend=backend)
        want = torch.cat(expected)
        error = (out[: batch.num_tokens].double() - want).norm() / want.norm()
        assert error < TOLERANCE[dtype]
        assert (out[batch.num_tokens :] == 0).all(), "padding rows are written, as zeros"


@pytest.mark.parametrize("heads", HEADS[: 2 if ON_GPU else 1])
def test_a_mixture_of_decodes_alone(heads: tuple[int, int, int]) -> None:
    """The last layer of a captured pass computes these rows. One launch suffices, and does not write padding."""
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    out, expected, batch = run("split decode", heads, dtype, as_mixture=True)
    want = torch.cat(expected)
    assert (out[: batch.num_tokens].double() - want).norm() / want.norm() < TOLERANCE[dtype]
    assert out[batch.num_tokens :].isnan().all()


VERIFIED = [(heads, n) for heads in HEADS for n in (2, 3, 4, 8)] if ON_GPU else []
VERIFIED = VERIFIED or [*zip(HEADS, (2, 4, 8, 3), strict=True), (HEADS[2], 3)]


@pytest.mark.parametrize(("heads", "query_len"), unless_long(VERIFIED[::2], VERIFIED))
@pytest.mark.parametrize("dtype", list(TOLERANCE) if ON_GPU else [torch.float16])
def test_drafts_are_verified(heads: tuple[int, int, int], query_len: int, dtype: torch.dtype) -> None:
    """A few tokens of every sequence: the last split holds some, one or none of the keys that the first of them see."""
    hq, hkv, dim = heads
    contexts = [1, 256 - query_len, 257 - query_len, 300]
    batch = on_device(make_batch([query_len] * len(contexts), contexts, pad_seqs=1))
    slots = torch.zeros(len(contexts) + 1, query_len, dtype=torch.int32, device=DEVICE)
    batch = dataclasses.replace(batch, verification=Verification(query_len, slots))
    cache = torch.full((int(batch.page_table.max()) + 1, PAGE_SIZE, hkv, dim), torch.nan, dtype=dtype, device=DEVICE)
    q = torch.randn(batch.num_tokens, hq, dim, device=DEVICE).to(dtype)
    sinks, bias, expected = sinks_of(q, heads), bias_of(q, heads), list[Tensor]()
    for s, context in enumerate(contexts):
        positions = torch.arange(context + query_len, device=DEVICE)
        values = torch.randn(context + query_len, hkv, dim, device=DEVICE).to(dtype)
        cache.flatten(0, 1)[batch.page_table[s].long()[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE] = (
            values
        )
        rows = slice(s * query_len, (s + 1) * query_len)
        added = None if bias is None else bias[rows]
        own = sinks if sinks is None or sinks.dim() == 1 else sinks[rows]
        expected.append(plain_attention(q[rows], values, values, dim**-0.5, own, added))
    want, given = torch.cat(expected), {"scale": dim**-0.5, "sinks": sinks, "bias": bias}
    if not ON_GPU:
        reference = paged_attention(q, cache, cache, batch, **given, backend=Backend.TORCH)
        assert (reference[: len(want)].double() - want).norm() / want.norm() < TOLERANCE[dtype]
    out = torch.full_like(q, torch.nan)
    paged_attention(q, cache, cache, batch, **given, backend=Backend.TRITON, out=out)
    assert (out.double() - want).norm() / want.norm() < TOLERANCE[dtype]
    rows = query_len * hq // hkv
    if rows > MOST_QUERY_ROWS or dtype == torch.float32:
        return
    pipelined = Tile(max(16, next_power_of_2(rows)), 64 if dim <= HELD_HEAD else 16, 4, 2, False)
    held = pipelined._replace(held_splits=16, held_keys=256, warps=8)
    for tile in (pipelined, held) if dim <= HELD_HEAD and bias is None else (pipelined,):
        out = torch.full_like(q, torch.nan)
        call = AttentionCall(q, cache, cache, batch, dim**-0.5, out, sinks, bias=bias)
        launch_decode(call, DecodeChoice(tile), query_len=query_len)
        assert (out.double() - want).norm() / want.norm() < TOLERANCE[dtype], tile


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """The same sequence alone, among others, and with a wider page table: bitwise the same row."""
    torch.manual_seed(1)
    hq, hkv, dim, dtype = 4, 2, 16, torch.float32
    results = []
    keys = torch.randn(700, hkv, dim)
    query = torch.randn(1, hq, dim)
    for neighbours in (0, 1, 6):
        batch = make_batch([1] * (neighbours + 1), [699] + [900] * neighbours, num_decodes=neighbours + 1)
        pages = int(batch.page_table.max()) + 1
        cache = torch.randn(pages, PAGE_SIZE, hkv, dim, dtype=dtype)
        positions = torch.arange(700)
        cache.flatten(0, 1)[batch.page_table[0].long()[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE] = (
            keys
        )
        q = torch.cat([query, torch.randn(neighbours, hq, dim)]).to(DEVICE)
        cache = cache.to(DEVICE)
        out = paged_attention(q, cache, cache, on_device(batch), scale=0.2, backend=Backend.TRITON)
        results.append(out[0].clone())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize(("ahead", "stages", "aim"), [(False, 2, 1), (True, 3, 1), (True, 2, 8192), (False, 3, 8192)])
def test_every_decode_schedule_gives_the_same_bits(ahead: bool, stages: int, aim: int) -> None:
    """How the loads are scheduled, and how many splits a program takes, leaves the arithmetic alone."""
    batch = on_device(make_batch([1, 1, 1], [700, 255, 3], num_decodes=3))
    cache = torch.randn(int(batch.page_table.max()) + 1, PAGE_SIZE, 2, 16, device=DEVICE)
    q = torch.randn(3, 4, 16, device=DEVICE)
    want = paged_attention(q, cache, cache, batch, scale=0.2, backend=Backend.TRITON)
    out = torch.full_like(q, torch.nan)
    choice = DecodeChoice(Tile(16, 64, 4, stages, ahead), aim=aim)
    launch_decode(AttentionCall(q, cache, cache, batch, 0.2, out), choice)
    assert torch.equal(out, want)


HELD = [(HEADS[0], 256), (HEADS[1], 64), *([(HEADS[1], 128)] * ON_GPU)]


@pytest.mark.parametrize(("heads", "held_keys"), unless_long(HELD[:1], HELD))
def test_splits_that_are_loaded_before_the_wait(heads: tuple[int, int, int], held_keys: int) -> None:
    """The newest token's keys come apart: alone, first and last of a split. Sequences of many splits, or of long ones,
    take the loop."""
    hq, hkv, dim = heads
    lens = [1, 2, 64, 65, 66, 255, 256, 257, 513, 551, 2300]
    batch = on_device(make_batch([1] * len(lens), [n - 1 for n in lens], num_decodes=len(lens), pad_seqs=1))
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    cache = torch.full((int(batch.page_table.max()) + 1, PAGE_SIZE, hkv, dim), torch.nan, dtype=dtype, device=DEVICE)
    q = torch.randn(len(lens), hq, dim, device=DEVICE).to(dtype)
    keys = [torch.randn(n, hkv, dim, device=DEVICE).to(dtype) for n in lens]
    for s, values in enumerate(keys):
        positions = torch.arange(lens[s], device=DEVICE)
        cache.flatten(0, 1)[batch.page_table[s].long()[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE] = (
            values
        )
    out = torch.full_like(q, torch.nan)
    sinks, v_scale = sinks_of(q, heads), torch.tensor([0.5], device=DEVICE)
    tile = Tile(16, 64, 8, 2, True, held_splits=4, held_keys=held_keys)
    choice = DecodeChoice(tile, double_from=550)
    launch_decode(AttentionCall(q, cache, cache, batch, dim**-0.5, out, sinks, v_scale), choice)
    for s, values in enumerate(keys):
        want = plain_attention(q[s : s + 1], values, values, dim**-0.5, sinks) / 2
        assert (out[s : s + 1].double() - want).norm() / want.norm() < TOLERANCE[dtype], lens[s]


def test_lengths_are_read_on_the_device() -> None:
    """A launch shaped by one batch (as a graph's is) serves another of the same padded sizes."""
    torch.manual_seed(2)
    query_lens, contexts = [1, 9, 1], [30, 12, 300]
    batch = on_device(make_batch(query_lens, contexts, num_decodes=0, pad_tokens=5, pad_seqs=3))
    frozen = dataclasses.replace(batch, num_tokens=16, num_seqs=6, num_decodes=1, max_query_len=16, max_seq_len=400)
    cache = torch.randn(int(batch.page_table.max()) + 1, PAGE_SIZE, 2, 16, device=DEVICE)
    q = torch.randn(16, 4, 16, device=DEVICE)
    out = torch.full_like(q, torch.nan)
    paged_attention(q, cache, cache, frozen, scale=0.2, backend=Backend.TRITON, out=out)
    want = paged_attention(q, cache, cache, batch, scale=0.2, backend=Backend.TORCH)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("table_tokens", "double_from"), [(4096, 512), (1000, 512), (5000, 512), (100, 512), (9000, 64)]
)
def test_every_sequence_has_room_for_its_splits(table_tokens: int, double_from: int) -> None:
    """Splits of 64 tokens, of 128 beyond ``double_from`` tokens, and of 256 beyond eight times as many."""
    lengths = range(1, table_tokens + 1)
    splits = [-(-n // (64 << (n > double_from) + (n > 8 * double_from))) for n in lengths]
    assert most_splits(table_tokens, double_from, 64) == max(splits)


@pytest.mark.parametrize("extent", [0, 150])
def test_a_token_has_the_bits_that_it_has_alone(extent: int) -> None:
    """The token runs in a batch of many decodes, together with a prompt, and as a draft, without and with a bias. The
    number of sequences chooses other tiles."""
    hq, hkv, dim = 4, 2, 64
    contexts = [300, 140, 127, *[9] * 40]
    batch = on_device(make_batch([1] * len(contexts), contexts, num_decodes=len(contexts)))
    caches = [torch.randn(int(batch.page_table.max()) + 1, PAGE_SIZE, hkv, dim, device=DEVICE).half() for _ in range(2)]
    q = torch.randn(len(contexts) + 70, hq, dim, device=DEVICE).half()
    biases = torch.randn(len(q), hq, extent, device=DEVICE).half() * dim**0.5

    def attend(rows: range | list[int], batch: Batch, tables: Tensor) -> Tensor:
        batch = dataclasses.replace(on_device(batch), page_table=tables)
        bias = biases[rows] if extent else None
        return paged_attention(q[rows], *caches, batch, scale=dim**-0.5, bias=bias, backend=Backend.INVARIANT_TRITON)

    together = attend(range(len(contexts)), batch, batch.page_table)
    for i, context in enumerate(contexts[:4]):
        alone = make_batch([1], [context], num_decodes=1)
        assert torch.equal(attend([i], alone, batch.page_table[i : i + 1]), together[i : i + 1])
    beside = attend(range(71), make_batch([1, 70], [300, 70], num_decodes=1), batch.page_table[:2])
    assert torch.equal(beside[:1], together[:1])
    drafts = make_batch([3, 3], [298, 138])
    drafts = dataclasses.replace(drafts, verification=Verification(3, torch.zeros(2, 3, dtype=torch.int32)))
    verified = attend([50, 51, 0, 52, 53, 1], drafts, batch.page_table[:2])
    assert torch.equal(verified[[2, 5]], together[:2])
