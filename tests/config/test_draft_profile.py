"""How many drafts a batch gets: from measured figures, through ``weft tune`` and its file, to a start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import make_checkpoint
from weft.bench.draft_depth import Effort
from weft.cli import main
from weft.config import resolve
from weft.config.draft_profile import DraftProfile, DraftTiming, draft_profile_path
from weft.config.graph_profile import write_profile
from weft.config.speculation import SpeculativeConfig

AUTO = '{"method": "ngram", "num_speculative_tokens": "auto"}'
FLAGS = ["--device", "cpu", "--speculative-config", AUTO]
DEEP = [DraftTiming(1, [9.0, 6.0, 5.0]), DraftTiming(2, [9.0, 6.0, 5.95]), DraftTiming(4, [9.0, 8.0, 8.1]),
        DraftTiming(8, [9.0, 9.5, 12.0])]  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))


def tune(monkeypatch: pytest.MonkeyPatch, timings: list[DraftTiming]) -> None:
    monkeypatch.setattr("weft.bench.draft_depth.measure_depths", lambda *args: timings)
    assert main(["tune", *FLAGS]) == 0


def test_the_fewest_of_the_fastest_are_taken() -> None:
    """Near ties go to fewer drafts; beyond the last batch size that gains there are none."""
    profile = DraftProfile(fits={}, timings=DEEP)
    assert [timing.best for timing in DEEP] == [2, 1, 1, 0] and profile.drafts_by_batch == ((1, 2), (4, 1))
    config = SpeculativeConfig("ngram", 2, 2, 4, drafts_by_batch=profile.drafts_by_batch)
    assert [config.drafts_at(n) for n in (1, 2, 3, 4, 5, 8, 99)] == [2, 1, 1, 1, 0, 0, 0]
    assert [SpeculativeConfig("ngram", 3, 2, 4).drafts_at(n) for n in (1, 99)] == [3, 3]


def test_a_start_uses_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    before = resolve(speculative_config=AUTO)
    assert before.num_drafts == 4 and "has measured no drafts" in before.reasons["speculative_config"]
    tune(monkeypatch, DEEP)
    config = resolve(speculative_config=AUTO)
    assert config.num_drafts == 2 and [config.num_drafts_at(n) for n in (1, 4, 5)] == [2, 1, 0]
    assert "2 up to 1 sequences, 1 up to 4 sequences" in config.reasons["speculative_config"]
    fixed = resolve(speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    assert fixed.num_drafts == fixed.num_drafts_at(64) == 3
    other = resolve(speculative_config=AUTO, dtype="bfloat16")
    assert other.num_drafts == 4 and "dtype was 'float32'" in other.reasons["speculative_config"]
    others = {"disable_custom_all_reduce": True, "kv_cache_dtype": "fp8", "mamba_ssm_dtype": "bfloat16"}
    for name, value in others.items():
        otherwise = resolve(speculative_config=AUTO, **{name: value})
        assert otherwise.num_drafts == 4 and f"{name} was " in otherwise.reasons["speculative_config"]


def test_drafts_that_lose_everywhere_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, DEEP[-1:])
    config = resolve(speculative_config=AUTO)
    assert config.speculative_config is None and "lose at every batch size" in config.reasons["speculative_config"]
    assert "drafts" not in config.reasons["enable_overlap"]
    tune(monkeypatch, DEEP)
    assert resolve(speculative_config=AUTO).num_drafts == 2


def test_flags_of_the_measurement_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Effort] = []
    monkeypatch.setattr("weft.bench.draft_depth.measure_depths", lambda *args: [seen.append(args[3]), *DEEP][1:])
    assert main(["tune", *FLAGS, "--repeats", "3", "--seconds", "0.25"]) == 0 and seen == [Effort(3, 0.25)]


def test_a_model_without_its_drafts_still_reads_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(make_checkpoint("Qwen3VLForConditionalGeneration", tmp_path / "model"))
    monkeypatch.setattr("weft.bench.draft_depth.measure_depths", lambda *args: DEEP[-1:])
    assert main(["tune", "--model", folder, *FLAGS]) == 0
    config = resolve(model=folder, speculative_config=AUTO)
    assert config.speculative_config is None and config.model_config.runs_vision


def test_a_broken_profile_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, DEEP)
    (path,) = Path(draft_profile_path({"model": "x", "method": "y"})).parent.iterdir()
    path.write_text("{")
    assert "is not a profile" in resolve(speculative_config=AUTO).reasons["speculative_config"]
    write_profile(DraftProfile(format=0, fits={}), path)
    assert "does not fit" in resolve(speculative_config=AUTO).reasons["speculative_config"]


def test_flags_without_effect_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *FLAGS, "--context", "9"]) == 2
    assert "--context 9 has no effect" in capsys.readouterr().err
