"""Heads for drafts (multi-token prediction) of FP8 checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.fp8_checkpoints import GEOMETRY, quantize_checkpoint
from tests.harness import Harness
from tests.models.mtp_reference import make_mtp_checkpoint
from tests.models.test_mtp import run_head


def test_a_head_for_drafts_is_in_fp8_too(tmp_path: Path) -> None:
    """The head is as near to dequantised weights as rounding inputs allows. Weights named as unquantised stay so."""
    plain, _reference = make_mtp_checkpoint("Qwen3NextForCausalLM", tmp_path / "plain", **GEOMETRY)
    found = []
    for folder in (quantize_checkpoint(plain, "block"), plain):
        harness = Harness(folder, mtp=True)
        head = harness.model.get_submodule("mtp")
        found.append(torch.cat(run_head(harness, [(harness.sequence(list(range(30, 71))), 40)])))
        stored = {name: p.dtype for name, p in head.named_parameters()}
        is_fp8 = (
            stored["layers.0.self_attn.qkv_proj.weight"] == stored["layers.0.mlp.experts.down"] == torch.float8_e4m3fn
        )
        assert is_fp8 == (folder != plain) and stored["layers.0.mlp.router.weight"] == torch.float32
    assert 1e-3 < (found[0] - found[1]).norm() / found[1].norm() < 0.2
