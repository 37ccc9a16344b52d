"""Attention over expanded latents against plain attention in float64: on a Hopper GPU, or emulated on the CPU."""

# ruff: noqa: E402 (the imports need a version of Triton)
from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.platforms.triton_version import is_known

triton = pytest.importorskip("triton")
if not is_known(triton.__version__):
    pytest.skip("the kernel is for versions of Triton that Weft knows", allow_module_level=True)

from tests.ops.delta_rule.test_triton_gdn import on_device
from tests.ops.interpreter import DEVICE
from tests.ops.oracles import PAGE_SIZE, make_batch

# isort: split
from tests.ops.gluon_emulator import Emulator
from weft.forward_context import MixedBatch, Verification
from weft.ops import attention as operations
from weft.ops.attention import (
    AttentionCall,
    expanded_latent_attention,
    expanded_latent_hopper,
    expands_latents,
    latent_attention,
)
from weft.ops.attention.expanded_latent_hopper import expanded_latent_attention_triton, takes
from weft.ops.attention.prefill_hopper import launch_prefill_hopper
from weft.ops.backend import Backend
from weft.ops.triton.launch import launches_handled

ON_HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability()[0] == 9
ABSORBED = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # the interpreter multiplies no bfloat16
TOLERANCE = 1e-2  # keys, values and results are rounded to bfloat16
UNTOUCHED = 7.0

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
}


class Case:
    """Random tensors of a batch; padding rows are NaN, and so is all memory that nobody has written."""

    def __init__(
        self, sizes: tuple[int, int, int, int, int], query_lens: list[int], contexts: list[int], decodes: int,
        padding: int = 21,
    ) -> None:  # fmt: skip
        heads, key_dim, shared_dim, value_dim, rank = sizes
        batch = make_batch(query_lens, contexts, num_decodes=decodes, pad_tokens=padding, pad_seqs=2, pad_chunks=0)
        self.batch = on_device(batch)
        self.num_real, self.scale = sum(query_lens), (key_dim + shared_dim) ** -0.5
        self.is_new = [context == 0 and i >= decodes for i, context in enumerate(contexts)]
        self.bounds = [0, *torch.tensor(query_lens).cumsum(0).tolist()]
        rows = self.num_real + padding
        # Rows as of a fused projection, with other things between them.
        wide = torch.full((rows, heads * (key_dim + shared_dim) + 7), torch.nan).bfloat16()
        wide[: self.num_real] = torch.randn(self.num_real, wide.shape[1])
        q = wide.to(DEVICE)[:, 7:].unflatten(-1, (heads, -1))
        self.own, self.of_shared = q.split([key_dim, shared_dim], dim=-1)
        self.entries = torch.full((rows, rank + shared_dim), torch.nan, device=DEVICE).bfloat16()
        self.entries[: self.num_real] = torch.randn(self.num_real, rank + shared_dim)
        self.k, self.v = (
            (torch.randn(heads, dim, rank, device=DEVICE) * rank**-0.5).bfloat16() for dim in (key_dim, value_dim)
        )
        self.others = torch.randn(rows, heads, value_dim, device=DEVICE).bfloat16()
        self.others[self.num_real :] = 0
        self.attended: Tensor | None = None

    def want(self, seq: int) -> Tensor:
        """Results of a sequence that begins here: softmax over plain keys and values, in float64."""
        begin, end = self.bounds[seq : seq + 2]
        rank, q = self.k.shape[2], torch.cat([self.own, self.of_shared], dim=-1)[begin:end].double()
        latents, shared = self.entries[begin:end].double().split([rank, self.of_shared.shape[2]], dim=-1)
        keys = torch.einsum("tr,hdr->thd", latents, self.k.double())
        values = torch.einsum("tr,hdr->thd", latents, self.v.double())
        keys = torch.cat([keys, shared[:, None].expand(-1, keys.shape[1], -1)], dim=-1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) * self.scale
        later = torch.ones(end - begin, end - begin, dtype=torch.bool, device=q.device).triu(1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), values)

    def run(self, monkeypatch: pytest.MonkeyPatch, others: Tensor | None) -> Tensor:
        """The kernels' output, where memory that they have to write begins as NaN."""
        empty = Tensor.new_empty

        def poisoned(like: Tensor, *size: Any, **options: Any) -> Tensor:
            x = empty(like, *size, **options)
            return x.fill_(torch.nan) if x.is_floating_point() else x.fill_(100)

        def noted(call: AttentionCall, **options: Any) -> None:
            call.out.fill_(UNTOUCHED)
            launch_prefill_hopper(call, **options)
            self.attended = call.out

        with monkeypatch.context() as patch:
            patch.setattr(expanded_latent_hopper, "launch_prefill_hopper", noted)
            patch.setattr(Tensor, "new_empty", poisoned)
            with nullcontext() if ON_HOPPER else launches_handled(Emulator().handle):
                return expanded_latent_attention_triton(
                    self.own, self.of_shared, self.entries, self.k, self.v, self.batch, scale=self.scale, others=others
                )

    def check(self, out: Tensor, others: Tensor | None, last_rows: int = 10**9) -> None:
        for seq, is_new in enumerate(self.is_new):
            begin, end = self.bounds[seq : seq + 2]
            if is_new:
                want, got = (x[-last_rows:] for x in (self.want(seq), out[begin:end].double()))
                assert (got - want).norm() / want.norm() < TOLERANCE, seq
                assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).max() < 4 * TOLERANCE, "one row is noisier"
            elif others is not None:
                assert torch.equal(out[begin:end], others[begin:end]), "rows of other sequences stay"
            if not is_new and self.attended is not None:
                assert (self.attended[begin:end] == UNTOUCHED).all(), "nothing is computed for other sequences"
        assert (out[self.num_real :] == 0).all()

    def as_mixture(self, num_decodes: int, max_prefills: int) -> None:
        """The same batch for a captured graph: what is real is known to the device alone."""
        counts = torch.tensor([self.num_real, len(self.is_new), num_decodes], dtype=torch.int32, device=DEVICE)
        mixture = MixedBatch(counts, self.batch.state_slots, max_prefills)
        self.batch = dataclasses.replace(self.batch, mixed=mixture, num_decodes=0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sizes", SIZES)
def test_equals_plain_attention(sizes: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = Case(SIZES[sizes], *CASES[case])
    others = None if all(tensors.is_new) else tensors.others
    tensors.check(tensors.run(monkeypatch, others), others)


@pytest.mark.parametrize("case", CASES)
def test_any_mixture_is_read_on_the_device(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query_lens, _, decodes = CASES[case]
    tensors = Case(SIZES["64 columns"], *CASES[case])
    tensors.as_mixture(decodes, max_prefills=len(query_lens) - decodes)
    tensors.check(tensors.run(monkeypatch, tensors.others), tensors.others)


def test_a_mixture_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is captured, before any batch is there."""
    tensors = Case(SIZES["64 columns"], [1], [0], 0)
    tensors.as_mixture(0, max_prefills=2)
    assert tensors.batch.mixed is not None
    for numbers in (tensors.batch.mixed.counts, tensors.batch.cu_seqlens_q, tensors.batch.seq_lens):
        numbers.zero_()
    assert torch.equal(tensors.run(monkeypatch, tensors.others), tensors.others)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_mixture", [False, True])
def test_the_reference_is_plain_attention(case: str, is_mixture: bool) -> None:
    tensors = Case(SIZES["128 columns, one head"], *CASES[case])
    if is_mixture:
        tensors.as_mixture(CASES[case][2], max_prefills=8)
    others = None if all(tensors.is_new) else tensors.others
    given = tensors.own, tensors.of_shared, tensors.entries, tensors.k, tensors.v, tensors.batch
    out = expanded_latent_attention(*given, scale=tensors.scale, others=others, backend=Backend.TORCH)
    tensors.check(out, others)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_mixture", [False, True])
def test_the_absorbed_form_leaves_them_out(case: str, is_mixture: bool) -> None:
    """Rows of other sequences have the same bits as without it."""
    tensors, (heads, _, shared_dim, _, rank) = Case(SIZES["64 columns"], *CASES[case]), SIZES["64 columns"]
    if is_mixture:
        tensors.as_mixture(CASES[case][2], max_prefills=8)
    q = torch.randn(tensors.own.shape[0], heads, rank + shared_dim, device=DEVICE).to(ABSORBED)
    latents = torch.randn(int(tensors.batch.page_table.max()) + 1, PAGE_SIZE, rank + shared_dim, device=DEVICE)
    out, whole = (
        latent_attention(
            q, latents.to(ABSORBED), tensors.batch, rank=rank, scale=0.1, skips_begun=skips, backend=Backend.TRITON
        )
        for skips in (True, False)
    )  # fmt: skip
    for seq, is_new in enumerate(tensors.is_new):
        rows = slice(*tensors.bounds[seq : seq + 2])
        assert (out[rows] == 0).all() if is_new else torch.equal(out[rows], whole[rows])


def test_both_forms_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The absorbed form over a cache of the same latents."""
    tensors = Case(SIZES["64 columns"], *CASES["all begin"], padding=0)
    rank = tensors.k.shape[2]
    cache = torch.zeros(int(tensors.batch.page_table.max()) + 1, PAGE_SIZE, tensors.entries.shape[1], device=DEVICE)
    cache = cache.to(ABSORBED)
    operations.store_latents(tensors.entries, cache, tensors.batch.slot_mapping)
    own, of_shared, k, v = (x.to(ABSORBED) for x in (tensors.own, tensors.of_shared, tensors.k, tensors.v))
    absorbed = torch.einsum("thd,hdr->thr", own, k)
    attended = latent_attention(
        torch.cat([absorbed, of_shared], dim=-1), cache, tensors.batch, rank=rank, scale=tensors.scale,
        backend=Backend.TRITON,
    )  # fmt: skip
    want = torch.einsum("thr,hdr->thd", attended, v).double()
    got = tensors.run(monkeypatch, None).double()
    assert (got - want).norm() / want.norm() < 2 * TOLERANCE


def test_only_what_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expanded_latent_hopper, "runs_gluon", lambda device: True)
    tensors = Case(SIZES["64 columns"], [600], [0], 0, padding=0)
    batch = tensors.batch

    def taken(rows: int = 600, backend: Backend = Backend.TRITON, value_dim: int = 40, **change: Any) -> bool:
        given = tensors.own[:rows], 8, value_dim, dataclasses.replace(batch, **change)
        return expands_latents(*given, backend=backend)

    mixture = MixedBatch(batch.seq_lens, batch.state_slots, 4)
    assert taken() and taken(num_begun=1) and taken(512) and taken(mixed=mixture, max_query_len=1)
    assert not taken(511) and not taken(num_begun=0) and not taken(value_dim=257) and not taken(max_query_len=1)
    assert taken(num_seqs=4) and not taken(num_seqs=5) and taken(num_seqs=7, num_decodes=3), "rows of a sequence"
    assert not taken(mixed=dataclasses.replace(mixture, max_prefills=0))
    assert not taken(verification=Verification(600, batch.state_slots[:, None]))
    assert not any(taken(backend=b) for b in (Backend.TORCH, Backend.INVARIANT_TRITON, Backend.INVARIANT_TORCH))
    assert not takes(tensors.own.float(), 8, 40, batch)
    monkeypatch.setattr(expanded_latent_hopper, "runs_gluon", lambda device: False)
    assert not taken()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("query_lens", "contexts", "decodes"),
    [([600], [0], 0), ([4096], [0], 0), ([1, 1, 1500, 17, 900, 1], [700, 3, 0, 0, 64, 0], 2), ([1000, 24], [8, 0], 0)],
)
@pytest.mark.parametrize("is_mixture", [False, True])
def test_long_sequences_on_the_gpu(
    query_lens: list[int], contexts: list[int], decodes: int, is_mixture: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ON_HOPPER:
        pytest.skip("needs compute capability 9")
    tensors = Case(BIG, query_lens, contexts, decodes)
    if is_mixture:
        tensors.as_mixture(decodes, max_prefills=8)
    others = None if all(tensors.is_new) and not is_mixture else tensors.others
    for _ in range(3):
        tensors.check(tensors.run(monkeypatch, others), others, last_rows=300)


@pytest.mark.gpu
def test_a_captured_call_serves_other_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts and lengths are read on the device at each replay."""
    if not ON_HOPPER:
        pytest.skip("needs compute capability 9")
    tensors = Case(BIG, [1, 700, 300], [40, 0, 5], 1)
    tensors.as_mixture(1, max_prefills=4)
    given = tensors.own, tensors.of_shared, tensors.entries, tensors.k, tensors.v, tensors.batch

    def attend() -> Tensor:
        return expanded_latent_attention_triton(*given, scale=tensors.scale, others=tensors.others)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for lengths in ([41, 700, 305], [41, 700, 300], [41, 750, 300]):  # which of the sequences begin
        tensors.batch.seq_lens[:3] = torch.tensor(lengths)
        tensors.is_new = [False, lengths[1] == 700, lengths[2] == 300]
        graph.replay()
        tensors.check(out, tensors.others)
