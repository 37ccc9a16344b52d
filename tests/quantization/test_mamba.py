"""FP8 weights of families with Mamba layers, of LFM3 and of Inkling: quantised while they load, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.fp8_checkpoints import quantize_checkpoint
from tests.harness import Harness
from tests.models.test_parity import prompt
from tests.tiny import MAMBA_ARCHITECTURES, make_checkpoint
from tests.whole import unless_long
from weft.config import resolve
from weft.errors import ConfigError

TOKENS = prompt(70)
OTHERS = (
    "Lfm3ForCausalLM",
    "RecurrentGemmaForCausalLM",
    "InklingForCausalLM",
    "Inkling2ForCausalLM",
    "ZayaForCausalLM",
)


def relative_error(folder: Path) -> float:
    """Return the relative error of logits with weights quantised while they load, against logits without."""
    config = resolve(model=str(folder), device="cpu", quantization="fp8").model_config
    results = []
    for quantization in (config.quantization, None):
        harness = Harness(folder, quantization=quantization)
        results.append(harness.run([(harness.sequence(TOKENS), len(TOKENS))])[0])
    return ((results[0] - results[1]).norm() / results[1].norm()).item()


@pytest.mark.parametrize("arch", unless_long([*MAMBA_ARCHITECTURES[::2], *OTHERS], [*MAMBA_ARCHITECTURES, *OTHERS]))
def test_fp8_weights_are_near(arch: str, tmp_path: Path) -> None:
    """The error is what rounding weights and inputs to three bits of mantissa causes in such small models."""
    more = {"layers_block_type": ["linear_attention", "mlp", "full_attention"]} if "Nemotron" in arch else {}
    assert 0.005 < relative_error(make_checkpoint(arch, tmp_path, **more)) < 0.3


@pytest.mark.parametrize("arch", ["ZambaForCausalLM", "Zamba2ForCausalLM"])
def test_published_fp8_of_shared_blocks(arch: str, tmp_path: Path) -> None:
    """A block and the adapters of its layers are stored once. Only rounded inputs differ from the same weights."""
    plain = make_checkpoint(arch, tmp_path / "plain")
    folder = quantize_checkpoint(plain, "channel-token")
    names = load_file(folder / "model.safetensors")
    assert sum(name.endswith("self_attn.q_proj.weight_scale") for name in names) == (2 if "2" in arch else 1)
    assert any("adapter" in name and name.endswith("weight_scale") for name in names) == ("2" in arch)
    logits = [harness.run([(harness.sequence(TOKENS), len(TOKENS))])[0] for harness in map(Harness, (plain, folder))]
    errors = (logits[1] - logits[0]).norm(dim=1) / logits[0].norm(dim=1)
    assert 1e-4 < errors.median() < 0.2, errors.median()


def test_published_fp8_of_inkling(tmp_path: Path) -> None:
    """All linear layers but the experts, which are refused in FP8."""
    plain = make_checkpoint("InklingForCausalLM", tmp_path / "dense" / "plain", mlp_layer_types=["dense"] * 4)
    folder = quantize_checkpoint(plain, "channel-token")
    assert sum(name.endswith("r_proj.weight_scale") for name in load_file(folder / "model.safetensors")) == 4
    logits = [harness.run([(harness.sequence(TOKENS), len(TOKENS))])[0] for harness in map(Harness, (plain, folder))]
    errors = (logits[1] - logits[0]).norm(dim=1) / logits[0].norm(dim=1)
    assert 1e-4 < errors.median() < 0.2, errors.median()
    sparse = quantize_checkpoint(make_checkpoint("InklingForCausalLM", tmp_path / "sparse" / "plain"), "channel-token")
    with pytest.raises(ConfigError, match="experts with weight, weight_scale are not supported where one tensor"):
        Harness(sparse)


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("NemotronHForCausalLM", "FP8 experts without a gate"),
        ("GptOssForCausalLM", "FP8 experts with biases"),
    ],
)
def test_experts_that_are_not_supported_are_refused(arch: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        relative_error(make_checkpoint(arch, tmp_path))
