"""Measured modes and the look into pieces on a GPU: real graphs of every mode in one engine, kernels in the listing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.test_engine import SMALL, mixed_workload, runner_of, tokens
from weft import LLM
from weft.bench.graph_dump import dump_graphs
from weft.cli import main
from weft.cli.graph_picture import fold
from weft.config import resolve
from weft.config.graph_profile import read_profile

pytestmark = pytest.mark.gpu

SIZES = ["16", "64", "210", "512"]
FLAGS = ["--device", "cuda", "--dtype", "float32", "--max-num-seqs", "8", "--max-model-len", "512"]


def test_a_start_after_tuning_uses_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    flags = [*FLAGS, "--max-num-batched-tokens", "512", "--piecewise-cuda-graph-tokens", *SIZES]
    assert main(["tune", *flags, "--repeats", "5"]) == 0
    (path,) = (tmp_path / "graph-profiles").iterdir()
    profile = read_profile(path)
    for timing in profile.prefill + profile.mixed + profile.decode:
        assert set(timing.ms) == {"NONE", "PIECEWISE", "FULL"}
    settings = SMALL | {"max_num_batched_tokens": 512, "piecewise_cuda_graph_tokens": [int(size) for size in SIZES]}
    prompts, params = mixed_workload(24, seed=0, temperature=0.0, presence_penalty=0.0, logprobs=None)
    with LLM(**SMALL, max_num_batched_tokens=512, cuda_graph_mode="NONE") as llm:
        expected = tokens(llm.generate(prompts, params, use_tqdm=False))
    with LLM(**settings) as llm:
        assert llm.config.graph_profile == str(path) and llm.config.cuda_graph_mode == "TUNED"
        assert tokens(llm.generate(prompts, params, use_tqdm=False)) == expected
        runner = runner_of(llm)
        graphs = (runner.graphs.decode, runner.graphs.forward, runner.graphs.pieces)
        assert sum(g.counters.replays for g in graphs if g is not None) > 0, "no graph was faster than none"


def test_the_listing_shows_the_kernels() -> None:
    config = resolve(**SMALL, cuda_graph_mode="PIECEWISE", skip_tokenizer_init=True)
    found = dump_graphs(config, 65)
    assert len(found.pieces) == 1 + config.model_config.layer_types.count("full_attention")
    kernels = [operation.name for piece in found.pieces for operation in piece.kernels]
    assert any(name.startswith("_") and "kernel[" in name for name in kernels), "no Triton kernel was noted"
    assert any(name.startswith("aten.") for name in kernels)
    assert all(part.ms > 0 for part in found.parts) and sum(one.count for one in fold(found.parts)) >= 1
