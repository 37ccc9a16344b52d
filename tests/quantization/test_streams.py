"""FP8 in families with residual streams, whose connections stay in the model's dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.fp8_checkpoints import GEOMETRY, quantize_checkpoint
from tests.harness import Harness
from tests.models.test_parity import prompt
from tests.tiny import make_checkpoint
from weft.config.quantization import ONLINE
from weft.errors import ConfigError

QWEN4, GLM5 = "Qwen4ExpForCausalLM", "Glm5NextForConditionalGeneration"


@pytest.mark.parametrize("online", [False, True])
def test_fp8_is_near_the_weights_that_it_stores(online: bool, tmp_path: Path) -> None:
    """Inputs are rounded too, and so some tokens get other pools and experts: most rows are compared."""
    plain = make_checkpoint(QWEN4, tmp_path / "plain", **GEOMETRY)
    folder = quantize_checkpoint(plain, "channel-token", left_out="hyper_connection|indexer")
    stored = load_file(folder / "model.safetensors")
    assert "model.layers.0.ple.key_proj.weight_scale" in stored, "projections of n-grams are quantised"
    tokens, logits = prompt(130), []
    rounded = Harness(plain, quantization=ONLINE) if online else Harness(folder)
    for harness in (Harness(plain), rounded):
        logits.append(harness.run([(harness.sequence(tokens), len(tokens))])[0])
    errors = (logits[1] - logits[0]).norm(dim=1) / logits[0].norm(dim=1)
    assert 1e-4 < errors.median() < 0.1, errors.median()


def test_experts_with_clamped_activations_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(GLM5, tmp_path, **GEOMETRY | {"num_key_value_heads": 2})
    with torch.no_grad(), pytest.raises(ConfigError, match="FP8 experts with biases or a clamped activation"):
        Harness(folder, quantization=ONLINE)
