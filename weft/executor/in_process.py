"""The executor of a single rank, in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cache.plan import CachePlan
from weft.config import EngineConfig
from weft.layers.sampler import LogitsProcessor
from weft.messages import ModelOutput, SchedulerOutput
from weft.runner.memory import release_workspaces, wait_for_steps
from weft.runner.model_runner import ModelRunner
from weft.runner.profiler import StepProfiler
from weft.runner.results import PendingStep

if TYPE_CHECKING:
    from weft.runner.rollouts import Command, Done, RankControl
    from weft.weights.sources import Source


class InProcessExecutor:
    """Runs one rank in this process."""

    def __init__(self, config: EngineConfig) -> None:
        self._runner = ModelRunner(config)
        self._profiler = StepProfiler(Path(config.profile_dir)) if config.profile_dir else None
        self._pending: deque[PendingStep] = deque()

    @property
    def plan(self) -> CachePlan:
        return self._runner.plan

    @property
    def startup(self) -> dict[str, float]:
        return self._runner.startup.seconds

    def launch(
        self, scheduler_output: SchedulerOutput, processors: Mapping[int, LogitsProcessor] | None = None
    ) -> None:
        with nullcontext() if self._profiler is None else self._profiler.step(scheduler_output):
            try:
                self._pending.append(self._runner.steps.launch(scheduler_output, processors))
            except BaseException:
                if self._runner.steps.transfers is not None:
                    wait_for_steps()  # its copies may be under way, and their pages are free from here on
                raise

    def result(self) -> ModelOutput:
        return self._pending.popleft().result()

    @cached_property
    def _control(self) -> RankControl:
        from weft.runner.rollouts import RankControl

        return RankControl(self._runner)

    def command(self, command: Command, tensors: Source | None = None) -> Done:
        assert not self._pending, "a command runs between steps"
        return self._control.run(command, tensors)

    def stop(self) -> None:
        self.__dict__.pop("_control", None)
        self._pending.clear()
        if self._profiler is not None:
            self._profiler.close()
        wait_for_steps()
        if self._runner.sleep is not None:
            self._runner.sleep.close()
        del self._runner
        release_workspaces()
