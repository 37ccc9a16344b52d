"""Processes that share a GPU: Hopper's prefill attention beside itself neither fails nor changes its results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]


def three_processes(kind: str, folder: Path) -> list[dict[str, Any]]:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel is for Hopper")
    file = folder / "found.json"
    command = [sys.executable, "-m", "tests.gpu.shared_device", "--kinds", kind, "--seconds", "3", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert file.exists() and file.stat().st_size, done.stdout[-2000:] + done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(file.read_text())["processes"][kind]
    assert len(found) == 3
    return found


def test_prefill_attention_in_three_processes(tmp_path: Path) -> None:
    found = three_processes("attention", tmp_path)
    assert all(process["failure"] is None and process["different"] == 0 for process in found), found
    assert all(process["launches"] for process in found), found


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="seen with Triton 3.6 only")
def test_an_unused_barrier_is_noticed(tmp_path: Path) -> None:
    """All three processes failed within 48 launches when this was tried; one is enough."""
    found = three_processes("before", tmp_path)
    assert any("illegal memory access" in (process["failure"] or "") for process in found), found
