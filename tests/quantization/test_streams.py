"""FP8 in families with residual streams, whose connections stay in the model's dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.fp8_checkpoints import GEOMETRY, quantize_checkpoint
from tests.harness import Harness
from tests.models.test_parity import prompt
from tests.quantization.test_parity import GLM5, GLM5_SIZES
from tests.tiny import make_checkpoint
from weft.config.quantization import ONLINE

QWEN4 = "Qwen4ExpForCausalLM"
SIZES = {QWEN4: GEOMETRY, GLM5: GEOMETRY | GLM5_SIZES | {"num_key_value_heads": 2}}
BOUNDS = {QWEN4: 0.1, GLM5: 0.15}
"""Rounding the inputs of transformers' GLM-5.3 moves its logits by 0.1 (``test_parity.py``)."""
QUANTIZED = {
    QWEN4: "model.layers.0.ple.key_proj.weight",
    GLM5: "model.language_model.layers.1.mlp.experts.0.down_proj.weight",
}
"""A weight that a checkpoint in FP8 quantises: a projection of n-grams, and experts with clamped activations."""


@pytest.mark.parametrize(("arch", "online"), [(QWEN4, False), (QWEN4, True), (GLM5, True)])
def test_fp8_is_near_the_weights_that_it_stores(arch: str, online: bool, tmp_path: Path) -> None:
    """Inputs are rounded too, and so some tokens get other pools and experts: most rows are compared."""
    plain = make_checkpoint(arch, tmp_path / "plain", **SIZES[arch])
    folder = quantize_checkpoint(plain, "channel-token", left_out="hyper_connection|indexer")
    assert f"{QUANTIZED[arch]}_scale" in load_file(folder / "model.safetensors")
    tokens, logits = prompt(130), []
    rounded = Harness(plain, quantization=ONLINE) if online else Harness(folder)
    for harness in (Harness(plain), rounded):
        logits.append(harness.run([(harness.sequence(tokens), len(tokens))])[0])
    errors = (logits[1] - logits[0]).norm(dim=1) / logits[0].norm(dim=1)
    assert 1e-4 < errors.median() < BOUNDS[arch], errors.median()
