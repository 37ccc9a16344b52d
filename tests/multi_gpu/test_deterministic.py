"""``deterministic`` with two ranks, and on two GPUs: a request's bits alone and in any company."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.deterministic_cuts import cut

pytestmark = [
    pytest.mark.multi_gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]  # fmt: skip


def run(folder: Path, how: str, gpus: Sequence[int], **settings: Any) -> Any:
    given = json.dumps({"load_format": "dummy"} | settings)
    command = [sys.executable, "-m", "tests.multi_gpu.deterministic", str(folder), how, given]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(visible[gpu] for gpu in gpus)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-next-12l", "kimi-linear-12l"])
def test_two_ranks(name: str, tmp_path: Path) -> None:
    folder = cut(name, tmp_path)
    (alone,) = run(folder, "alone", (0, 1), tensor_parallel_size=2)
    for mode in ("FULL", "FULL_AND_PIECEWISE"):
        for together in run(folder, "company", (0, 1), tensor_parallel_size=2, cuda_graph_mode=mode):
            assert together == alone, mode


def test_two_replicas(tmp_path: Path) -> None:
    """Replicas are engines in processes of their own. Here they are two, each on its GPU."""
    folder = cut("qwen3-next-12l", tmp_path)
    with ThreadPoolExecutor(2) as pool:
        alone, company = pool.map(lambda how, gpu: run(folder, how, gpu), ("alone", "company"), ((0,), (1,)))
    assert all(together == alone[0] for together in company)
