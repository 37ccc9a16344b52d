"""Check the costs of a model's layers, which eviction uses, against transformers' model and by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import ARCHITECTURES, MAMBA_ARCHITECTURES, make_config, make_model
from weft.cache.spec import CacheSpec
from weft.config.checkpoint import read_checkpoint_config
from weft.config.layer_spec import CacheDtypes

TEXT_MODELS = [arch for arch in (*ARCHITECTURES, *MAMBA_ARCHITECTURES) if arch.endswith("CausalLM")]
NOT_COUNTED = (
    "embed", "lm_head", "shared_expert_gate", ".bias", "_bias", "A_log", ".D", "l2_clip", "hyper_connection",
    "attention_input",
)  # fmt: skip
"""The output head is counted apart, the mixers of residual streams and blocks are not; the others are vectors."""


def spec_of(config: Any, arch: str, folder: Path) -> CacheSpec:
    stored = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [arch]}
    (folder / "config.json").write_text(json.dumps(stored))
    dtypes = CacheDtypes(model="bfloat16", kv="bfloat16", state="float32")
    return CacheSpec.from_model(read_checkpoint_config(folder), page_size=16, dtypes=dtypes)


@pytest.mark.parametrize("arch", TEXT_MODELS)
def test_a_token_meets_the_matrices_of_the_model(arch: str, tmp_path: Path) -> None:
    """Each matrix counts once per layer that uses it. A mixture counts only the chosen experts.

    A shared block lists the adapters of all its layers in each of them.
    """
    config = make_config(arch)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next((n for n in (getattr(config, name, None) for name in names) if n), 1)
    met, adapters = 0.0, set[int]()
    for name, parameter in make_model(arch).named_parameters(remove_duplicate=False):
        if "adapter" in name and id(parameter) in adapters:
            continue
        adapters.add(id(parameter))
        if parameter.dim() > 1 and not any(part in name for part in NOT_COUNTED):
            share = config.num_experts_per_tok / num_experts if ".experts." in name else 1.0
            met += share * parameter.numel()
    assert spec_of(config, arch, tmp_path).weights_per_token == pytest.approx(met)


CASES = [
    # Short convolution: 48 channels, 2 earlier inputs; the two gates.
    ("Lfm2ForCausalLM", "model.layers.0.conv", 48 * 2 * 2, 0, 2 * 48, 0),
    # Mamba: 96 channels, 3 earlier inputs, a state of 12.
    ("JambaForCausalLM", "model.layers.0.mamba", 96 * 3 * 2 + 12 * 96 * 4, 0, 7 * 96 * 12, 0),
    # Mamba-2: 6 heads of 16, a state of 12, 2 groups.
    ("Mamba2ForCausalLM", "model.layers.0.mamba", 144 * 3 * 2 + 6 * 12 * 16 * 4, 0, 5 * 6 * 12 * 16, 0),
    # Lightning attention: 4 heads of 16.
    ("MiniMaxForCausalLM", "model.layers.0.self_attn", 4 * 16 * 16 * 4, 0, 5 * 4 * 16 * 16, 0),
    # Kimi Delta Attention: 4 heads of 12.
    ("KimiLinearForCausalLM", "model.layers.0.self_attn", 144 * 3 * 2 + 4 * 12 * 12 * 4, 0, 6 * 4 * 12 * 12, 0),
    # Latent attention: a latent of 20 and a shared part of 6, padded to 32; 4 heads read both and sum the first.
    ("KimiLinearForCausalLM", "model.layers.2.self_attn", 0, 32 * 2, 0, 2 * 4 * (26 + 20)),
    # A shared block's attention: keys and values of 4 heads of 24.
    ("Zamba2ForCausalLM", "model.layers.3.shared_block", 0, 2 * 4 * 24 * 2, 0, 4 * 4 * 24),
    # Convolutional attention: 6 heads of 16, each for 3 tokens, and 2 of values; 3 earlier inputs.
    ("ZayaForCausalLM", "model.layers.0.self_attn", (6 * 3 + 2) * 16 * 3 * 2, 2 * 2 * 16 * 2, 0, 4 * 4 * 16),
    # A window of 20 tokens: keys and values of 2 heads of 16 in bfloat16; 4 heads read it.
    ("Gemma3ForCausalLM", "model.layers.0.self_attn", 2 * 20 * 2 * 16 * 2, 0, 4 * 4 * 16 * 20, 0),
]


@pytest.mark.parametrize(("arch", "layer", "slot", "token", "flops", "pair"), CASES, ids=lambda x: str(x))
def test_what_a_layer_keeps_and_computes(
    arch: str, layer: str, slot: int, token: int, flops: float, pair: float, tmp_path: Path
) -> None:
    spec = spec_of(make_config(arch), arch, tmp_path).layers[layer]
    assert (spec.slot_bytes, spec.token_bytes) == (slot, token)
    assert (spec.flops_per_token, spec.flops_per_pair) == (flops, pair)
