"""No kernel leaves its tensors: random small engines under compute-sanitizer, and with poisoned memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
CHECK = [sys.executable, "-m", "tests.gpu.memory_check"]


def run(command: list[str], **variables: str) -> str:
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=450)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("mode", "first"), [(["--mode", "NONE"], "100"), (["--rerun"], "200")], ids=["eager", "graph functions"]
)
def test_every_access_is_inside_a_tensor(mode: list[str], first: str) -> None:
    """Each tensor has an allocation of its own. The gpt-oss family has sliding windows beside full layers."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    guarded = [sanitizer, "--tool", "memcheck", "--target-processes", "application-only", "--error-exitcode", "9"]
    said = run([*guarded, *CHECK, *mode, "--first", first, "--seconds", "45"], PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    assert "ERROR SUMMARY: 0 errors" in said


def test_nothing_depends_on_memory_that_was_never_written() -> None:
    said = run([*CHECK, "--poison", "--seconds", "30", "--first", "300"])
    assert " engines, " in said
