"""Checkpoints that public tools wrote on a CPU: Weft computes what the tool's own reading of its file computes.

``written/`` holds one layer of Llama for each tool and format. ``logits.safetensors`` are those of tokens 1 to 32, from
transformers with the weights that the tool dequantised (llm-compressor 0.14, GPTQModel 7.6, AutoRound 0.15).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.harness import Harness

FOLDERS = sorted((Path(__file__).parent / "written").iterdir())
ROUNDED = 1e-2
"""GPTQModel, AutoRound and llm-compressor's NVFP4 dequantise in two bytes."""


@pytest.mark.parametrize("folder", FOLDERS, ids=[folder.name for folder in FOLDERS])
def test_logits(folder: Path) -> None:
    harness = Harness(folder)
    sequence = harness.sequence(list(range(1, 33)))
    got, want = harness.run([(sequence, 32)])[0], load_file(folder / "logits.safetensors")["logits"]
    exact = folder.name.startswith("llm-compressor") and "nvfp4" not in folder.name
    limit = 1e-5 if exact else ROUNDED
    assert (got - want).norm() < limit * want.norm()
    assert torch.equal(got.argmax(-1), want.argmax(-1))
