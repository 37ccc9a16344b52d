"""One engine in a process of its own: ``python -m tests.multi_gpu.generate FOLDER RANKS SETTINGS``; tokens as JSON.

Only the first engine of a process has memory that GPUs share.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests.executor.test_tensor_parallel import generate

if __name__ == "__main__":
    torch.set_float32_matmul_precision("highest")
    folder, ranks, settings = sys.argv[1:]
    tokens, _ = generate(Path(folder), int(ranks), dtype="float32", **json.loads(settings))
    print(json.dumps(tokens))
