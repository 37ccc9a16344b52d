"""Architectures that wrap a text model compute transformers' logits of text, under their own tensor names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.config.published import read, tiny
from tests.harness import Harness
from tests.models.test_parity import assert_greedy, assert_logits, prompt
from tests.tiny import make_checkpoint, make_model
from tests.wrapped import WRAPPED_TEXTS, make_wrapped
from weft.config.checkpoint import read_checkpoint_config
from weft.config.wrappers import WRAPPERS
from weft.errors import ConfigError, UnsupportedModelError

CASES: list[tuple[str, str, dict[str, Any]]] = [
    (wrapper, text, {}) for wrapper, texts in WRAPPED_TEXTS.items() for text in texts
]
CASES += [("MiniCPMOcrForConditionalGeneration", "Qwen3_5ForCausalLM", {"tie_word_embeddings": False})]


@pytest.mark.parametrize(("wrapper", "text", "settings"), CASES)
def test_text_of_a_wrapper(wrapper: str, text: str, settings: dict[str, Any], tmp_path: Path) -> None:
    reference = make_wrapped(wrapper, text, tmp_path, **settings)
    config = read_checkpoint_config(tmp_path)
    assert (config.wrapper, config.architecture) == (wrapper, text)
    assert config.tie_word_embeddings == getattr(reference.config, "tie_word_embeddings", False)
    harness = Harness(tmp_path)
    sequence = harness.sequence(prompt(70))
    logits = harness.run([(sequence, 70)])[0]
    assert_logits(logits, reference, sequence.tokens)
    harness.decode([sequence], [logits], 10)
    assert_greedy(reference, sequence.tokens, 70)


def test_experts_of_nemo_in_one_tensor(tmp_path: Path) -> None:
    """NeMo stores the experts' matrices transposed, in one tensor of each kind."""
    wrapper = "Nemotron3_5TranscribeForConditionalGeneration"
    reference = make_wrapped(wrapper, "NemotronHForCausalLM", tmp_path)
    tensors, experts = {}, dict[str, list[torch.Tensor]]()
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        parts = re.fullmatch(r"(.*\.experts\.)(\d+)\.(up|down)_proj\.weight", name)
        if parts is None:
            tensors[name] = tensor
        else:
            kind = "gate_and_up_projs" if parts[3] == "up" else "down_projs"
            experts.setdefault(parts[1] + kind, []).append(tensor)
    assert len(experts) == 2
    tensors |= {name: torch.stack(each).transpose(1, 2).contiguous() for name, each in experts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    sequence = (harness := Harness(tmp_path)).sequence(prompt(20))
    assert_logits(harness.run([(sequence, 20)])[0], reference, sequence.tokens)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_tied_embeddings_of_a_file_that_does_not_say(wrapper: str, tmp_path: Path) -> None:
    """The embeddings are tied as transformers assumes, whatever the text config says."""
    reference = make_wrapped(wrapper, WRAPPED_TEXTS[wrapper][0], tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    tied = getattr(type(reference.config)(), "tie_word_embeddings", False)
    written.pop("tie_word_embeddings", None)
    written["text_config"]["tie_word_embeddings"] = not tied
    assert read(tmp_path, written).tie_word_embeddings == tied
    assert read(tmp_path, written | {"tie_embedding": not tied}).tie_word_embeddings == (not tied)


def test_other_text_models_are_refused(tmp_path: Path) -> None:
    wrapper = "MiniCPMV4_6ForConditionalGeneration"
    with pytest.raises(ConfigError, match="needs a text_config object"):
        read(tmp_path, {"architectures": [wrapper]})
    message = re.escape(
        f"model_type='llama' is not supported in {wrapper}; supported are qwen3_5_text, qwen3_5_moe_text"
    )
    with pytest.raises(UnsupportedModelError, match=message):
        read(tmp_path, {"architectures": [wrapper], "text_config": {"model_type": "llama"}})


def test_a_decision_head_beside_the_weights_is_not_read(tmp_path: Path) -> None:
    """The repository of a JEV model holds the text model, whose name ``config.json`` has, and a head of its own."""
    folder = make_checkpoint("Qwen3_5ForCausalLM", tmp_path)
    save_file({"weight": torch.zeros(24, 48), "bias": torch.zeros(24)}, folder / "head.safetensors")
    sequence = (harness := Harness(folder)).sequence(prompt(9))
    assert_logits(harness.run([(sequence, 9)])[0], make_model("Qwen3_5ForCausalLM"), sequence.tokens)
    with pytest.raises(UnsupportedModelError, match="'JevForDecision' is not supported"):
        read(tmp_path, tiny("Qwen3_5ForCausalLM", architectures=["JevForDecision"]))


def test_old_and_new_names_of_layer_types(tmp_path: Path) -> None:
    """Names before and since transformers 5.23 mean the same, in every family."""
    kinds = {"mamba": "linear_attention", "attention": "full_attention"}
    for arch in ("Qwen3NextForCausalLM", "BambaForCausalLM", "KimiLinearForCausalLM"):
        old = tiny(arch, layer_types=["mamba", "attention", "mamba", "attention"])
        new = tiny(arch, layer_types=[kinds[kind] for kind in old["layer_types"]])
        assert read(tmp_path, old) == read(tmp_path, new)
        assert read(tmp_path, old).layer_types == tuple(new["layer_types"])
    for name in ("indexed_attention", "qwen_sparse_attention", "deepseek_sparse_attention"):
        with pytest.raises(UnsupportedModelError, match=f"layer_types holds '{name}', which is not supported"):
            read(tmp_path, tiny("Qwen3NextForCausalLM", layer_types=["linear_attention"] * 3 + [name]))
