"""A host block is not filled again while the device may still copy from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft.ops.backend import Backend
from weft.runner import buffers
from weft.runner.buffers import PAGE_UPDATES, StepBuffers


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls to the events of a GPU that is not there, in order."""
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
    arrays = {"ids": (torch.int64, 4), "counts": (torch.int32, 3)}
    steps, table = StepBuffers(arrays, 1, 2, torch.device("cuda"), Backend.TORCH), torch.zeros(4, dtype=torch.int32)
    first = steps.begin()
    first["ids"][:], first["counts"][:], first[PAGE_UPDATES][:] = 1, 10, (3, 30, 2, 20)
    steps.upload(4, 2, table)
    steps.mark()
    steps.mark()
    assert steps.device("ids", 4).tolist() == [1] * 4 and steps.device("counts", 3).tolist() == [10] * 3
    assert table.tolist() == [0, 0, 20, 30]
    second = steps.begin()
    second["ids"][:], second["counts"][:], second[PAGE_UPDATES][:] = 2, 20, (1, 40, 0, 50)
    steps.upload(4, 1, table)  # and nobody marks it
    assert steps.device("ids", 4).tolist() == [2] * 4 and steps.device("counts", 3).tolist() == [20] * 3
    assert table.tolist() == [0, 40, 20, 30]
    assert steps.begin() is first and second is not first
    assert log == ["wait 1", "record 1", "wait 0", "record 0", "wait 1"]


def test_arrays_of_tokens_are_alike() -> None:
    arrays = {"ids": (torch.int64, 4), "positions": (torch.int64, 6), "counts": (torch.int32, 3)}
    with pytest.raises(AssertionError, match="alike"):
        StepBuffers(arrays, 2, 2, torch.device("cpu"), Backend.TORCH)
