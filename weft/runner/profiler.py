"""Traces of the running engine.

Steps are recorded with the torch profiler into a Chrome trace, and marked with NVTX ranges on a GPU.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from weft.errors import ConfigError
from weft.messages import SchedulerOutput

MAX_STEPS = 200
"""Steps recorded at most: traces grow by megabytes a step."""


class StepProfiler:
    """Records the first ``MAX_STEPS`` steps into ``directory/weft-<time>.json`` (open it in Perfetto or Chrome)."""

    def __init__(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"profile directory {directory} cannot be made: {error}; name a writable folder"
            ) from error
        self._path = directory / f"weft-{time.strftime('%Y%m%d-%H%M%S')}.json"
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile: profile | None = profile(activities=activities)
        self._profile.start()
        self._num_steps = 0

    @contextmanager
    def step(self, scheduler_output: SchedulerOutput) -> Iterator[None]:
        """Name the step in the trace."""
        num_requests, num_tokens = len(scheduler_output.requests), scheduler_output.num_tokens
        name = f"step {scheduler_output.step}: {num_requests} requests, {num_tokens} tokens"
        if self._profile is None:
            yield
            return
        with record_function(name), torch.cuda.nvtx.range(name) if torch.cuda.is_available() else nullcontext():
            yield
        self._num_steps += 1
        if self._num_steps >= MAX_STEPS:
            self.close()

    def close(self) -> None:
        """Stop recording and write the trace, once."""
        if self._profile is not None:
            self._profile.stop()
            self._profile.export_chrome_trace(str(self._path))
            self._profile = None
