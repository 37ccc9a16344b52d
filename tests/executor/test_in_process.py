"""The executor of one rank: what a step in flight reads outlives it."""

from __future__ import annotations

import weakref

import pytest
import torch

from weft.config import resolve
from weft.executor import in_process
from weft.executor.in_process import InProcessExecutor
from weft.runner import memory


def test_what_steps_read_is_held_until_they_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = InProcessExecutor(resolve(device="cpu", load_format="dummy", max_num_seqs=1, max_model_len=16))
    buffers, held = weakref.ref(executor._runner.steps.builder._buffers), []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: held.append(buffers()))
    monkeypatch.setattr(in_process, "release_workspaces", lambda: None)
    executor.stop()
    assert len(held) == 1 and held[0] is not None


def test_a_device_that_has_failed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def failed() -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", failed)
    memory.wait_for_steps()
