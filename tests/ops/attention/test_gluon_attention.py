"""Prefill attention for Hopper against plain attention in float64: on such a GPU, or emulated on the CPU."""

# ruff: noqa: E402 (the imports need a version of Triton)
from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch import Tensor

from tests.whole import covering, takes_long, unless_long
from weft.platforms.triton_version import is_known

triton = pytest.importorskip("triton")
if not is_known(triton.__version__):
    pytest.skip("the kernel is for versions of Triton that Weft knows", allow_module_level=True)

from tests.ops.attention.test_triton_attention import plain_attention
from tests.ops.gluon_emulator import Emulator
from weft.forward_context import Batch, MixedBatch
from weft.ops.attention import AttentionCall, paged_attention
from weft.ops.attention import paged as attention
from weft.ops.attention import prefill_hopper as attention_prefill_hopper
from weft.ops.attention.paged import paged_attention_triton
from weft.ops.attention.prefill_hopper import launch_prefill_hopper
from weft.ops.backend import Backend
from weft.ops.fp8 import E4M3
from weft.ops.norm.kernels import rms_norm_triton
from weft.ops.triton import graph_branch
from weft.ops.triton.launch import launches_handled

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
DEVICE = "cuda" if ON_HOPPER else "cpu"
TOLERANCE = 6e-3  # as of the other kernels in bfloat16

# heads, key heads, head_dim, page size
LAYOUTS = {
    "128 of 2": (4, 2, 128, 16), "256 of 8": (8, 1, 256, 32), "64 of 4": (4, 1, 64, 8), "128 of 5": (10, 2, 128, 16),
    "256 of 6": (6, 1, 256, 16), "96 of 1": (3, 3, 96, 16), "224 of 2": (4, 2, 224, 16), "48 of 3": (6, 2, 48, 8),
}  # fmt: skip

FEW_LAYOUTS = ["128 of 2", "256 of 6", "224 of 2"]
"""Layouts of mixtures in CI, where test_equals_plain_attention runs all layouts."""

# On the GPU alone: what would take the emulator minutes.
BIG = {
    "A": (16, 8, 128, 16), "B": (16, 2, 256, 16), "one key head": (64, 1, 128, 32), "64 dims": (32, 8, 64, 64),
    "group of 5": (40, 8, 128, 16), "group of 6": (24, 4, 256, 16), "group of 12": (24, 2, 64, 16),
    "96 dims": (8, 8, 96, 16), "224 dims": (8, 8, 224, 16), "160 dims": (8, 2, 160, 16),
}  # fmt: skip

CACHES = [torch.bfloat16, E4M3]

# query lengths, contexts, leading decodes
CASES = {
    "prefix": ([130], [461], 0),
    "lengths": ([1, 63, 64, 65, 130], [0, 0, 77, 0, 0], 0),
    "decodes": ([1, 1, 70, 2], [300, 5, 63, 130], 2),
}


class Case:
    """Random tensors of a batch, with NaN in every slot that belongs to no token and in every row of padding."""

    multiprocessors = 24
    """Multiprocessors of the emulator."""

    def __init__(
        self, layout: str, query_lens: list[int], contexts: list[int], padding: int = 45, padding_seqs: int = 2,
        cache: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        num_heads, num_kv_heads, head_dim, page = LAYOUTS[layout] if layout in LAYOUTS else BIG[layout]
        self.query_lens, self.lens = query_lens, [q + c for q, c in zip(query_lens, contexts, strict=True)]
        pages_of = [-(-n // page) for n in self.lens]
        ids = (torch.randperm(sum(pages_of)) + 1).split(pages_of)
        # Slices of one buffer, at odd places; nobody may look at a page past a sequence's end.
        starts = [0, *torch.tensor(query_lens).cumsum(0).tolist()]
        table = torch.full((len(ids) + padding_seqs, max(pages_of) + 3), 10**6)
        for row, pages in zip(table, ids, strict=False):
            row[: len(pages)] = pages
        ends, lens = [*starts, *starts[-1:] * padding_seqs], [*self.lens, *[0] * padding_seqs]
        packed = torch.tensor([7, *ends, *lens, *table.flatten().tolist()], dtype=torch.int32, device=DEVICE)
        cu_seqlens_q, seq_lens, page_table = packed[1:].split([len(ends), len(lens), table.numel()])
        shape = (sum(pages_of) + 1, page, num_kv_heads, head_dim)
        self.k, self.v = (torch.full(shape, torch.nan).to(cache) for _ in range(2))
        self.tokens = [tuple(torch.randn(n, num_kv_heads, head_dim).to(cache) for _ in "kv") for n in self.lens]
        for pages, (keys, values) in zip(ids, self.tokens, strict=True):
            slots = (pages[:, None] * page + torch.arange(page)).flatten()[: len(keys)]
            self.k.flatten(0, 1)[slots], self.v.flatten(0, 1)[slots] = keys, values
        self.v_scale = torch.tensor([0.5], device=DEVICE) if cache == E4M3 else None
        self.k, self.v = self.k.to(DEVICE), self.v.to(DEVICE)
        # Rows as of a fused projection, with other things between them.
        rows = torch.full((starts[-1] + padding, num_heads + 3, head_dim), torch.nan).bfloat16()
        rows[: starts[-1]] = torch.randn(starts[-1], num_heads + 3, head_dim)
        self.q = rows.to(DEVICE)[:, :num_heads]
        self.sinks = torch.randn(num_heads).bfloat16().to(DEVICE) if "of 2" not in layout else None
        self.starts, self.scale, self.num_real = starts, head_dim**-0.5, starts[-1]
        empty = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        self.batch = Batch(
            num_tokens=starts[-1], num_seqs=len(ids), num_decodes=0, max_query_len=max(query_lens),
            max_seq_len=max(self.lens), positions=empty, slot_mapping=empty, cu_seqlens_q=cu_seqlens_q,
            seq_lens=seq_lens, page_table=page_table.view(table.shape), state_slots=empty,
        )  # fmt: skip

    def run(self, skip_decodes: bool = False) -> Tensor:
        """The kernel's output, with NaN where it has written nothing."""
        out = torch.full(self.q.shape, torch.nan, dtype=torch.bfloat16, device=DEVICE)
        call = AttentionCall(self.q, self.k, self.v, self.batch, self.scale, out, self.sinks, self.v_scale)
        emulator = Emulator()
        with ExitStack() as stack:
            if not ON_HOPPER:  # idle programs take the emulator time
                stack.enter_context(launches_handled(emulator.handle))
                stack.enter_context(patch.object(attention_prefill_hopper, "MULTIPROCESSORS", self.multiprocessors))
            launch_prefill_hopper(call, skip_decodes=skip_decodes)
        self.used_barriers = emulator.used_barriers
        return out.cpu()

    def check(self, out: Tensor, first: int = 0, last_rows: int = 10**9) -> None:
        """Sequences from ``first`` on are right (at least their last rows), and padding is zero."""
        for seq in range(first, len(self.lens)):
            begin, end = self.starts[seq : seq + 2]
            begin = max(begin, end - last_rows)
            k, v = (t.to(DEVICE) for t in self.tokens[seq])
            want = plain_attention(self.q[begin:end], k, v, self.scale, self.sinks).cpu()
            want = want if self.v_scale is None else want * self.v_scale.item()
            got = out[begin:end].double()
            assert (got - want).norm() / want.norm() < TOLERANCE, (seq, self.lens[seq])
            assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).max() < 4 * TOLERANCE, "one row is noisier"
        assert (out[self.num_real :] == 0).all()

    def as_mixture(self, num_decodes: int, max_prefills: int) -> Case:
        """The same batch for a captured graph: what is real is known to the device alone."""
        counts = torch.tensor([9, self.num_real, len(self.lens), num_decodes], dtype=torch.int32, device=DEVICE)[1:]
        mixture = MixedBatch(counts, self.batch.state_slots, max_prefills)
        self.batch = dataclasses.replace(self.batch, mixed=mixture, num_decodes=1)
        return self


@pytest.mark.parametrize(
    ("cache", "heads", "case"),
    covering(
        CACHES,
        [("128 of 2", True), ("64 of 4", True), ("256 of 8", False), ("128 of 5", False), ("96 of 1", True),
         ("48 of 3", False),
         *unless_long([], [("128 of 2", False), ("128 of 5", True), ("256 of 6", False), ("96 of 1", False),
                           ("224 of 2", False)])],
        CASES,
        of=1,
    ),
)  # fmt: skip
def test_equals_plain_attention(
    cache: torch.dtype, heads: tuple[str, bool], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By consumers that share their rows, or have rows of their own; tiles are as stored, or widened."""
    layout, is_shared = heads
    monkeypatch.setattr(attention_prefill_hopper, "_SHARED_HEADS", 1 << 30 if is_shared else 0)
    query_lens, contexts, num_decodes = CASES[case]
    tensors = Case(layout, query_lens, contexts, cache=cache)
    out = tensors.run(skip_decodes=num_decodes > 0)
    tensors.check(out, first=num_decodes)
    assert out[:num_decodes].isnan().all(), "decodes are the other kernel's"
    assert all(tensors.used_barriers)


@pytest.mark.parametrize(
    ("heads", "is_mixture"),
    covering(
        [("128 of 2", torch.bfloat16), ("64 of 4", E4M3), ("256 of 8", torch.bfloat16), ("128 of 5", torch.bfloat16)],
        [False, True],
        of=1,
    ),
    ids=str,
)  # fmt: skip
def test_parts_of_many_keys_are_merged(heads: tuple[str, torch.dtype], is_mixture: bool) -> None:
    """Blocks with one and with several parts; some rows see no key of the last part, which begins at 1,280."""
    query_lens, contexts = [1, 9, 64], [40, 70, 1241]
    layout, cache = heads
    tensors = Case(layout, query_lens, contexts, padding=70, cache=cache)
    tensors.multiprocessors = 132
    if is_mixture:
        tensors = tensors.as_mixture(1, max_prefills=3)
    out = tensors.run(skip_decodes=True)
    tensors.check(out, first=1)
    assert out[:1].isnan().all(), "decodes are the other kernel's"


def test_a_fixed_order_has_no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's sums do not depend on how many programs are free."""
    tensors, notes = Case("128 of 2", [20], [500]), []
    call = AttentionCall(tensors.q, tensors.k, tensors.v, tensors.batch, 0.1, torch.empty_like(tensors.q), None, None)
    monkeypatch.setattr(attention_prefill_hopper, "merge_parts", lambda *args: notes.append("merge"))
    with launches_handled(lambda kernel, grid, args, options: notes.append(options["SPLIT"] or options["SHARED"])):
        for fixed in (True, False):
            launch_prefill_hopper(call, skip_decodes=True, fixed=fixed)
    assert notes == [False, True, "merge"]


@pytest.mark.parametrize(("layout", "cache"), covering(unless_long(FEW_LAYOUTS, LAYOUTS), CACHES, of=1), ids=str)
def test_any_mixture_is_read_on_the_device(layout: str, cache: torch.dtype) -> None:
    query_lens, contexts = [1, 1, 1, 67, 1, 130], [40, 3, 200, 31, 0, 2]
    tensors = Case(layout, query_lens, contexts, padding_seqs=9, cache=cache).as_mixture(3, max_prefills=3)
    out = tensors.run()
    tensors.check(out, first=3)
    assert out[:3].isnan().all(), "decodes are the other kernel's"


def test_a_mixture_without_prefills() -> None:
    tensors = Case("128 of 2", [1, 1], [40, 3], padding=130).as_mixture(2, max_prefills=4)
    out = tensors.run()
    tensors.check(out, first=2)
    assert out[:2].isnan().all()


@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_a_mixture_of_nothing(cache: torch.dtype) -> None:
    """A graph that is captured, before any batch is there."""
    tensors = Case("128 of 2", [1], [0], padding=63, cache=cache).as_mixture(0, max_prefills=2)
    assert tensors.batch.mixed is not None
    for numbers in (tensors.batch.mixed.counts, tensors.batch.cu_seqlens_q, tensors.batch.seq_lens):
        numbers.zero_()
    assert (tensors.run() == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", BIG)
@pytest.mark.parametrize("query_lens, contexts", [([1000], [0]), ([257, 1, 800], [63, 40, 1030]), ([8192], [0])])
@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_long_sequences_on_the_gpu(query_lens: list[int], contexts: list[int], cache: torch.dtype, layout: str) -> None:
    if not ON_HOPPER:
        pytest.skip("needs compute capability 9")
    tensors = Case(layout, query_lens, contexts, cache=cache)
    tensors.check(tensors.run(), last_rows=300)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_decodes_and_prefills_together_on_the_gpu(cache: torch.dtype) -> None:
    if not ON_HOPPER:
        pytest.skip("needs compute capability 9")
    tensors = Case("A", [*[1] * 8, 700, 5], [300, 63, 64, 15, 16, 0, 1, 900, 33, 0], cache=cache)
    batch = dataclasses.replace(tensors.batch, num_decodes=8)
    args = (tensors.q, tensors.k, tensors.v, batch)
    assert attention._is_for_hopper(tensors.q, tensors.k, batch)
    scales = {"scale": tensors.scale, "v_scale": tensors.v_scale}
    out = paged_attention(*args, **scales, sinks=tensors.sinks, backend=Backend.TRITON)
    tensors.check(out.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("query_lens", [[700, 5], [70, 5]])
@pytest.mark.parametrize("context", [100, 6000])
@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_decodes_run_beside_prefills_in_a_graph(
    cache: torch.dtype, context: int, query_lens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decodes are on a branch, shorter or longer than the prefills. A kernel that starts early sees all results."""
    if not ON_HOPPER:
        pytest.skip("needs compute capability 9")
    monkeypatch.setattr(attention, "_BRANCH_ROWS", 1)
    contexts = [*[context] * 4, 33, 0]
    tensors = Case("A", [*[1] * 4, *query_lens], contexts, padding=24, cache=cache).as_mixture(4, max_prefills=4)
    out, scale = torch.empty(tensors.q.shape, dtype=torch.bfloat16, device=DEVICE), torch.ones(2048, device=DEVICE)

    def attend() -> Tensor:
        out.fill_(torch.nan)
        args = (tensors.q, tensors.k, tensors.v, tensors.batch)
        scales = {"scale": tensors.scale, "v_scale": tensors.v_scale}
        paged_attention_triton(*args, **scales, sinks=tensors.sinks, out=out)
        return rms_norm_triton(out.flatten(1), scale.bfloat16(), 1e-6)  # type: ignore[return-value]

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        normed = attend()
    graph.replay()
    tensors.check(out.cpu())
    want = rms_norm_triton(out.flatten(1), scale.bfloat16(), 1e-6)
    assert isinstance(want, Tensor)
    for _ in range(50):
        normed.fill_(torch.nan)
        graph.replay()
        assert torch.equal(normed, want)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_a_captured_launch_serves_other_batches(cache: torch.dtype) -> None:
    """Counts, lengths and pages are read on the device at each replay."""
    if not ON_HOPPER:
        pytest.skip("needs compute capability 9")
    first = Case("A", [700, 300], [0, 5], padding=24, cache=cache).as_mixture(num_decodes=0, max_prefills=4)
    first.run()
    graph, out = torch.cuda.CUDAGraph(), torch.full(first.q.shape, torch.nan, dtype=torch.bfloat16, device=DEVICE)
    with torch.cuda.graph(graph):
        call = AttentionCall(first.q, first.k, first.v, first.batch, first.scale, out, first.sinks, first.v_scale)
        launch_prefill_hopper(call, skip_decodes=True)
    graph.replay()
    first.check(out.cpu())
    assert first.batch.mixed is not None
    first.batch.mixed.counts.copy_(torch.tensor([700, 1, 0]))  # the second sequence is gone: its rows are padding
    first.num_real, first.lens = 700, first.lens[:1]
    graph.replay()
    first.check(out.cpu())


def launches(monkeypatch: pytest.MonkeyPatch, tensors: Case, *, branches: bool = False) -> list[str]:
    """Return the kernels that ``paged_attention`` launches for a batch, on a Hopper GPU that need not exist. With
    ``branches``, return also where a branch of the graph begins and ends."""
    names: list[str] = []

    @contextmanager
    def on_branch() -> Iterator[None]:
        yield
        names.append("back")

    @contextmanager
    def branch(device: torch.device) -> Iterator[Any]:
        names.append("fork")
        yield on_branch()
        names.append("join")

    if branches:
        monkeypatch.setattr(attention, "graph_branch", branch)
    monkeypatch.setattr(attention_prefill_hopper, "runs_gluon", lambda device: True)
    monkeypatch.setattr(attention, "launch_prefill", lambda *args, **kwargs: names.append("triton"))
    monkeypatch.setattr(attention, "launch_decode", lambda *args, **kwargs: names.append("decode"))
    with launches_handled(lambda kernel, *_: names.append("merge" if "merge" in kernel.fn.__name__ else "hopper")):
        args = (tensors.q, tensors.k, tensors.v, tensors.batch)
        paged_attention(*args, scale=tensors.scale, backend=Backend.TRITON)
    return names


@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_only_what_pays_goes_to_hopper(cache: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device of four multiprocessors: sequences and key heads are few up to four, and may be idle up to eight."""
    monkeypatch.setattr(attention, "MULTIPROCESSORS", 4)

    def goes(layout: str, query_lens: list[int], padding: int = 0, mixture: int = 0, context: int = 0) -> bool:
        contexts = [context] * len(query_lens)
        tensors = Case(layout, query_lens, contexts, padding, padding_seqs=0, cache=cache)
        tensors.batch = dataclasses.replace(tensors.batch, num_decodes=query_lens.count(1))
        names = launches(monkeypatch, tensors.as_mixture(0, mixture) if mixture else tensors)
        assert ("hopper" in names) != ("triton" in names)
        assert ("decode" in names) == (1 in query_lens or mixture > 0)
        return "hopper" in names

    assert goes("128 of 2", [16]) and goes("128 of 2", [9], padding=7) and not goes("128 of 2", [15])
    assert goes("128 of 2", [64], mixture=4) and not goes("128 of 2", [64], mixture=5), "blocks without work"
    assert goes("128 of 2", [192], mixture=6) and not goes("128 of 2", [192], mixture=7), "beside three full blocks"
    assert goes("128 of 2", [1] * 3 + [61]) and not goes("128 of 2", [1] * 4 + [60])
    assert goes("128 of 2", [16] * 2) and not goes("128 of 2", [255] * 3) and goes("128 of 2", [256] * 3)
    assert goes("128 of 2", [64] * 3, context=64) and not goes("128 of 2", [63] * 3, context=64), "half a block"
    assert not goes("128 of 2", [64] * 3, context=63), "hardly a context"
    assert goes("256 of 8", [16] * 5) and not goes("256 of 8", [15] * 5), "wide heads"
    assert goes("128 of 5", [512] * 3) and not goes("128 of 5", [511] * 3), "blocks that are not full"


def test_many_rows_of_small_heads_go_to_the_general_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 400 heads of rows on, that is 100 rows, below 400 rows or in sequences of at most 90."""
    monkeypatch.setattr(attention, "_SMALL_ROWS", 400)
    monkeypatch.setattr(attention, "_SMALL_EACH", 90)

    def goes(query_lens: list[int], context: int = 0, layout: str = "64 of 4", mixture: int = 0) -> bool:
        tensors = Case(layout, query_lens, [context] * len(query_lens), padding=0, padding_seqs=0)
        return "hopper" in launches(monkeypatch, tensors.as_mixture(0, mixture) if mixture else tensors)

    assert goes([99]) and not goes([100]) and not goes([399]) and goes([400])
    assert not goes([90] * 5) and goes([91] * 5) and goes([90] * 5, context=90)
    assert goes([100], layout="128 of 2") and goes([100], context=100)
    assert not goes([100], context=100, mixture=1), "a graph knows of no context"


def test_decodes_of_a_large_captured_mixture_stand_on_a_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The branch runs in parallel to the prefills. Later kernels wait for the decodes and the prefills."""

    def names(num_tokens: int, mixture: int = 0) -> list[str]:
        tensors = Case("128 of 2", [num_tokens], [0], padding=0, padding_seqs=0)
        tensors.batch = dataclasses.replace(tensors.batch, num_decodes=1)
        return launches(monkeypatch, tensors.as_mixture(0, mixture) if mixture else tensors, branches=True)

    assert names(512, mixture=4) == ["fork", "decode", "back", "hopper", "merge", "join"]
    assert names(512, mixture=133) == ["fork", "decode", "back", "triton", "join"]
    assert names(511, mixture=4) == ["decode", "hopper", "merge"]
    monkeypatch.setattr(attention, "_BRANCH_HEADS", 4 * 600)
    assert names(600, mixture=4)[0] == "fork" and names(601, mixture=4)[0] == "decode", "beyond one wave"
    assert names(512) == ["decode", "hopper", "merge"], "no graph"


def test_a_branch_is_joined_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that ends with a forked stream would hide the error."""
    main, side = MagicMock(), MagicMock()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(graph_branch, "_stream", lambda device: side)
    with pytest.raises(KeyError), graph_branch.graph_branch(torch.device("cuda")) as branch, branch:
        raise KeyError
    side.wait_stream.assert_called_once_with(main)
    main.wait_stream.assert_called_once_with(side)


def test_consumers_share_rows_where_programs_are_few() -> None:
    def shares(num_rows: int, heads: tuple[int, int, int] = (16, 8, 128), page: int = 16) -> bool:
        q = torch.empty(num_rows, heads[0], heads[2])
        return attention_prefill_hopper.shares_rows(q, torch.empty(1, page, *heads[1:]))

    assert shares(792) and not shares(793), "a block of 128 rows for three of four multiprocessors"
    assert shares(792, (16, 8, 64)) and not shares(512, (16, 2, 256)), "no room for their sums"
    assert shares(512, page=64) and not shares(512, page=128), "no page of a tile"


TAKEN = {"heads": (16, 8, 128), "page": 16, "dtype": torch.bfloat16, "hopper": True}


@pytest.mark.parametrize(
    "change, taken",
    [
        ({}, True), ({"heads": (16, 2, 256)}, True), ({"heads": (32, 8, 64)}, True), ({"heads": (64, 1, 128)}, True),
        ({"page": 8}, True), ({"page": 128}, True), ({"page": 64, "heads": (16, 2, 256)}, True),
        ({"heads": (14, 2, 64)}, True), ({"heads": (65, 1, 128)}, False), ({"heads": (4, 2, 96)}, True),
        ({"heads": (4, 2, 72)}, False), ({"heads": (4, 2, 32)}, False), ({"heads": (4, 2, 272)}, False),
        ({"page": 4}, False), ({"page": 24}, False), ({"page": 256}, False),
        ({"page": 128, "heads": (16, 2, 256)}, False), ({"dtype": torch.float16}, False), ({"hopper": False}, False),
        ({"cache": E4M3}, True), ({"cache": torch.float16}, False), ({"dtype": torch.float16, "cache": E4M3}, False),
    ],
)  # fmt: skip
def test_only_what_it_was_made_for(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], taken: bool) -> None:
    layout = TAKEN | change
    monkeypatch.setattr(attention_prefill_hopper, "runs_gluon", lambda device: layout["hopper"])
    num_heads, num_kv_heads, head_dim = layout["heads"]
    q = torch.empty(600, num_heads, head_dim, dtype=layout["dtype"])
    k_cache = torch.empty(2, layout["page"], num_kv_heads, head_dim, dtype=layout.get("cache", layout["dtype"]))
    assert attention_prefill_hopper.takes(q, k_cache) == taken


@takes_long
def test_kernels_compile_without_spilling_or_lost_barriers(tmp_path: Path) -> None:
    """For a GPU that is not there, in threads, as the start does."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.compile_gluon"],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout.splitlines()[-1])
    assert not any(kernel["overwritten_barriers"] for kernel in kernels), kernels
    is_3_6 = triton.__version__.startswith("3.6.")  # what later ones give to the same assembler needs more registers
    scans_spill = 112 if is_3_6 else 144  # addresses of checkpoints and outputs, which no product waits for
    widened_spills = 48 if is_3_6 else 120  # what no step of a loop waits for
    limits = 4 * [(168, 0)] + [(64, 0), (255, 0), (168, 0)] + 3 * [(168, widened_spills)]
    limits += [(168, 8 if is_3_6 else 24)] + 3 * [(168, scans_spill)]
    limits += [(128, 8), (255, 0)]  # Kimi-Linear: two programs of eight warps share a multiprocessor
    limits += [(168, 0), (128, 0), (192, 0)]  # Jamba: at most two programs share a multiprocessor
    limits += [(128, 0), (128, 0)]
    limits += [(80, 0), (80, 0)]  # FP8, one row: three programs of eight warps fit on a multiprocessor
    # INT4, one row: the words of three or four chunks. With more than 128, three programs fit instead of four.
    limits += [(128 if is_3_6 else 130, 0), (128, 0), (128, 0)]
    blocks = kernels[len(limits) :][:4]  # FP8 experts of many pairs: 13 warps share out registers at the start
    limits += [(128, 0), (128, 0)] + 2 * [(128, 32 if is_3_6 else 40)]  # by block: addresses, once a tile
    experts = kernels[len(limits) :]
    limits += [(168, 0), (168, 0)]
    for kernel, (registers, stack) in zip(kernels, limits, strict=True):
        assert kernel["registers"] <= registers and kernel["stack_bytes"] <= stack, kernel
        assert kernel["shared_bytes"] <= 227 * 1024, kernel
    assert all(kernel["async_copies"] == 8 for kernel in blocks), "a thread copies 128 bytes of inputs in each step"
    assert all(kernel["async_copies"] > 16 for kernel in experts), "addresses whose alignment the compiler does not see"
