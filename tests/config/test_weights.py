"""Bytes of weights from the geometry equal those of a model that was built."""

from __future__ import annotations

import dataclasses
from itertools import product
from pathlib import Path

import pytest

from tests.fp8_checkpoints import GEOMETRY
from tests.harness import model_context
from tests.tiny import ARCHITECTURES as PLAIN
from tests.tiny import make_checkpoint, make_config
from weft.cli.config import on_gpu
from weft.config.checkpoint import read_checkpoint_config
from weft.config.quantization import ONLINE, ONLINE_INT4, QuantizationConfig, Rule
from weft.config.weights import router_weights, weight_bytes
from weft.models.registry import create_model

ARCHITECTURES = (*PLAIN, "Zamba2ForCausalLM")
QUANTIZED = [arch for arch in ARCHITECTURES if not arch.startswith(("GptOss", "Glm5Next"))]
"""All but two, whose experts refuse FP8."""


@pytest.mark.parametrize(("quantized", "arch"), [*product([False], ARCHITECTURES), *product([True], QUANTIZED)])
def test_bytes_of_a_model(arch: str, quantized: bool, tmp_path: Path) -> None:
    """But for what is left out: norms, convolutions, scales."""
    heads = {"num_key_value_heads": 2} if arch.startswith(("Bailing", "Glm5Next")) else {}  # which has no other
    heads |= {"n_mamba_heads": 8, "head_dim": 256, "num_key_value_heads": 2} if arch.startswith("Zamba2") else {}
    made = make_config(arch, **GEOMETRY | heads)
    made.architectures = [arch]
    made.save_pretrained(tmp_path)
    config = dataclasses.replace(read_checkpoint_config(tmp_path), quantization=ONLINE if quantized else None)
    model = create_model(config, model_context())
    kept = sum(p.numel() * p.element_size() for p in model.parameters())
    assert weight_bytes(config, "float32") == pytest.approx(kept, rel=0.05)


@pytest.mark.parametrize("left_out", ["attn", ".experts.", "shared_expert.", "layers.1."])
def test_bytes_of_several_forms(left_out: str, tmp_path: Path) -> None:
    """Some modules stay as they are, and the others have four bits."""
    folder = make_checkpoint("Qwen3NextForCausalLM", tmp_path, **(GEOMETRY | {"hidden_size": 512}))
    rules = (Rule(None, (left_out,), "inside"), *ONLINE_INT4.rules)
    config = dataclasses.replace(read_checkpoint_config(folder), quantization=QuantizationConfig("online", rules))
    model = create_model(config, model_context())
    kept = sum(p.numel() * p.element_size() for p in model.parameters())
    assert weight_bytes(config, "float32") == pytest.approx(kept, rel=0.05)


def test_routers_of_the_sparse_layers_alone(tmp_path: Path) -> None:
    config = read_checkpoint_config(make_checkpoint("Qwen2MoeForCausalLM", tmp_path))
    assert config.moe is not None and config.moe.sparse_layers == {0} and router_weights(config) == 48 * 5


def test_the_published_model_fits_in_fp8_alone() -> None:
    configs = Path(__file__).parent.parent.parent / "benchmarks" / "configs"
    card = 139 << 30
    sizes = [weight_bytes(read_checkpoint_config(configs / f"qwen3-next-48l{s}"), "bfloat16") for s in ("", "-fp8")]
    assert 145 << 30 < sizes[0] < 155 << 30 and 72 << 30 < sizes[1] < 80 << 30
    assert "use more GPUs" in on_gpu(sizes[0], 0.9, card)["error"]
    assert on_gpu(sizes[1], 0.9, card)["free_bytes"] > 40 << 30
