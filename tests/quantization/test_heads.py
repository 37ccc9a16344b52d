"""Multi-token-prediction heads of quantised checkpoints: quantised, listed as unquantised, or unquantised and not
listed. Drafts change no token."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.coded_checkpoints import code_checkpoint, make_coded_checkpoint
from tests.fp8_checkpoints import edit_tensors
from tests.harness import Harness
from tests.speculation.conftest import make_repeating_checkpoint
from tests.speculation.test_heads import SETTINGS, case
from tests.tiny import make_checkpoint
from tests.whole import unless_long
from tests.x_matrix import runner_of
from weft import LLM
from weft.config.checkpoint import read_checkpoint_config
from weft.errors import ConfigError, UnsupportedModelError

INKLING, NEXT, LING = "InklingForCausalLM", "Qwen3NextForCausalLM", "BailingHybridForCausalLM"
_MLP = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
SIZES: dict[str, dict[str, Any]] = {
    INKLING: _MLP | {"swa_head_dim": 16, "mlp_layer_types": ["dense"] * 4},
    NEXT: _MLP,
    LING: _MLP | {"head_dim": 16, "v_head_dim": 16, "kv_lora_rank": 32},
}
HEADS = {INKLING: r"\.mtp\.", NEXT: r"^mtp\.", LING: r"\.layers\.4\."}
"""Patterns of the head's tensors."""
JOINT = r"mtp\.fc|eh_proj|input_proj"
KINDS = ["int4 g32", "nvfp4", "modelopt"]


def left_out(arch: str, how: str) -> str:
    return {"quantised": "no tensor", "a part": JOINT}.get(how, HEADS[arch])


@pytest.mark.parametrize(
    ("arch", "kind", "how"),
    unless_long(
        [(INKLING, KINDS[0], "quantised"), (NEXT, KINDS[1], "listed"), (INKLING, KINDS[0], "a part")],
        product([INKLING, NEXT, LING], KINDS, ["quantised", "listed", "not listed", "a part"]),
    ),
)
def test_drafts_change_no_token(arch: str, kind: str, how: str, tmp_path: Path) -> None:
    make_repeating_checkpoint(arch, tmp_path / "plain", head=True, **SIZES[arch])
    coded = code_checkpoint(tmp_path / "plain", kind, left_out(arch, how), listed=how == "listed")
    drafts = {"method": "mtp", "num_speculative_tokens": 3}
    with LLM(str(coded), **SETTINGS) as plain:
        expected = case().run(plain)
    with LLM(str(coded), **SETTINGS, speculative_config=drafts) as mtp:
        assert [done.token_ids for done in case().run(mtp)] == [done.token_ids for done in expected]
        stats = mtp.stats()
        assert stats.spec_decode_num_accepted_tokens > 0.1 * stats.spec_decode_num_draft_tokens > 0
        head = dict(runner_of(mtp).model.get_submodule("mtp").named_parameters())
    joint = next(name for name in head if ".fc." in f".{name}" or "input_proj" in name)
    assert joint.endswith("weight") and ("weight_scale" in " ".join(head)) == (how in ("quantised", "a part"))
    assert (joint.replace("weight", "weight_scale") in head) == (how == "quantised")


def test_modelopt_writes_a_file_of_its_own(tmp_path: Path) -> None:
    """``hf_quant_config.json`` counts where config.json says nothing, and scales of a KV cache are found by name."""
    make_repeating_checkpoint(NEXT, tmp_path / "plain", **SIZES[NEXT])
    coded = code_checkpoint(tmp_path / "plain", "modelopt")
    want = read_checkpoint_config(coded).quantization
    config = json.loads((coded / "config.json").read_text())
    found = config.pop("quantization_config")
    (coded / "config.json").write_text(json.dumps(config))
    own = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": found["ignore"]}
    (coded / "hf_quant_config.json").write_text(json.dumps({"quantization": own}))
    assert read_checkpoint_config(coded).quantization == want is not None
    (coded / "hf_quant_config.json").write_text(json.dumps({"quantization": own | {"quant_algo": "FP8"}}))
    inkling = make_checkpoint(INKLING, tmp_path / "inkling", **_MLP, swa_head_dim=16)
    (inkling / "hf_quant_config.json").write_text(json.dumps({"quantization": own}))
    with pytest.raises(ConfigError, match=r"weight_scale_2.* are not supported.* use a checkpoint with plain experts"):
        Harness(inkling)
    with pytest.raises(UnsupportedModelError, match=r"hf_quant_config\.json.*quant_algo='FP8' is not supported"):
        read_checkpoint_config(coded)


def test_modelopt_gives_scales_of_the_cache_to_projections(tmp_path: Path) -> None:
    coded = make_coded_checkpoint("Qwen3ForCausalLM", "modelopt", tmp_path)
    names = {f"model.layers.{i}.self_attn.{x}_proj.{x}_scale": 0.5 + i + (x == "v") / 4 for i in range(2) for x in "kv"}
    edit_tensors(coded, lambda tensors: tensors.update({name: torch.tensor(x) for name, x in names.items()}))
    harness = Harness(coded)
    assert harness.config.quantization is not None and harness.config.quantization.kv_cache
    for i in range(2):
        attention = harness.model.get_submodule(f"model.layers.{i}.self_attn")
        assert (attention.k_scale.item(), attention.v_scale.item()) == (0.5 + i, 0.75 + i)  # type: ignore[union-attr]
