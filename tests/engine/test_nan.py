"""A model whose logits are NaN fails the requests that meet it, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.conftest import HYBRID, assert_idle
from tests.tiny import make_checkpoint
from tests.whole import takes_long, unless_long
from weft import LLM, SamplingParams


def nan_checkpoint(arch: str, path: Path, **overrides: Any) -> Path:
    """A checkpoint in which token 7 has a NaN embedding."""
    folder = make_checkpoint(arch, path, with_tokenizer=True, **overrides)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("arch", [HYBRID, pytest.param("Qwen3MoeForCausalLM", marks=takes_long)])
def test_what_a_failing_step_stored_is_matched_by_nobody(arch: str, tmp_path: Path) -> None:
    """A prefill in chunks reads a NaN in its first chunk. This chunk also computes KV and a state of the shared prefix,
    before the NaN. Requests that start in the step of the last chunk, or later, reuse neither."""
    folder = nan_checkpoint(arch, tmp_path, num_hidden_layers=8)  # with layers after an attention layer
    shared = list(range(40, 90))
    bad = {"prompt_token_ids": [*shared, 91, 7, *range(60, 148)], "checkpoint_positions": [len(shared)]}
    good = [[*shared, 11, 12], [*shared, 13]]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logit_bias={7: -100.0})
    settings: dict[str, Any] = {"max_num_seqs": 5, "page_size": 8, "num_kv_pages": 200, "max_num_batched_tokens": 64}
    with LLM(str(folder), **settings) as engine:
        want = [o.outputs[0].token_ids for o in engine.generate(good, params, use_tqdm=False)]
    for mode in unless_long(["NONE", "FULL"], ["NONE", "PIECEWISE", "FULL"]):
        with LLM(str(folder), **settings, cuda_graph_mode=mode) as engine:
            outputs = engine.generate([bad, good[0]], params, use_tqdm=False)
            outputs += engine.generate([good[1]], params, use_tqdm=False)
            assert [o.outputs[0].finish_reason for o in outputs] == ["error", "length", "length"]
            assert [o.outputs[0].token_ids for o in outputs[1:]] == want
            assert_idle(engine)


@pytest.mark.parametrize("arch", [HYBRID, "Qwen3MoeForCausalLM"])
def test_nan_logits_fail_their_request_alone(arch: str, tmp_path: Path) -> None:
    """Token 7 has a NaN embedding. Its request fails; its neighbours, and who gets its pages next, do not notice."""
    folder = nan_checkpoint(arch, tmp_path)
    good = [[50 + i] * n for i, n in enumerate((1, 70, 20))]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logit_bias={7: -100.0})
    settings: dict[str, Any] = {"max_num_seqs": 5, "page_size": 8, "num_kv_pages": 40, "max_num_batched_tokens": 50}
    with LLM(str(folder), **settings) as engine:
        want = [o.outputs[0].token_ids for o in engine.generate(good, params, use_tqdm=False)]
    with LLM(str(folder), **settings) as engine:
        for _ in range(3):
            bad = [[50] * 66 + [7] * 5, [7]]
            outputs = engine.generate([good[0], bad[0], good[1], bad[1], good[2]], params, use_tqdm=False)
            assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length", "error", "length"]
            assert [outputs[i].outputs[0].token_ids for i in (0, 2, 4)] == want
            assert outputs[1].outputs[0].token_ids == [] and outputs[1].outputs[0].text == ""
        assert_idle(engine)
