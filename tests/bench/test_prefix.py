"""The prefix benchmark: the workloads are as described, and the figures add up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.tiny import make_checkpoint
from tests.whole import takes_long, unless_long
from weft.bench import prefix
from weft.bench.prefix_workloads import WORKLOADS, make_workload
from weft.cache.spec import CacheSpec
from weft.cache.state_plan import CheckpointPolicy
from weft.cli import main
from weft.config.checkpoint import read_checkpoint_config
from weft.config.layer_spec import CacheDtypes

GEOMETRY = Path(__file__).parents[2] / "benchmarks/configs/qwen3-next-12l"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("Qwen3NextForCausalLM", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def spec() -> CacheSpec:
    model = read_checkpoint_config(GEOMETRY)
    return CacheSpec.from_model(model, page_size=16, dtypes=CacheDtypes("bfloat16", "bfloat16", "bfloat16"))


def rows_of(
    spec: CacheSpec, name: str, policies: Sequence[CheckpointPolicy], *shares: float
) -> dict[tuple[str, str, float], dict[str, float]]:
    rows = prefix.replay(spec, prefix.PrefixWorkload(name), 10_000, shares, policies)
    return {(row["policy"], row["eviction"], row["cache"]): row for row in rows}


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_the_same_every_time_and_refer_backwards(name: str) -> None:
    turns = make_workload(name, 500)
    assert turns == make_workload(name, 500) != make_workload(name, 500, seed=1)
    for index, turn in enumerate(turns):
        assert turn.parent is None or turn.parent < index
        assert turn.output_len >= 1 and all(0 <= token < 500 for token in turn.new)


def test_chat_grows_by_user_and_output_tokens() -> None:
    turns = make_workload("chat", 500)
    assert len(turns) == 16 * 8
    prompts: list[list[int]] = []
    for turn in turns:
        prompts.append(turn.prompt(prompts, [[7] * 64] * len(prompts)))
    assert sorted({len(p) for p in prompts}) == [210 + 274 * i for i in range(8)]


@pytest.mark.parametrize("name", ["chat", "chat-stripped"])
def test_exact_checkpoints_reuse_at_least_99_percent_of_a_conversation(spec: CacheSpec, name: str) -> None:
    rows = rows_of(spec, name, ["exact", "aligned"])
    assert rows["exact", "-", 1.0]["reused_of_reusable"] >= 0.99
    assert rows["aligned", "-", 1.0]["reused_of_reusable"] < rows["exact", "-", 1.0]["reused_of_reusable"]


@pytest.mark.parametrize("name", unless_long([name for name in WORKLOADS if name != "mixed"], WORKLOADS))
def test_flop_aware_eviction_is_never_behind_lru(spec: CacheSpec, name: str) -> None:
    shares = unless_long([1 / 6], [1 / 3, 1 / 6])
    rows = rows_of(spec, name, ["exact"], *shares)
    for share in shares:
        lru, flops = (rows["exact", e, round(share, 3)]["flops_saved_of_unbounded"] for e in ("lru", "flops"))
        assert flops >= 0.99 * lru
    if name == "mixed":
        assert flops >= 1.15 * lru


@takes_long
def test_figures_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    small = [turn for turn in make_workload("chat", 200) if turn.parent is None][:3]
    monkeypatch.setattr(prefix, "make_workload", lambda *_: small * 2)
    target = tmp_path / "figures.json"
    assert main(["bench", "prefix", "--model", str(folder), "--max-num-seqs", "2", "--json", str(target)]) == 0
    results = json.loads(target.read_text())["results"]
    assert results["requests"] == 6 and results["prompt_tokens"] == 6 * 210
    assert results["cached_tokens"] == results["reusable_tokens"] == 3 * 209
    assert results["computed_tokens"] == results["prompt_tokens"] - results["cached_tokens"]


def test_replay_needs_no_weights(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    arguments = ["bench", "prefix", "--replay", "--workload", "fan-out", "--cache-shares", "0.5", "--json", str(target)]
    assert main([*arguments, "--model", str(GEOMETRY)]) == 0
    assert len(json.loads(target.read_text())["results"]) == 3 * (1 + 2)
    assert main([*arguments[:-1], str(target), "--model", str(GEOMETRY), "--cache-shares", "0"]) != 0
