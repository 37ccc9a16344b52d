"""Promises of layers beyond parity: padding rows, the layer table, cache lookup by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.harness import Harness, leave_parts, model_context
from tests.tiny import make_checkpoint
from weft.config.layer_spec import CacheDtypes
from weft.forward_context import LogitsRows, forward_context
from weft.layers import moe
from weft.layers.all_reduce import AllReduce
from weft.layers.attention import Attention
from weft.layers.linear import RowParallelLinear
from weft.layers.table import LayerTable
from weft.ops.backend import Backend
from weft.ops.fp8 import E4M3


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(make_checkpoint("Qwen3NextForCausalLM", tmp_path))


def test_the_layer_table_lists_the_layers_of_the_specs_in_order(harness: Harness) -> None:
    table = harness.context.layers
    assert (
        list(table)
        == list(harness.config.layer_specs(CacheDtypes()))
        == [
            "model.layers.0.linear_attn",
            "model.layers.1.linear_attn",
            "model.layers.2.linear_attn",
            "model.layers.3.self_attn",
        ]
    )
    for name, layer in table.items():
        assert harness.model.get_submodule(name) is layer


def test_a_name_is_registered_once() -> None:
    table = LayerTable()
    table.register("a", torch.nn.Identity())
    with pytest.raises(AssertionError, match="registered twice"):
        table.register("a", torch.nn.Identity())


def test_sums_are_left_only_where_a_norm_comes_next(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared expert's product returns whole sums, since they are first added to the experts'. Whole sums are also
    returned where a tracer or a named split op would have to know of parts. The same holds for a bias on any rank, and
    for ranks that sum without peer memory."""
    products = {n: m for n, m in harness.model.named_modules() if isinstance(m, RowParallelLinear)}
    leaving = {name.removeprefix("model.layers.") for name, product in products.items() if product.returns_partial_sums}
    assert leaving == {*(f"{i}.linear_attn.out_proj" for i in range(3)), "3.self_attn.o_proj"}
    product, left = products["model.layers.0.linear_attn.out_proj"], leave_parts(monkeypatch)
    x = torch.randn(5, product.shard.columns)
    context = harness.context_for([(harness.sequence(list(range(9))), 5)])
    with forward_context(context):
        assert product(x).dim() == 3 and len(left) == 1
    with forward_context(replace(context, any_num_tokens=True)):
        assert product(x).dim() == 2
    assert len(left) == 1
    for rank, size, bias in ((0, 1, False), (1, 2, False), (0, 1, True), (0, 2, True), (1, 2, True)):
        context_of_ranks = model_context(tp=SimpleNamespace(rank=rank, size=size))  # type: ignore[arg-type]
        other = RowParallelLinear(8, 8, bias=bias, context=context_of_ranks, what="inputs")
        other.return_partial_sums(None)
        assert other.returns_partial_sums == (not bias)
    ranks = SimpleNamespace(peers=lambda x: None, peers_to_send=lambda x: None)
    product.return_partial_sums(ranks)  # type: ignore[arg-type]
    with forward_context(context):
        assert product(x).dim() == 2 and len(left) == 1
        ranks.peers = lambda x: "memory"
        assert product(x).dim() == 3 and len(left) == 2


def test_rows_are_sent_only_where_the_next_norm_receives_them(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few ones, all of a pass, where no split op sees them; not while a rank is alone."""
    group = SimpleNamespace(rank=0, size=2, is_alone=False, peer_memory=lambda num_bytes: torch.zeros(2))
    all_reduce = AllReduce.over_ranks(64, replace(model_context(tp=group), custom_all_reduce=True))  # type: ignore[arg-type]
    batch = harness.context_for([(harness.sequence(list(range(9))), 5)])
    some = replace(batch, batch=replace(batch.batch, logits_rows=LogitsRows(torch.zeros(1), batch.batch)))
    named = replace(batch, any_num_tokens=True)
    broken = replace(batch, breaks=SimpleNamespace(names=frozenset({"all_reduce"})))  # type: ignore[arg-type]
    x, many = torch.zeros(128, 8), torch.zeros(129, 8)
    for context, given, sends in (
        (batch, x, True), (batch, many, False), (some, x, False), (named, x, False), (broken, x, False)
    ):  # fmt: skip
        with forward_context(context):
            assert (all_reduce.peers_to_send(given) is not None) == sends
            assert (all_reduce.peers(given) is not None) == (context is not broken)
    monkeypatch.setattr(group, "is_alone", True)
    with forward_context(batch):
        assert all_reduce.peers_to_send(x) is all_reduce.peers(x) is None


def test_mixers_whose_outputs_are_added_up_leave_no_sums(tmp_path: Path) -> None:
    plain = {"attention_out_multiplier": 1.0, "mlp_multipliers": [1.0, 1.0]}
    model = Harness(make_checkpoint("FalconH1ForCausalLM", tmp_path, **plain)).model
    products = {n: m for n, m in model.named_modules() if isinstance(m, RowParallelLinear)}
    assert {name.split(".")[-1] for name, product in products.items() if product.returns_partial_sums} == {"down_proj"}


@pytest.mark.parametrize("name", ["model.layers.0.linear_attn", "model.layers.3.self_attn", "model.layers.1.mlp"])
@pytest.mark.parametrize("decode", [False, True])
def test_nan_padding_rows_do_not_reach_real_rows(harness: Harness, name: str, decode: bool) -> None:
    """Layers keep rows apart; Gated DeltaNet returns zeros for padding rows, whatever those rows held."""
    layer = harness.model.get_submodule(name)
    sequence, num_tokens = harness.sequence(list(range(80))), 66
    x = torch.randn(num_tokens + 1, harness.config.hidden_size)
    poisoned = torch.cat([x, torch.full((3, x.shape[1]), float("nan"))])
    with forward_context(harness.context_for([(sequence, num_tokens)], pad_tokens=3, pad_seqs=2)):
        out = layer(torch.cat([x[:num_tokens], poisoned[-3:]]))
    assert out[:num_tokens].isfinite().all()
    if decode:
        sequence.num_computed, num_tokens = num_tokens, 1
        with forward_context(harness.context_for([(sequence, 1)], pad_tokens=3, pad_seqs=3)):
            out = layer(poisoned[-4:])
        assert out[:1].isfinite().all()
    if name.endswith("linear_attn"):
        assert (out[num_tokens:] == 0).all()


def test_padding_never_writes_a_live_page_or_slot(harness: Harness) -> None:
    """A padded decode step changes only its own page and slot (and the reserved ones)."""
    a, b = harness.sequence(list(range(40))), harness.sequence(list(range(50, 90)))
    harness.run([(a, 30), (b, 30)])
    before = {name: [t.clone() for t in cache.values()] for name, cache in harness.caches.items()}
    harness.run([(a, 1)], pad_tokens=4, pad_seqs=4)
    for name, cache in harness.caches.items():
        live = b.pages if "k" in cache else [b.slot]
        for old, new in zip(before[name], cache.values(), strict=True):
            assert torch.equal(old[live].nan_to_num(7.0), new[live].nan_to_num(7.0)), name


@pytest.mark.parametrize("on_device", [False, True])
def test_padding_rows_are_sent_to_no_expert(harness: Harness, on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts would compute for them, and the busiest one decides how long all take."""
    seen = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append(route(*args, **kwargs))
        return seen[-1]

    route = moe.topk_router
    monkeypatch.setattr(moe, "topk_router", noted)
    context = harness.context_for([(harness.sequence(list(range(80))), 66)], pad_tokens=3, pad_seqs=2)
    if on_device:
        context = replace(context, batch=replace(context.batch, token_count=torch.tensor([66], dtype=torch.int32)))
    with forward_context(context):
        harness.model.get_submodule("model.layers.1.mlp")(torch.randn(69, harness.config.hidden_size))
    ((weights, ids),) = seen
    assert (ids[:66] >= 0).all() and (ids[66:] == -1).all() and not weights[66:].any()


def test_a_shared_expert_of_few_rows_is_one_of_their_experts(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared expert's matrices are in the experts' memory, and outputs are the same as when the shared expert runs
    by itself. With FP8 or wider experts, fewer rows join."""
    layer = harness.model.get_submodule("model.layers.1.mlp")
    assert isinstance(layer, moe.SparseMoe) and layer.experts.shared_joins and layer.shared_expert is not None
    place = layer.experts.joined["gate_up"][-1]
    assert layer.shared_expert.gate_up_proj.weight.data_ptr() == place.data_ptr()
    assert moe.most_routed_rows(layer.experts) == 2048
    with monkeypatch.context() as in_fp8:
        in_fp8.setitem(layer.experts.joined, "gate_up", layer.experts.joined["gate_up"].to(E4M3))
        assert moe.most_routed_rows(layer.experts) == moe.MOST_ROUTED_ROWS
    monkeypatch.setattr(moe, "_NARROW", layer.experts.down_shard.columns - 1)
    assert moe.most_routed_rows(layer.experts) == moe.MOST_ROUTED_ROWS
    x, calls = torch.randn(9, harness.config.hidden_size), []
    layer.shared_expert.register_forward_hook(lambda *_: calls.append(1))
    context = harness.context_for([(harness.sequence(list(range(80))), 7)], pad_tokens=2, pad_seqs=1)
    with forward_context(context):
        joined = layer(x)
        assert not calls and not joined[7:].any()
        monkeypatch.setattr(moe, "most_routed_rows", lambda experts: 8)
        alone = layer(x)
    assert len(calls) == 1
    torch.testing.assert_close(joined[:7], alone[:7])
    assert (joined[:7] - layer.shared_expert(x[:7])).abs().max() > 0.01, "the others count too"


@pytest.mark.parametrize("backend", [Backend.TORCH, Backend.INVARIANT_TORCH])
def test_the_last_layer_computes_some_rows(tmp_path: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an invariant backend attention computes all rows: alone, a prompt's last row would sum as a decode."""
    harness = Harness(make_checkpoint("Lfm3ForCausalLM", tmp_path), backend=backend)
    layer = next(each for each in harness.context.layers.values() if type(each) is Attention)
    x, counts = torch.randn(40, harness.config.hidden_size), list[int]()
    context = harness.context_for([(harness.sequence(list(range(40))), 40)])
    attended = layer._attended
    monkeypatch.setattr(layer, "_attended", lambda *args: counts.append(len(args[0])) or attended(*args))
    one, last = torch.tensor([0, 1], dtype=torch.int32), context.batch.positions[-1:]
    alone = replace(context.batch, num_tokens=1, num_decodes=1, max_query_len=1, positions=last, cu_seqlens_q=one)
    with forward_context(context):
        rows = layer.forward_rows(x, LogitsRows(torch.tensor([39]), alone))
        torch.testing.assert_close(rows, layer(x)[-1:])
    assert counts == [40 if backend.is_invariant else 1, 40]
