"""Attention over expanded latents against plain attention in float64: on a Hopper GPU, or emulated on the CPU."""

# ruff: noqa: E402 (the imports need a version of Triton)
from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.whole import covering, takes_long_on_cpu
from weft.platforms.triton_version import is_known

triton = pytest.importorskip("triton")
if not is_known(triton.__version__):
    pytest.skip("the kernel is for versions of Triton that Weft knows", allow_module_level=True)

from tests.ops.delta_rule.test_triton_gdn import on_device
from tests.ops.interpreter import DEVICE
from tests.ops.oracles import PAGE_SIZE, make_batch

# isort: split
from tests.ops.gluon_emulator import Emulator
from weft.forward_context import Batch, MixedBatch, Verification
from weft.ops import attention as operations
from weft.ops.attention import (
    AttentionCall,
    Expansion,
    expanded_latent_attention,
    expanded_latent_hopper,
    expansion_bytes,
    latent_attention,
    plan_expansion,
)
from weft.ops.attention.expanded_latent_hopper import expanded_latent_attention_triton, plan_on_hopper
from weft.ops.attention.prefill_hopper import launch_prefill_hopper
from weft.ops.backend import Backend
from weft.ops.triton.launch import launches_handled

ON_HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability()[0] == 9
ABSORBED = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # the interpreter multiplies no bfloat16
TOLERANCE = 1e-2  # keys, values and results are rounded to bfloat16

# heads, key_dim, shared_dim, value_dim, rank
SIZES = {
    "64 columns": (3, 24, 8, 40, 32), "64 columns, few values": (2, 30, 2, 16, 24),
    "128 columns, one head": (1, 96, 16, 72, 48), "256 columns": (2, 128, 64, 128, 80),
}  # fmt: skip
BIG = (32, 128, 64, 128, 512)

# query lengths, contexts, leading decodes
CASES: dict[str, tuple[list[int], list[int], int]] = {
    "all begin": ([1, 15, 16, 17, 63, 64, 130], [0] * 7, 0),
    "some begin": ([17, 64, 1, 130, 16, 33], [0, 31, 5, 0, 16, 0], 0),
    "decodes": ([1, 1, 1, 126, 15, 1, 40], [40, 3, 200, 0, 0, 7, 0], 3),
    "none begins": ([20, 70], [3, 64], 0),
    "one pays": ([1, 31, 33, 5], [300, 97, 97, 0], 1),
    "all pay": ([32, 130, 40], [1, 62, 353], 0),
}
UNTOUCHED = 7.0
LEAST = 32
"""Tokens of a sequence with a context that is expanded, in these tests."""


@pytest.fixture(autouse=True)
def few_tokens_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expanded_latent_hopper, "_LEAST_CHUNK", LEAST)
    monkeypatch.setattr(expanded_latent_hopper, "_ROWS_EACH", 1)
    monkeypatch.setattr(expanded_latent_hopper, "runs_gluon", lambda device: True)


class Case:
    """Random tensors of a batch; padding rows are NaN, and so is all memory that nobody has written."""

    def __init__(
        self, sizes: tuple[int, int, int, int, int], query_lens: list[int], contexts: list[int], decodes: int,
        padding: int = 21, *, apart: bool = False,
    ) -> None:  # fmt: skip
        heads, key_dim, shared_dim, value_dim, rank = sizes
        batch = make_batch(query_lens, contexts, num_decodes=decodes, pad_tokens=padding, pad_seqs=2, pad_chunks=0)
        self.batch = on_device(batch)
        self.num_real, self.scale = sum(query_lens), (key_dim + shared_dim) ** -0.5
        self.lengths = [q + c for q, c in zip(query_lens, contexts, strict=True)]
        pays = [c == 0 or q >= LEAST for q, c in zip(query_lens, contexts, strict=True)]
        self.is_chosen = [False] * decodes + pays[decodes:]
        self.bounds = [0, *torch.tensor(query_lens).cumsum(0).tolist()]
        rows = self.num_real + padding
        # Rows as of a fused projection, with other things between them.
        wide = torch.full((rows, heads * (key_dim + shared_dim) + 7), torch.nan).bfloat16()
        wide[: self.num_real] = torch.randn(self.num_real, wide.shape[1])
        q = wide.to(DEVICE)[:, 7:].unflatten(-1, (heads, -1))
        self.own, self.of_shared = q.split([key_dim, shared_dim], dim=-1)
        if apart:
            neighbour, self.of_shared = self.of_shared, self.of_shared.clone()
            neighbour.fill_(torch.nan)
        self.k, self.v = (
            (torch.randn(heads, dim, rank, device=DEVICE) * rank**-0.5).bfloat16() for dim in (key_dim, value_dim)
        )
        # Entries of the sequences; all other pages, and the columns behind an entry, are NaN.
        entry = rank + shared_dim
        self.latents = torch.full(
            (int(batch.page_table.max()) + 1, PAGE_SIZE, -(-entry // 8) * 8 + 8), torch.nan, device=DEVICE
        ).bfloat16()
        self.entries = [torch.randn(n, entry, device=DEVICE).bfloat16() for n in self.lengths]
        for seq, entries in enumerate(self.entries):
            tokens = torch.arange(len(entries))
            pages = batch.page_table[seq, tokens // PAGE_SIZE].long()
            self.latents.flatten(0, 1)[(pages * PAGE_SIZE + tokens % PAGE_SIZE).to(DEVICE), :entry] = entries
        self.others = torch.randn(rows, heads, value_dim, device=DEVICE).bfloat16()
        self.others[self.num_real :] = 0

    def want(self, seq: int) -> Tensor:
        """Results of a sequence: softmax over plain keys and values, in float64."""
        begin, end = self.bounds[seq : seq + 2]
        rank, q = self.k.shape[2], torch.cat([self.own, self.of_shared], dim=-1)[begin:end].double()
        latents, shared = self.entries[seq].double().split([rank, self.of_shared.shape[2]], dim=-1)
        keys = torch.einsum("tr,hdr->thd", latents, self.k.double())
        values = torch.einsum("tr,hdr->thd", latents, self.v.double())
        keys = torch.cat([keys, shared[:, None].expand(-1, keys.shape[1], -1)], dim=-1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) * self.scale
        later = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1 + len(keys) - len(q))
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), values)

    @property
    def sizes(self) -> tuple[Tensor, int, int, Batch]:
        return self.own, self.of_shared.shape[2], self.v.shape[1], self.batch

    def run(self, monkeypatch: pytest.MonkeyPatch) -> Tensor:
        """The kernels' output, where memory that they have to write begins as NaN."""
        empty = Tensor.new_empty

        def poisoned(like: Tensor, *size: Any, **options: Any) -> Tensor:
            x = empty(like, *size, **options)
            return x.fill_(torch.nan) if x.is_floating_point() else x.fill_(100)

        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "new_empty", poisoned)
            self.expansion = plan_on_hopper(*self.sizes)
            assert self.expansion is not None
            out = self.others.clone()
            with nullcontext() if ON_HOPPER else launches_handled(Emulator().handle):
                return expanded_latent_attention_triton(
                    self.own, self.of_shared, self.latents, self.k, self.v, self.batch, self.expansion,
                    scale=self.scale, out=out,
                )  # fmt: skip

    def check(self, out: Tensor, last_rows: int = 10**9) -> None:
        for seq, is_chosen in enumerate(self.is_chosen):
            begin, end = self.bounds[seq : seq + 2]
            if is_chosen:
                want, got = (x[-last_rows:] for x in (self.want(seq), out[begin:end].double()))
                assert (got - want).norm() / want.norm() < TOLERANCE, seq
                assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).max() < 4 * TOLERANCE, "one row is noisier"
            else:
                assert torch.equal(out[begin:end], self.others[begin:end]), "rows of other sequences stay"
        assert (out[self.num_real :] == 0).all()

    def check_plan(self, expansion: Expansion | None) -> None:
        assert expansion is not None
        query_lens = [end - begin for begin, end in pairwise(self.bounds)]
        lengths = [n * is_chosen for n, is_chosen in zip(self.lengths, self.is_chosen, strict=True)]
        absorbed = [
            q if is_chosen else n for q, n, is_chosen in zip(query_lens, self.lengths, self.is_chosen, strict=True)
        ]
        assert expansion.lengths.tolist() == [*lengths, 0, 0] and expansion.seq_lens.tolist() == [*absorbed, 0, 0]

    def as_mixture(self, num_decodes: int, max_prefills: int) -> None:
        """The same batch for a captured graph: what is real is known to the device alone."""
        counts = torch.tensor([self.num_real, len(self.lengths), num_decodes], dtype=torch.int32, device=DEVICE)
        mixture = MixedBatch(counts, self.batch.state_slots, max_prefills)
        self.batch = dataclasses.replace(self.batch, mixed=mixture, num_decodes=0)

    def as_step(self) -> None:
        """The same batch with all that the host of an eager step knows."""
        decodes, query_lens = self.batch.num_decodes, [end - begin for begin, end in pairwise(self.bounds)]
        chunks = [q for q, n in list(zip(query_lens, self.lengths, strict=True))[decodes:] if n > q]
        self.batch = dataclasses.replace(
            self.batch, num_prefill_keys=sum(self.lengths[decodes:]), least_chunk=min([self.num_real, *chunks])
        )


@pytest.mark.parametrize(("sizes", "case"), covering(SIZES, CASES, of=1))
def test_equals_plain_attention(sizes: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = Case(SIZES[sizes], *CASES[case])
    tensors.check(tensors.run(monkeypatch))
    tensors.check_plan(tensors.expansion)


@pytest.mark.parametrize("case", CASES)
def test_any_mixture_is_read_on_the_device(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query_lens, _, decodes = CASES[case]
    tensors = Case(SIZES["64 columns"], *CASES[case])
    tensors.as_mixture(decodes, max_prefills=len(query_lens) - decodes)
    tensors.check(tensors.run(monkeypatch))
    tensors.check_plan(tensors.expansion)


def test_parts_of_queries_that_stand_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = Case(SIZES["256 columns"], *CASES["none begins"], apart=True)
    tensors.check(tensors.run(monkeypatch))


@pytest.mark.parametrize("case", CASES)
def test_a_step_has_as_much_memory_as_it_needs(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host knows the number of keys, and whether any sequence is left for the absorbed form."""
    tensors = Case(SIZES["64 columns"], *CASES[case])
    tensors.as_step()
    tensors.check(tensors.run(monkeypatch))
    tensors.check_plan(tensors.expansion)
    assert tensors.expansion is not None
    decodes = CASES[case][2]
    assert tensors.expansion.is_whole == all(tensors.is_chosen[decodes:])
    tiles = tensors.expansion.places[2].shape[0]
    needed = sum(-(-n // 128) for n, chosen in zip(tensors.lengths, tensors.is_chosen, strict=True) if chosen)
    assert tensors.expansion.places[3].item() == needed <= tiles
    assert tiles * 128 <= sum(tensors.lengths[decodes:]) + 128 * (len(tensors.lengths) - decodes)


@pytest.mark.parametrize("case", ["one pays", pytest.param("all pay", marks=takes_long_on_cpu)])
def test_heads_that_do_not_fit_follow_one_another(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three heads in pages for two of them, or for one."""
    tensors = Case((3, 24, 8, 40, 32), *CASES[case])
    want = tensors.run(monkeypatch)
    assert tensors.expansion is not None
    head_bytes, calls = tensors.expansion.places[2].shape[0] * 128 * 2 * (48 + 48), []

    def noted(call: AttentionCall, **options: Any) -> None:
        calls.append(call.k_cache.nbytes + call.v_cache.nbytes)
        launch_prefill_hopper(call, **options)

    monkeypatch.setattr(expanded_latent_hopper, "launch_prefill_hopper", noted)
    for heads, shares in ((2, [2, 1]), (1, [1, 1, 1])):
        monkeypatch.setattr(expanded_latent_hopper, "EXPANDED_BYTES", head_bytes * heads + 1)
        got = tensors.run(monkeypatch)
        tensors.check(got)
        assert torch.equal(got, want) and calls == [head_bytes * share for share in shares]
        calls.clear()


@takes_long_on_cpu
def test_what_does_not_fit_stays_absorbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a graph the memory is fixed. Sequences that begin always fit, then the first of the rest that fit."""
    query_lens, contexts = [40, 130, 33, 40, 35], [900, 0, 200, 300, 90]
    tensors = Case(SIZES["64 columns"], query_lens, contexts, 0)
    tensors.as_mixture(0, max_prefills=5)
    tile_bytes = 3 * 128 * 2 * (48 + 48)
    for tiles, chosen in ((7, [0, 1, 1, 1, 0]), (8, [0, 1, 1, 1, 1]), (14, [1, 1, 1, 0, 0]), (15, [1, 1, 1, 1, 0])):
        # Fewer than seven tiles are never had: the step's own tokens need as many.
        monkeypatch.setattr(expanded_latent_hopper, "EXPANDED_BYTES", tiles * tile_bytes)
        tensors.is_chosen = [bool(each) for each in chosen]
        tensors.check(tensors.run(monkeypatch))
        tensors.check_plan(tensors.expansion)


def test_a_mixture_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is captured, before any batch is there."""
    tensors = Case(SIZES["64 columns"], [1], [0], 0)
    tensors.as_mixture(0, max_prefills=2)
    assert tensors.batch.mixed is not None
    for numbers in (tensors.batch.mixed.counts, tensors.batch.cu_seqlens_q, tensors.batch.seq_lens):
        numbers.zero_()
    out = tensors.run(monkeypatch)
    assert (out == 0).all(), "all rows are padding"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_mixture", [False, True])
def test_the_reference_is_plain_attention(case: str, is_mixture: bool) -> None:
    tensors = Case(SIZES["128 columns, one head"], *CASES[case])
    if is_mixture:
        tensors.as_mixture(CASES[case][2], max_prefills=8)
    expansion = plan_on_hopper(*tensors.sizes)
    assert expansion is not None
    given = tensors.own, tensors.of_shared, tensors.latents, tensors.k, tensors.v, tensors.batch, expansion
    out = tensors.others.clone()
    found = expanded_latent_attention(*given, scale=tensors.scale, out=out, backend=Backend.TORCH)
    assert found is out
    tensors.check(out)


@pytest.mark.parametrize(("case", "is_mixture"), covering(CASES, [False, True], of=1))
def test_the_absorbed_form_leaves_them_out(case: str, is_mixture: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of other sequences have the same bits as without it."""
    tensors, (heads, _, shared_dim, _, rank) = Case(SIZES["64 columns"], *CASES[case]), SIZES["64 columns"]
    if is_mixture:
        tensors.as_mixture(CASES[case][2], max_prefills=8)
    expansion = plan_on_hopper(*tensors.sizes)
    assert expansion is not None
    q = torch.randn(tensors.own.shape[0], heads, rank + shared_dim, device=DEVICE).to(ABSORBED)
    latents = torch.randn(int(tensors.batch.page_table.max()) + 1, PAGE_SIZE, rank + shared_dim, device=DEVICE)
    rest = dataclasses.replace(tensors.batch, seq_lens=expansion.seq_lens)
    monkeypatch.setattr(torch, "empty", lambda *size, **options: torch.full(size, UNTOUCHED, **options))
    out, whole = (
        latent_attention(
            q, latents.to(ABSORBED), batch, rank=rank, scale=0.1, skips_begun=skips, backend=Backend.TRITON
        )
        for skips, batch in ((True, rest), (False, tensors.batch))
    )  # fmt: skip
    for seq, is_chosen in enumerate(tensors.is_chosen):
        rows = slice(*tensors.bounds[seq : seq + 2])
        assert (out[rows] == UNTOUCHED).all() if is_chosen else torch.equal(out[rows], whole[rows])


@pytest.mark.parametrize("case", ["all begin", "all pay"])
def test_both_forms_agree(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The absorbed form over the same latents."""
    tensors = Case(SIZES["64 columns"], *CASES[case], padding=0)
    rank = tensors.k.shape[2]
    own, of_shared, k, v, cache = (
        x.to(ABSORBED) for x in (tensors.own, tensors.of_shared, tensors.k, tensors.v, tensors.latents)
    )
    absorbed = torch.einsum("thd,hdr->thr", own, k)
    attended = latent_attention(
        torch.cat([absorbed, of_shared], dim=-1), cache, tensors.batch, rank=rank, scale=tensors.scale,
        backend=Backend.TRITON,
    )  # fmt: skip
    want = torch.einsum("thr,hdr->thd", attended, v).double()
    got = tensors.run(monkeypatch).double()
    assert (got - want).norm() / want.norm() < 2 * TOLERANCE


def test_only_what_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expanded_latent_hopper, "_ROWS_EACH", 128)
    tensors = Case(SIZES["64 columns"], [600], [0], 0, padding=0)
    batch = tensors.batch

    def taken(rows: int = 600, backend: Backend = Backend.TRITON, value_dim: int = 40, **change: Any) -> bool:
        given = tensors.own[:rows], 8, value_dim, dataclasses.replace(batch, **change)
        return plan_expansion(*given, backend=backend) is not None

    mixture = MixedBatch(batch.seq_lens, batch.state_slots, 4)
    assert taken() and taken(128) and taken(mixed=mixture, max_query_len=1)
    assert not taken(127) and not taken(value_dim=257) and not taken(max_query_len=1)
    assert taken(num_seqs=4) and not taken(num_seqs=5) and taken(num_seqs=7, num_decodes=3), "rows of a sequence"
    assert not taken(mixed=dataclasses.replace(mixture, max_prefills=0))
    assert not taken(mixed=dataclasses.replace(mixture, max_prefills=513))
    assert not taken(verification=Verification(600, batch.state_slots[:, None]))
    assert not any(taken(backend=b) for b in (Backend.TORCH, Backend.INVARIANT_TRITON, Backend.INVARIANT_TORCH))
    assert plan_on_hopper(tensors.own.float(), 8, 40, batch) is None
    device = tensors.own.device
    assert expansion_bytes(device, backend=Backend.TRITON) == operations.EXPANDED_BYTES
    assert expansion_bytes(device, backend=Backend.INVARIANT_TRITON) == 0
    monkeypatch.setattr(expanded_latent_hopper, "runs_gluon", lambda device: False)
    assert not taken() and expansion_bytes(device, backend=Backend.TRITON) == 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("query_lens", "contexts", "decodes"),
    [
        ([600], [0], 0), ([4096], [0], 0), ([1, 1, 1500, 17, 900, 1], [700, 3, 0, 0, 64, 0], 2),
        ([1000, 24], [8, 0], 0), ([512], [8000], 0), ([1, 300, 31, 700], [900, 2500, 700, 1111], 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_mixture", [False, True])
def test_long_sequences_on_the_gpu(
    query_lens: list[int], contexts: list[int], decodes: int, is_mixture: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ON_HOPPER:
        pytest.skip("needs compute capability 9")
    tensors = Case(BIG, query_lens, contexts, decodes)
    if is_mixture:
        tensors.as_mixture(decodes, max_prefills=8)
    for share in (1, 3):
        monkeypatch.setattr(expanded_latent_hopper, "EXPANDED_BYTES", operations.EXPANDED_BYTES // share)
        tensors.check(tensors.run(monkeypatch), last_rows=300)


@pytest.mark.gpu
def test_a_captured_call_serves_other_batches() -> None:
    """Counts and lengths are read on the device at each replay."""
    if not ON_HOPPER:
        pytest.skip("needs compute capability 9")
    tensors = Case(BIG, [1, 700, 300], [40, 50, 300], 1)
    tensors.as_mixture(1, max_prefills=4)
    out = tensors.others.clone()

    def attend() -> None:
        expansion = plan_on_hopper(*tensors.sizes)
        assert expansion is not None
        given = tensors.own, tensors.of_shared, tensors.latents, tensors.k, tensors.v, tensors.batch, expansion
        out.copy_(tensors.others)
        expanded_latent_attention_triton(*given, scale=tensors.scale, out=out)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    entries = tensors.entries
    for contexts in ([40, 50, 300], [40, 0, 300], [40, 0, 0], [40, 50, 17]):
        tensors.lengths = [q + c for q, c in zip([1, 700, 300], contexts, strict=True)]
        tensors.entries = [each[:n] for each, n in zip(entries, tensors.lengths, strict=True)]
        tensors.batch.seq_lens[:3] = torch.tensor(tensors.lengths)
        graph.replay()
        tensors.check(out)
