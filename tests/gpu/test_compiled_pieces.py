"""Pieces from every source on a GPU: the same answers, nothing compiled at the second start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.conftest import compiled_kernels
from tests.gpu.test_engine import mixed_workload, runner_of, tokens
from tests.tiny import make_checkpoint
from weft import LLM, SamplingParams

pytestmark = pytest.mark.gpu

ARCHS = ["Qwen3NextForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"]
SOURCES = ["capture", "eager", "inductor"]
SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_model_len": 320,
    "max_num_batched_tokens": 210,
    "skip_tokenizer_init": True,
}
PIECES: dict[str, Any] = {"cuda_graph_mode": "PIECEWISE", "piecewise_cuda_graph_tokens": [1, 4, 16, 64, 130, 210]}
COMPILED: dict[str, Any] = {
    "cuda_graph_mode": "FULL_AND_PIECEWISE",
    "piecewise_cuda_graph_tokens": [16, 64, 210],
    "piecewise_cuda_graph_compiler": "inductor",
    "enable_torch_compile": True,
}


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    prompts, params = mixed_workload(20, 3, temperature=0.0, logprobs=None)
    return [[token % 200 for token in prompt] for prompt in prompts], params


@pytest.fixture(scope="module", params=ARCHS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def eager_answers(checkpoint: Path) -> list[list[int]]:
    with LLM(str(checkpoint), **SETTINGS, cuda_graph_mode="NONE") as llm:
        return tokens(llm.generate(*workload(), use_tqdm=False))


@pytest.mark.parametrize("split_at", [None, ["+gated_delta_net"], ["gated_delta_net"], ["+model.layers.*.mlp"]])
@pytest.mark.parametrize("source", SOURCES)
def test_every_source_answers_as_without_graphs(
    checkpoint: Path, eager_answers: list[list[int]], source: str, split_at: list[str] | None
) -> None:
    """Split at attention, at Gated DeltaNet too, at that alone with attention inside, and at modules by name."""
    settings = SETTINGS | PIECES | {"piecewise_cuda_graph_compiler": source, "enable_torch_compile_debug_mode": True}
    if split_at is not None:
        settings["splitting_ops"] = split_at
    with LLM(str(checkpoint), **settings) as llm:
        assert tokens(llm.generate(*workload(), use_tqdm=False)) == eager_answers
        pieces = runner_of(llm).graphs.pieces
        assert pieces is not None and pieces.counters.replays > 10
        counters = runner_of(llm).compiler.counters
        assert (counters.compiled + counters.cache_hits > 0) == (source == "inductor")


def test_a_second_start_compiles_nothing(
    checkpoint: Path, eager_answers: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces and decode graphs from the same compiled pieces; steps compile nothing either."""
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    found = []
    for _ in range(2):
        with LLM(str(checkpoint), **SETTINGS, **COMPILED) as llm:
            runner = runner_of(llm)
            with compiled_kernels() as while_serving:
                assert tokens(llm.generate(*workload(), use_tqdm=False)) == eager_answers
            assert while_serving == []
            assert runner.graphs.pieces is not None
            assert runner.graphs.decode is not None and runner.graphs.decode.counters.replays > 5
            found.append((runner.compiler.counters.compiled, runner.compiler.counters.cache_hits))
    (compiled, none), (again, hits) = found
    assert compiled == hits > 0 and none == again == 0


@pytest.mark.parametrize("source", ["eager", "inductor"])
def test_the_bundled_model_in_its_own_precision(source: str) -> None:
    """bfloat16 with every kernel: traced pieces solve as many problems as captured ones, give or take two."""
    from weft.bench.evaluation import ask, read_problems, score

    problems = read_problems(limit=40)
    right = []
    for name in ("capture", source):
        with LLM(device="cuda", cuda_graph_mode="FULL_AND_PIECEWISE", piecewise_cuda_graph_compiler=name) as llm:
            right.append(score(ask(llm, problems, use_tqdm=False))["accuracy"])
    assert abs(right[0] - right[1]) <= 0.05
