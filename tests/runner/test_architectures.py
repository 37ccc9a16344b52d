"""Kernels compile for the NVIDIA architectures that Weft names, and fit their shared memory: the compiler is asked.

CI compiles a hybrid mixture of experts for capability 8.6, whose programs have the least shared memory, as it is and
with weights in INT4. ``make test-all`` adds 8.0, 8.9, 9.0, 10.0 and 12.0.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fp8_checkpoints import GEOMETRY
from tests.tiny import make_checkpoint
from weft.ops.triton.sizes import LEAST_SHARED_BYTES, fitting_stages

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Most shared memory of a program by capability (CUDA programming guide, table of compute capabilities)."""
CAPABILITIES = list(SHARED_BYTES) if os.environ.get("WEFT_WHOLE_MATRIX") else [86]


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_kernels_fit(quantization: str, tmp_path: Path) -> None:
    folder = make_checkpoint("Qwen3NextForCausalLM", tmp_path / "model", **GEOMETRY, max_position_embeddings=1024)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    words = ["tests.runner.compile_architectures", str(folder), quantization, *map(str, CAPABILITIES)]
    done = subprocess.run([sys.executable, "-m", *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len({row["kernel"] for row in rows}) > 20 and {row["capability"] for row in rows} == set(CAPABILITIES)
    assert [row for row in rows if "error" in row] == []
    assert [row for row in rows if row["shared"] > SHARED_BYTES[row["capability"]]] == []


def test_stages_that_fit() -> None:
    """A pipeline of s stages has s - 1 buffers."""
    import torch

    assert min(SHARED_BYTES.values()) == LEAST_SHARED_BYTES
    assert [fitting_stages(4, size, torch.device("cpu")) for size in (49152, 30 << 10, 1 << 20)] == [3, 4, 1]
