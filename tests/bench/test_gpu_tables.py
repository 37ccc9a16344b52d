"""The plan of the GPU run: its jobs can be started, and those that do not fit are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu_tables
from weft.config.fields import OPTIONS


@pytest.mark.parametrize("group", gpu_tables.GROUPS)
def test_jobs_name_scripts_and_settings_that_exist(group: str) -> None:
    jobs = gpu_tables.GROUPS[group]()
    assert len({job.name for job in jobs}) == len(jobs)
    for job in jobs:
        assert job.command[0] == "-m" or (gpu_tables.ROOT / job.command[0]).is_file()
        if "--settings" in job.command:
            assert json.loads(job.command[job.command.index("--settings") + 1]).keys() <= OPTIONS.keys()
    assert sum(job.seconds for job in jobs) <= 600


def test_no_two_jobs_write_the_same_file() -> None:
    names = [job.name for jobs in gpu_tables.GROUPS.values() for job in jobs()]
    assert len(set(names)) == len(names)


def test_jobs_run_until_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = "import sys; open(sys.argv[sys.argv.index('--json') + 1], 'w').write('{}')"
    jobs = [
        gpu_tables.Job("one", ("-c", write), 1),
        gpu_tables.Job("long", ("-c", write), 1000),
        gpu_tables.Job("bad", ("-c", "import sys; print('why'); sys.exit(3)"), 1),
    ]
    monkeypatch.setattr(gpu_tables, "GROUPS", {"tables": lambda: jobs, "choices": list})
    assert gpu_tables.main(["--output", str(tmp_path), "--seconds", "60"]) == 1
    said = capsys.readouterr().out
    assert "one: exit status 0" in said and "long: not begun" in said and "bad: exit status 3" in said
    assert "missing or failed: long, bad" in said
    assert (tmp_path / "one.json").read_text() == "{}" and "why" in (tmp_path / "bad.log").read_text()
    assert gpu_tables.main(["--output", str(tmp_path), "--only", "one"]) == 0


def test_a_job_that_cannot_be_run_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives its GPU back: the next job would wait for it."""
    jobs = [gpu_tables.Job(name, ("-c", ""), 1) for name in ("no-folder/one", "two")]
    monkeypatch.setattr(gpu_tables, "GROUPS", {"tables": lambda: jobs})
    with pytest.raises(FileNotFoundError):
        gpu_tables.main(["--output", str(tmp_path)])


def test_every_gpu_has_one_job_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = """
import os, pathlib, sys, time
gpu, name = os.environ["CUDA_VISIBLE_DEVICES"], pathlib.Path(sys.argv[-1])
busy = name.with_name("busy-" + gpu)
busy.touch(exist_ok=False)
time.sleep(0.05)
busy.unlink()
name.write_text(gpu)
"""
    jobs = [gpu_tables.Job(f"job-{n}", ("-c", script), 1) for n in range(6)]
    monkeypatch.setattr(gpu_tables, "GROUPS", {"tables": lambda: jobs})
    for visible, used in (("", {"0", "1"}), ("5,2,7", {"5", "2"})):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gpu_tables.main(["--output", str(tmp_path), "--gpus", "2"]) == 0
        assert {path.read_text() for path in tmp_path.glob("*.json")} == used
    with pytest.raises(SystemExit):
        gpu_tables.main(["--output", str(tmp_path), "--gpus", "4"])
