"""Verification of graphs, on the emulator: it passes where they are right and tells where they are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.media import VL, make_vision_checkpoint
from tests.models.mtp_reference import make_mtp_checkpoint
from tests.tiny import make_checkpoint
from tests.whole import takes_long
from weft.bench.graph_check import SizeCheck, verify_graphs
from weft.config import resolve
from weft.errors import CapacityError
from weft.graph.graph import Tape
from weft.runner.model_runner import ModelRunner

SIZES = {"max_num_batched_tokens": 96, "max_num_seqs": 5, "max_model_len": 130, "page_size": 8}


def make_runner(path: Path, arch: str = "Qwen3NextForCausalLM", **settings: object) -> ModelRunner:
    folder = make_checkpoint(arch, path)
    return ModelRunner(resolve(model=str(folder), device="cpu", **{"cuda_graph_mode": "FULL_DECODE_ONLY"} | settings))


@pytest.mark.parametrize("arch", ["Qwen3NextForCausalLM", pytest.param("LlamaForCausalLM", marks=takes_long)])
def test_graphs_agree_with_eager_steps(arch: str, tmp_path: Path) -> None:
    checks = list(verify_graphs(make_runner(tmp_path, arch, **SIZES)))
    assert [(check.size, check.num_rows) for check in checks] == [(1, 1), (2, 1), (4, 3), (5, 4)]
    assert all(check.agrees and check.max_abs_diff == 0 and check.max_abs_value > 0.1 for check in checks)


def test_graphs_larger_than_all_rows_together(tmp_path: Path) -> None:
    """Two sequences of 15 tokens, and graphs for 64."""
    settings = {"max_num_batched_tokens": 64, "max_num_seqs": 2, "max_model_len": 16, "page_size": 8}
    sizes = {"cuda_graph_mode": "FULL_AND_PIECEWISE", "cuda_graph_bs": [1], "piecewise_cuda_graph_tokens": [16, 64]}
    checks = list(verify_graphs(make_runner(tmp_path, **settings, **sizes)))
    rows = {(check.kind, check.size): check.num_rows for check in checks}
    assert rows["pieces", 16] == 15 and rows["pieces", 64] == 30 and all(check.agrees for check in checks)


def test_graphs_of_the_vision_tower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = make_vision_checkpoint(VL, tmp_path)
    sizes = {"cuda_graph_mode": "FULL_DECODE_ONLY", "cuda_graph_bs": [1], "encoder_cuda_graph_patches": [4, 32]}
    runner = ModelRunner(resolve(model=str(folder), device="cpu", cpu_cache_gib=0.05, **SIZES, **sizes))
    decode, *checks = verify_graphs(runner)
    assert [(check.kind, check.size, check.num_rows) for check in checks] == [("encoder", 4, 1), ("encoder", 32, 7)]
    assert all(check.agrees and check.max_abs_value > 0.1 for check in (decode, *checks))
    monkeypatch.setattr(Tape, "replay", lambda self: None)
    assert not any(check.agrees for check in verify_graphs(runner))


@pytest.mark.parametrize("method", ["mtp", pytest.param("ngram", marks=takes_long)])
def test_verification_graphs_agree_with_eager_steps(method: str, tmp_path: Path) -> None:
    """Also where sequences follow a step whose rejected drafts only the device knows."""
    folder, _ = make_mtp_checkpoint("Qwen3NextForCausalLM", tmp_path)
    config = {"method": method, "num_speculative_tokens": 2}
    settings: dict[str, Any] = SIZES | {"cuda_graph_mode": "FULL_DECODE_ONLY", "cuda_graph_bs": [1, 5]}
    runner = ModelRunner(resolve(model=str(folder), enable_overlap=True, speculative_config=config, **settings))
    checks = list(verify_graphs(runner))
    kinds = [("decode", 1, 1), ("decode", 5, 4), ("verification", 1, 3), ("verification", 5, 12)]
    assert [(check.kind, check.size, check.num_rows) for check in checks] == kinds
    assert all(check.agrees and check.max_abs_value > 0.1 for check in checks), checks


def test_a_graph_that_does_not_run_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(tmp_path, **SIZES)
    monkeypatch.setattr(Tape, "replay", lambda self: None)
    assert not any(check.agrees for check in verify_graphs(runner))


def test_a_graph_of_advanced_states_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replay runs the step twice. The second run starts from the states of one token later."""
    replay = Tape.replay
    runner = make_runner(tmp_path, **SIZES)
    monkeypatch.setattr(Tape, "replay", lambda self: (replay(self), replay(self)))
    assert not any(check.agrees for check in verify_graphs(runner))


def test_a_cache_too_small_is_refused(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, "LlamaForCausalLM", **SIZES | {"page_size": 1, "num_kv_pages": 6})
    with pytest.raises(CapacityError, match="num_kv_pages"):
        list(verify_graphs(runner))


def test_nan_never_agrees() -> None:
    assert not SizeCheck("decode", 1, 1, float("nan"), float("nan"), 0).agrees


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
def test_every_kind_of_graph_is_verified(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"cuda_graph_mode": mode, "cuda_graph_bs": [1, 4], "piecewise_cuda_graph_tokens": [1, 70]}
    runner = make_runner(tmp_path, **SIZES, **settings)
    passes = "forward" if mode == "FULL" else "pieces"
    kinds = [("decode", 1), ("decode", 4)]
    kinds += [("forward", 1), ("forward", 70)] * (mode == "FULL") + [("sampling", 1), ("sampling", 4)]
    kinds += [("pieces", 1), ("pieces", 70)] * (mode != "FULL")
    checks = list(verify_graphs(runner))
    assert [(check.kind, check.size) for check in checks] == kinds and all(check.agrees for check in checks)
    assert all(check.num_rows == max(1, check.size - 1) for check in checks if check.kind != "sampling")
    assert all(check.max_abs_value > 0.01 for check in checks)
    monkeypatch.setattr(Tape, "replay", lambda self: None)
    assert {check.kind for check in verify_graphs(runner) if not check.agrees} == {"decode", passes, "sampling"}
