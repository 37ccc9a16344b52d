"""``weft tune`` on the emulator, and a start that uses what it found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cli.conftest import RunWeft
from tests.whole import takes_long
from weft import LLM, SamplingParams
from weft.bench.step_timing import Effort, fastest_split
from weft.cli import main
from weft.config import resolve
from weft.config.graph_modes import GraphMode
from weft.config.graph_profile import GraphProfile, Timing, read_profile, write_profile

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "max_num_seqs": 3,
    "max_num_batched_tokens": 40,
    "piecewise_cuda_graph_tokens": [16, 40],
    "cpu_cache_gib": 0.1,
    "max_model_len": 200,
}
FLAGS = [
    part
    for name, value in SETTINGS.items()
    for part in ("--" + name.replace("_", "-"), *(map(str, value) if isinstance(value, list) else [str(value)]))
]
EFFORT = ["--repeats", "1", "--context", "5"]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache folder after ``weft tune``."""
    folder = tmp_path_factory.mktemp("tuned")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_CACHE_DIR", str(folder))
        assert main(["tune", *FLAGS, *EFFORT]) == 0
    return folder


@pytest.fixture
def cache(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tuned))
    return tuned


def profile_in(folder: Path) -> tuple[Path, GraphProfile]:
    (path,) = (folder / "graph-profiles").iterdir()
    return path, read_profile(path)


def test_flags_of_the_measurement_reach_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Effort] = []

    def measured(runner: object, profile: GraphProfile, effort: Effort) -> GraphProfile:
        seen.append(effort)
        return profile

    monkeypatch.setattr("weft.bench.step_timing.measure_modes", measured)
    flags = ["--splitting-ops", "attention", "--output", str(tmp_path / "profile.json")]
    assert main(["tune", *FLAGS, *flags, "--repeats", "3", "--seconds", "0.25", "--context", "9"]) == 0
    assert seen == [Effort(3, 0.25, 9)]


@takes_long
def test_every_mode_is_measured_at_the_ends_of_every_size(tuned: Path) -> None:
    _, profile = profile_in(tuned)
    assert [t.num_tokens for t in profile.prefill] == [1, 16, 17, 34, 40]
    assert [t.num_tokens for t in profile.mixed] == [2, 16, 17, 34, 40]
    assert [t.num_tokens for t in profile.decode] == [1, 2, 3]
    for timing in profile.prefill + profile.mixed + profile.decode:
        assert set(timing.ms) == {"NONE", "PIECEWISE", "FULL"} and min(timing.ms.values()) > 0
    assert profile.date and profile.settings["max_num_seqs"] == 3


@takes_long
def test_split_points_are_measured_too(tuned: Path) -> None:
    """The bundled model has two kinds of layers, so there are two lists; the faster one is taken, by a start too."""
    path, profile = profile_in(tuned)
    assert list(profile.splits) == ["attention", "attention gated_delta_net"]
    for timings in profile.splits.values():
        assert [t.num_tokens for t in timings] == [1, 16, 17, 34, 40]
        assert all(set(t.ms) == {"PIECEWISE"} and t.ms["PIECEWISE"] > 0 for t in timings)
    assert " ".join(profile.splitting_ops) == fastest_split(profile.splits)
    for names in (["attention"], ["attention", "gated_delta_net"]):
        write_profile(msgspec.structs.replace(profile, splitting_ops=names), other := path.with_name("other.json"))
        config = resolve(**SETTINGS, graph_profile=str(other))
        assert config.splitting_ops == tuple(names) and "measured" in config.reasons["splitting_ops"]
        other.unlink()


def test_the_first_list_is_left_for_a_gain_alone() -> None:
    def of(*ms: float) -> list[Timing]:
        return [Timing(n, {"PIECEWISE": value}) for n, value in enumerate(ms)]

    assert fastest_split({"a": of(1.0, 10.0), "b": of(0.9, 9.9)}) == "b"
    assert fastest_split({"a": of(1.0, 10.0), "b": of(0.5, 16.0)}) == "a"
    assert fastest_split({"a": of(1.0, 10.0), "b": of(0.995, 9.99)}) == "a", "a tie"
    assert fastest_split({"a": of(1.0)}) == "a"


@takes_long
def test_config_says_that_it_is_used(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", *FLAGS, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["settings"]["cuda_graph_mode"] == "TUNED"
    assert shown["settings"]["graph_profile"] == str(profile_in(cache)[0])
    assert "weft tune" in shown["reasons"]["graph_profile"]


@takes_long
def test_a_start_runs_every_batch_as_measured(cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each kind of batch runs in the mode that the figures favour, and only graphs in use are captured."""
    _, profile = profile_in(cache)

    def fastest(mode: GraphMode, *sizes: int) -> list[Timing]:
        return [Timing(n, {str(m): 1.0 if m is mode else 2.0 for m in GraphMode}) for n in sizes]

    figures = {
        "prefill": fastest(GraphMode.PIECEWISE, 1, 16) + fastest(GraphMode.NONE, 17, 40),
        "mixed": fastest(GraphMode.FULL, 2, 16, 17, 40),
        "decode": fastest(GraphMode.NONE, 1) + fastest(GraphMode.FULL, 2, 3),
    }
    path = tmp_path / "profile.json"
    write_profile(GraphProfile(**{name: getattr(profile, name) for name in _KEY}, **figures), path)  # type: ignore[arg-type]
    caplog.set_level("INFO")
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    prompts = [list(range(5, 12)), list(range(40, 65)), list(range(9, 30))]
    with LLM(**SETTINGS, enable_prefix_caching=False) as llm:
        expected = [llm.generate([p], greedy, use_tqdm=False)[0].outputs[0].token_ids for p in prompts]
    with LLM(**SETTINGS, enable_prefix_caching=False, graph_profile=str(path)) as llm:
        assert f"profile {path}" in caplog.text and llm.config.graph_profile == str(path)
        runner = llm._core._executor._runner
        assert runner.graphs.decode is not None and runner.graphs.decode.sizes == [2, 3]
        assert runner.graphs.pieces is not None and runner.graphs.pieces.sizes == [16]
        assert runner.graphs.forward is not None and runner.graphs.forward.sizes == [16, 40]
        alone = [llm.generate([p], greedy, use_tqdm=False)[0].outputs[0].token_ids for p in prompts]
        together = [o.outputs[0].token_ids for o in llm.generate(prompts, greedy, use_tqdm=False)]
        steps = llm._core.snapshot().steps
    assert alone == expected == together
    kinds = {
        "prefill": [s for s in steps if not s.num_decodes],
        "mixed": [s for s in steps if s.num_decodes and s.num_prefill_tokens],
        "decode": [s for s in steps if not s.num_prefill_tokens],
    }
    for kind, found in kinds.items():
        assert found, f"the case has no {kind} batch"
        for step in found:
            assert step.mode == wanted_mode(kind, step.num_prefill_tokens + step.num_decodes)


def wanted_mode(kind: str, num_tokens: int) -> str:
    if kind == "prefill":
        return "PIECEWISE" if num_tokens <= 16 else "NONE"
    return "NONE" if kind == "decode" and num_tokens == 1 else "FULL"


_KEY = ("device", "model", "settings", "versions")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cuda-graph-mode", "FULL"], "--cuda-graph-mode FULL says how batches run"),
        (["--enforce-eager"], "leave it out"),
        (["--repeats", "0"], "give 1 or more"),
        (["--context", "0"], "give 1 or more"),
        (["--seconds", "0"], "above 0"),
    ],
)
def test_bad_flags(run_weft: RunWeft, flags: list[str], message: str) -> None:
    result = run_weft("tune", *flags)
    assert result.status == 2 and message in result.err


def test_an_output_that_cannot_be_written_is_refused_before_measuring(run_weft: RunWeft, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for target in (tmp_path, tmp_path / "file" / "p.json"):
        result = run_weft("tune", *FLAGS, "--output", target)
        assert result.status == 2 and "cannot be written" in result.err
