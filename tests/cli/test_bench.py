"""``weft bench``: tiny workloads end to end, the JSON they write, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cli.conftest import RunWeft
from weft.assets import MODEL_DIR
from weft.bench import latency, prefill, prefix, scaling, startup, throughput
from weft.bench.roofline import Ceilings
from weft.engine.llm import LLM
from weft.sampling_params import SamplingParams
from weft.stats import EngineStats


def test_latency(run_weft: RunWeft, tmp_path: Path) -> None:
    target = tmp_path / "figures" / "latency.json"
    flags = ["--batch-sizes", 1, 3, "--prompt-len", 9, "--output-len", 5, "--repeats", 2, "--json", target]
    result = run_weft("bench", "latency", *flags, "--page-size", 8)
    assert result.status == 0
    assert result.settings == {
        "skip_tokenizer_init": True, "enable_prefix_caching": False, "max_num_seqs": 3, "page_size": 8
    }  # fmt: skip
    figures = json.loads(target.read_text())
    assert [row["batch_size"] for row in figures["results"]] == [1, 3]
    for row in figures["results"]:
        assert row["step_ms"] is not None and row["interval_ms"] > 0
        assert len(row["repeats"]["all_tokens_ms"]) == len(row["repeats"]["one_token_ms"]) == 2
    assert {"benchmark", "device", "versions", "config", "workload", "command", "date"} <= set(figures)
    assert figures["config"]["dtype"] == "float32" and "torch" in figures["versions"]


class Measured(Exception):
    """An exception that replaces a measurement and holds the workload and the engine."""


@pytest.mark.parametrize(
    ("words", "workload"),
    [
        (
            "latency --batch-sizes 2 5 --prompt-len 7 --output-len 6 --temperature 0.25 --repeats 4",
            latency.LatencyWorkload((2, 5), 7, 6, 0.25, 4),
        ),
        (
            "throughput --num-prompts 3 --prompt-len 2 9 --output-len 4 8 --temperature 0.25 --warmups 5 --repeats 6",
            throughput.ThroughputWorkload(3, (2, 9), (4, 8), 0.25, 5, 6),
        ),
        ("prefill --prompt-lens 3 9 --repeats 2", prefill.PrefillWorkload((3, 9), 2)),
        ("startup --cold-repeats 4 --warm-repeats 5", startup.StartupWorkload(4, 5)),
        ("prefix --workload fan-out --workload-seed 5", prefix.PrefixWorkload("fan-out", 5)),
        (
            "scaling --sizes 2x3 1x1 --batch-sizes 2 5 --prompt-len 7 --output-len 6 --num-prompts 3 --queue-len 4 8 "
            "--warmups 9 --repeats 10",
            scaling.ScalingWorkload(
                ((2, 3), (1, 1)), throughput.ThroughputWorkload(3, (4, 8), (4, 8), warmups=9), (2, 5), 7, 6, 10
            ),
        ),
    ],
)
def test_flags_of_a_workload_reach_the_measurement(
    words: str, workload: Any, run_weft: RunWeft, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *flags = words.split()
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "enable_prefix_caching": name == "prefix"}
    if name == "startup":  # its processes are as a user's, one request each
        del settings["enable_prefix_caching"]

    def measure(engine: Any, given: Any) -> None:
        raise Measured(given, engine)

    monkeypatch.setattr(f"weft.bench.{name}.measure", measure)
    with pytest.raises(Measured) as got:
        run_weft("bench", name, *flags, "--page-size", 8)
    measured, engine = got.value.args
    assert measured == workload
    if name in ("startup", "scaling"):
        assert engine == settings | {"page_size": 8}


class StubLLM:
    """Takes batches and generates nothing but as many tokens as asked for. ``batches``: prompts and parameters."""

    config = SimpleNamespace(device="cpu", model_config=SimpleNamespace(vocab_size=50))

    def __init__(self) -> None:
        self.batches: list[tuple[list[list[int]], list[SamplingParams]]] = []

    def generate(self, prompts: list[list[int]], params: list[SamplingParams], use_tqdm: bool) -> list[Any]:
        self.batches.append((prompts, params))
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * (p.max_tokens or 0))]) for p in params]

    def stats(self) -> EngineStats:
        return EngineStats(num_preemptions=len(self.batches))


def test_a_queue_is_run_as_often_as_asked_and_counts_what_it_ran() -> None:
    workload = throughput.ThroughputWorkload(3, (2, 4), (5, 9), 0.25, warmups=2, repeats=4)
    llm: Any = StubLLM()
    results = throughput.measure(llm, workload)
    prompts, lengths = workload.requests(50)
    assert len(llm.batches) == 6 and all(batch == llm.batches[0] for batch in llm.batches)
    assert llm.batches[0][0] == prompts and {token < 50 for prompt in prompts for token in prompt} == {True}
    assert [(p.temperature, p.max_tokens, p.ignore_eos) for p in llm.batches[0][1]] == [
        (0.25, n, True) for n in lengths
    ]
    assert {2 <= len(prompt) <= 4 for prompt in prompts} == {5 <= n <= 9 for n in lengths} == {True}
    assert (results["num_prompt_tokens"], results["num_output_tokens"]) == (sum(map(len, prompts)), sum(lengths))
    assert results["num_preemptions"] == 4, "those of the warm-ups do not count"
    ratio = results["total_tokens_per_s"] / results["output_tokens_per_s"]
    assert ratio == pytest.approx(1 + sum(map(len, prompts)) / sum(lengths), rel=1e-3)


def test_every_batch_of_a_latency_has_new_seeds() -> None:
    params = [latency._params(latency.LatencyWorkload(temperature=0.25, seed=7), 6, repeat, 2) for repeat in (0, 1)]
    assert [p.seed for batch in params for p in batch] == [7, 8, 9, 10]
    assert {(p.temperature, p.max_tokens, p.ignore_eos) for batch in params for p in batch} == {(0.25, 6, True)}


def test_throughput(run_weft: RunWeft, tmp_path: Path) -> None:
    target = tmp_path / "throughput.json"
    flags = ["--num-prompts", 5, "--prompt-len", 3, 9, "--output-len", 2, 6, "--repeats", 2, "--json", target]
    result = run_weft("bench", "throughput", *flags)
    assert result.status == 0 and "output_tokens_per_s" in result.out
    results = json.loads(target.read_text())["results"]
    assert results["output_tokens_per_s"] > 0 and len(results["repeats"]["seconds"]) == 2
    assert 10 <= results["num_output_tokens"] <= 30


def test_prefill(run_weft: RunWeft, tmp_path: Path) -> None:
    target = tmp_path / "prefill.json"
    result = run_weft("bench", "prefill", "--prompt-lens", 1, 65, "--repeats", 2, "--json", target)
    assert result.status == 0 and "No roofline" in result.out and "ms to first token" in result.out
    rows = json.loads(target.read_text())["results"]
    assert [row["prompt_len"] for row in rows] == [1, 65]
    assert all(len(row["repeats"]["first_token_ms"]) == 2 and row["floor_ms"] is None for row in rows)


def test_prefill_measures_what_the_context_has_room_for(run_weft: RunWeft, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = run_weft("bench", "prefill", "--prompt-lens", 16, 4096)
    assert refused.status == 2 and "--prompt-lens 4096: the context has room for at most" in refused.err
    measured: list[tuple[int, ...]] = []
    monkeypatch.setattr("weft.bench.prefill.measure", lambda llm, workload: measured.append(workload.prompt_lens))
    with pytest.raises(TypeError):  # there are no rows to show
        run_weft("bench", "prefill")
    assert max(measured[0]) < 4096 and len(measured[0]) > 3
    monkeypatch.setattr(LLM, "max_model_len", 16)  # every default is longer
    refused = run_weft("bench", "prefill")
    assert refused.status == 2 and "the context has room for at most 15" in refused.err


def test_distance_from_the_roofline(run_weft: RunWeft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ceilings of a device that moves a megabyte per second, every benchmark of speed tells its share of them."""
    slow = Ceilings(1e6, 1e18, 1e18, "made up")
    for module in ("latency", "prefill", "throughput"):
        monkeypatch.setattr(f"weft.bench.{module}.ceilings_of", lambda device: slow)
    weights = MODEL_DIR.joinpath("model.safetensors").stat().st_size * 2  # bfloat16 on disk, float32 here
    target = tmp_path / "figures.json"
    small = ["--repeats", 1, "--json", target]
    for argv in (
        ("latency", "--batch-sizes", 1, "--prompt-len", 9, "--output-len", 5),
        ("prefill", "--prompt-lens", 9),
    ):
        result = run_weft("bench", *argv, *small)
        assert result.status == 0 and "roofline" in result.out
        (row,) = json.loads(target.read_text())["results"]
        assert weights * 0.2 < row["floor_ms"] * 1e3 < weights * 1.5 and row["floor_share"] > 1
    result = run_weft(
        "bench", "throughput", "--num-prompts", 2, "--prompt-len", 3, 9, "--output-len", 2, 6, *small, "--warmups", 0
    )
    row = json.loads(target.read_text())["results"]
    assert row["roofline_share"] > 1 and row["roofline_tokens_per_s"] < row["output_tokens_per_s"]


def test_a_batch_that_does_not_run_together_is_refused(run_weft: RunWeft) -> None:
    """The reported time would be the time of two batches, one after another."""
    result = run_weft("bench", "latency", "--batch-sizes", 1, 17, "--prompt-len", 8, "--output-len", 4)
    assert result.status == 2
    assert "--batch-sizes 17: this engine runs at most 16 sequences of 12 tokens at a time; give less" in result.err


def test_bad_workloads(run_weft: RunWeft) -> None:
    for argv, message in {
        ("latency", "--output-len", 1): "--output-len 1: give 2 or more",
        ("latency", "--batch-sizes", 0): "--batch-sizes 0",
        ("latency", "--repeats", 0): "--repeats 0",
        ("latency", "--prompt-len", 0): "--prompt-len 0: give 1 or more",
        ("throughput", "--output-len", 9, 3): "--output-len 9 3",
        ("throughput", "--num-prompts", 0): "--num-prompts 0",
        ("throughput", "--warmups", -1): "--warmups -1",
        ("throughput", "--repeats", 0): "--repeats 0",
        ("prefill", "--repeats", 0): "--repeats 0",
        ("startup", "--warm-repeats", -1): "--warm-repeats -1: give 0 or more",
        ("scaling", "--prompt-len", 0): "--prompt-len 0",
        ("scaling", "--output-len", 1): "--output-len 1: give 2 or more",
        ("scaling", "--num-prompts", 0): "--num-prompts 0",
        ("scaling", "--warmups", -1): "--warmups -1",
        ("scaling", "--repeats", 0): "--repeats 0",
        ("scaling", "--sizes", "0x1"): "--sizes 0x1",
        ("scaling", "--sizes", "1xa"): "--sizes 1xa",
        ("throughput", "--prompt-len", 9, 3): "--prompt-len 9 3",
        ("prefill", "--prompt-lens", 16, 0): "--prompt-lens 0",
        ("startup", "--cold-repeats", 0): "--cold-repeats 0",
        ("prefix", "--cache-shares", 0.5): "--cache-shares has no effect without --replay",
        ("prefix", "--replay", "--eviction-policy", "lru"): "--eviction-policy is what --replay varies; leave it out",
        ("latency", "--json", "/proc/nowhere/x.json"): "cannot be written",
    }.items():
        result = run_weft("bench", *argv)
        assert result.status == 2 and message in result.err
        assert result.settings == {}
