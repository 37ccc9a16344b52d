"""Traces: steps by name in the file, and as NVTX ranges where there is a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from weft.messages import ScheduledRequest, SchedulerOutput
from weft.runner import profiler
from weft.runner.profiler import StepProfiler


def step(number: int) -> SchedulerOutput:
    return SchedulerOutput(number, [ScheduledRequest(0, 0, 7, [1], 1, True)])


def test_steps_are_named_in_the_trace_and_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[str] = []

    @contextmanager
    def noted(name: str) -> Iterator[None]:
        ranges.append(f"begin {name}")
        try:
            yield
        finally:
            ranges.append(f"end {name}")

    traces = StepProfiler(tmp_path / "traces")
    with traces.step(step(1)):
        pass
    monkeypatch.setattr(profiler.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(profiler.torch.cuda.nvtx, "range", noted)
    with traces.step(step(2)):
        assert ranges == ["begin step 2: 1 requests, 7 tokens"]
    with pytest.raises(RuntimeError, match="broken"), traces.step(step(3)):
        raise RuntimeError("broken")
    assert ranges[1:] == [
        "end step 2: 1 requests, 7 tokens", "begin step 3: 1 requests, 7 tokens", "end step 3: 1 requests, 7 tokens",
    ]  # fmt: skip
    traces.close()
    (path,) = (tmp_path / "traces").iterdir()
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert {f"step {n}: 1 requests, 7 tokens" for n in (1, 2, 3)} <= names
