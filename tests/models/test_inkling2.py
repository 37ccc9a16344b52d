"""Inkling 2's decoder: which layers are alike, and what stays in float32 in a model of less precision."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.harness import Harness
from tests.models.test_parity import prompt
from tests.tiny import make_checkpoint
from weft.forward_context import forward_context

ARCH = "Inkling2ForCausalLM"


def test_layers_of_a_kind_read_as_many_blocks(tmp_path: Path) -> None:
    """A piece that is compiled for one layer serves all layers of its kind."""
    folder = make_checkpoint(ARCH, tmp_path, num_hidden_layers=7, layer_types=["hybrid_sliding"] * 7)
    kinds = [layer.kind for layer in Harness(folder).model.model.layers]
    assert [kinds.index(kind) for kind in kinds] == [0, 1, 1, 3, 4, 4, 6], "blocks of three layers"


def test_the_router_and_the_reads_of_blocks_are_exact_in_bfloat16(tmp_path: Path) -> None:
    harness = Harness(make_checkpoint(ARCH, tmp_path), dtype=torch.bfloat16)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    moe = harness.model.get_submodule("model.layers.1.mlp")
    moe.router.register_forward_hook(lambda module, inputs, logits: seen.append((inputs[0], logits)))  # type: ignore[union-attr]
    tokens = prompt(30)
    with forward_context(harness.context_for([(harness.sequence(tokens), 30)])), torch.no_grad():
        harness.model(torch.tensor(tokens))
    [(x, logits)] = seen
    assert x.dtype == torch.bfloat16 and logits.dtype == torch.float32
    exact = x.double() @ moe.router.weight.double().T  # type: ignore[union-attr]
    assert (logits - exact).abs().max() < 1e-5
    layer = harness.model.get_submodule("model.layers.1")
    assert layer.mlp_norm.query.dtype == torch.float32 and layer.mlp_norm.weight.dtype == torch.bfloat16  # type: ignore[union-attr]
