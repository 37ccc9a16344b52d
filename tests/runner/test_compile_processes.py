"""Kernels that are not in Triton's cache are compiled in other processes; the others are read from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def test_a_second_start_compiles_nothing_and_the_first_nothing_in_its_own_process(tmp_path: Path) -> None:
    """The listener is told in the process that compiles; the parent only finds results."""
    runs = [_run(tmp_path, "") for _ in range(2)]
    assert [run["given_away"] for run in runs] == [2, 0]
    assert all(run["compiled_here"] == 0 and run["kernels"] == 2 and run["left"] == 0 for run in runs)


def test_an_error_of_the_compiler_is_passed_on(tmp_path: Path) -> None:
    assert "CompilationError" in _run(tmp_path, "broken")["error"]


def test_processes_that_do_not_answer_are_given_up(tmp_path: Path) -> None:
    run = _run(tmp_path, "asleep")
    assert (run["given_away"], run["compiled_here"], run["left"]) == (2, 2, 0)
    assert "given up" in run["said"]


def _run(folder: Path, what: str) -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.runner.compile_twice", what]
    done = subprocess.run(
        command, env=environment | {"TRITON_CACHE_DIR": str(folder)}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"said": done.stderr}
