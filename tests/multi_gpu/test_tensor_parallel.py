"""Tests that need several GPUs: sums over peer memory, and several ranks that generate the same as one rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.test_tensor_parallel import CRAMPED, HYBRID, ODD
from tests.tiny import make_checkpoint

pytestmark = pytest.mark.multi_gpu
NCCL: dict[str, Any] = {"disable_custom_all_reduce": True}


def _on(ranks: int) -> Any:
    """A case of as many ranks, skipped where there are fewer GPUs."""
    found = torch.cuda.device_count()
    few = pytest.mark.skipif(found < ranks, reason=f"{ranks} ranks need {ranks} GPUs, there are {found}")
    return pytest.param(ranks, id=f"{ranks}-ranks", marks=few)


on_ranks = pytest.mark.parametrize("ranks", [_on(2), _on(4)])


@on_ranks
def test_all_reduce_is_exact_and_every_rank_has_the_same_bits(ranks: int) -> None:
    """Against float64, on every number of rows; 10,000 replays with poisoned outputs."""
    from benchmarks.kernels.all_reduce import launch

    found = launch(ranks, replays=10_000, time_it=False)
    assert all(count == 10_000 for count in found["replays"].values()) and len(found["replays"]) == 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with twelve heads (six or three on a rank), two KV heads (replicated by four ranks), and a padded
    vocabulary."""
    return make_checkpoint(HYBRID, tmp_path_factory.mktemp("tiny"), **ODD)


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[int]]:
    return run(folder, 1, enforce_eager=True)


def run(folder: Path, size: int, **settings: Any) -> list[list[int]]:
    """Tokens in float32, of prompts that run twice: the second time they hit the prefix cache."""
    command = [sys.executable, "-m", "tests.multi_gpu.generate", str(folder), str(size), json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "no memory that GPUs share" not in done.stderr, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@on_ranks
@pytest.mark.parametrize(
    "settings",
    [
        {},
        NCCL | {"enforce_eager": True},
        {"cuda_graph_mode": "FULL_AND_PIECEWISE", "enable_expert_parallel": True},
        CRAMPED | {"enable_prefix_caching": False, "num_state_slots": 4},
    ],
    ids=["full", "eager-nccl", "pieces-experts", "preempted"],
)
def test_ranks_generate_what_one_generates(
    settings: dict[str, Any], ranks: int, folder: Path, alone: list[list[int]]
) -> None:
    assert run(folder, ranks, **settings) == alone
