"""A host block is not filled again while the device may still copy from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft.runner import buffers
from weft.runner.buffers import StepBuffers


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the events of a GPU that is not there."""
    calls: list[str] = []
    count = iter(range(9))
    zeros = torch.zeros

    class Event:
        def __init__(self) -> None:
            self._name = next(count)

        def record(self) -> None:
            calls.append(f"record {self._name}")

        def synchronize(self) -> None:
            calls.append(f"wait {self._name}")

    def on_cpu(*size: int, dtype: torch.dtype, **_: Any) -> torch.Tensor:
        return zeros(*size, dtype=dtype)

    monkeypatch.setattr(buffers.torch.cuda, "Event", Event)
    monkeypatch.setattr(buffers.torch, "zeros", on_cpu)
    return calls


def test_blocks_in_turn_each_after_its_copy(log: list[str]) -> None:
    steps = StepBuffers({"ids": (torch.int64, 3), "tail": (torch.int64, 4)}, torch.device("cuda"))
    first = steps.begin()
    first["ids"][:], first["tail"][:] = 1, 10
    steps.upload(2)
    steps.mark()
    steps.mark()
    assert steps.device("ids", 3).tolist() == [1, 1, 1] and steps.device("tail", 4).tolist() == [10, 10, 0, 0]
    second = steps.begin()
    second["ids"][:], second["tail"][:] = 2, 20
    steps.upload(2)  # and nobody marks it
    assert steps.device("ids", 3).tolist() == [2, 2, 2] and steps.device("tail", 4).tolist() == [20, 20, 0, 0]
    assert steps.begin() is first and second is not first
    assert log == ["wait 1", "record 1", "wait 0", "record 0", "wait 1"]
