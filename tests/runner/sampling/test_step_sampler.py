"""A row that wants more than a graph's sampling offers costs its own row, not the batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import make_checkpoint
from tests.whole import covering
from weft import LLM, SamplingParams
from weft.layers.sampler import Sampler, SamplerOutput, SamplingMetadata

SETTINGS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 8, "max_model_len": 64, "skip_tokenizer_init": True}
PROMPTS = [[7 * i + j for j in range(5)] for i in range(6)]
PLAIN = {"max_tokens": 6, "ignore_eos": True}
EDITS: list[dict[str, Any]] = [
    {"presence_penalty": 1.5, "repetition_penalty": 1.3},
    {"logit_bias": {3: 30.0}},
    {"allowed_token_ids": [5, 6, 7]},
    {"min_tokens": 3, "stop_token_ids": [8]},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("Qwen3ForCausalLM", tmp_path_factory.mktemp("model"))


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many rows each call of the sampler sampled."""
    sample, counts = Sampler.__call__, []

    def noted(self: Sampler, logits: Tensor, batch: SamplingMetadata) -> SamplerOutput:
        counts.append(logits.shape[0])
        return sample(self, logits, batch)

    monkeypatch.setattr(Sampler, "__call__", noted)
    yield counts


def generate(checkpoint: Path, params: list[dict[str, Any]], rows: list[int], **settings: Any) -> list[Any]:
    """Token ids and log probabilities of each prompt; ``rows`` keeps what was sampled beside the graphs."""
    with LLM(str(checkpoint), **SETTINGS, **settings) as llm:
        rows.clear()
        given = [SamplingParams(**PLAIN, seed=i, temperature=float(i % 2), **p) for i, p in enumerate(params)]
        outputs = [o.outputs[0] for o in llm.generate(PROMPTS, given, use_tqdm=False)]
        return [(o.token_ids, o.logprobs) for o in outputs]


@pytest.mark.parametrize(
    ("place", "edit"), covering([0, 3, 5], EDITS, of=1), ids=lambda value: next(iter(value)) if value in EDITS else None
)
def test_an_edited_row_is_sampled_again_alone(
    checkpoint: Path, rows: list[int], edit: dict[str, Any], place: int
) -> None:
    params: list[dict[str, Any]] = [{} for _ in PROMPTS]
    params[place] = edit
    graphs = {"cuda_graph_mode": "FULL", "cuda_graph_bs": [6], "piecewise_cuda_graph_tokens": [32]}
    given = generate(checkpoint, params, rows, **graphs)
    assert set(rows) == {1} and len(rows) == PLAIN["max_tokens"]
    assert given == generate(checkpoint, params, rows, cuda_graph_mode="NONE")
    assert set(rows) == {1, 6}


def test_log_probabilities_sample_nothing_again(checkpoint: Path, rows: list[int]) -> None:
    params: list[dict[str, Any]] = [{}, {"logprobs": 2}, {}, {}, {"logprobs": 0}, {}]
    graphs = {"cuda_graph_mode": "FULL", "cuda_graph_bs": [6], "piecewise_cuda_graph_tokens": [32]}
    given = generate(checkpoint, params, rows, **graphs)
    assert rows == []
    assert [bool(logprobs) for _, logprobs in given] == ["logprobs" in p for p in params]
    plain = generate(checkpoint, params, rows, cuda_graph_mode="NONE")
    for (ids, logprobs), (other_ids, others) in zip(given, plain, strict=True):
        assert ids == other_ids and bool(logprobs) == bool(others)
        for ours, theirs in zip(logprobs or (), others or (), strict=True):
            assert ours.keys() == theirs.keys()
            values = [torch.tensor([entry.logprob for entry in found.values()]) for found in (ours, theirs)]
            torch.testing.assert_close(*values, atol=1e-5, rtol=1e-5)


def test_where_every_row_is_edited_nothing_is_sampled_twice(checkpoint: Path, rows: list[int]) -> None:
    params = [EDITS[i % len(EDITS)] for i in range(len(PROMPTS))]
    given = generate(checkpoint, params, rows, cuda_graph_mode="NONE")
    assert rows == [len(PROMPTS)] * PLAIN["max_tokens"]
    assert given == generate(
        checkpoint, params, rows, cuda_graph_mode="FULL", cuda_graph_bs=[6], piecewise_cuda_graph_tokens=[32]
    )
