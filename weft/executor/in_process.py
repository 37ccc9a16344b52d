"""Runs steps in this process.

Job: transport only: build the one rank's runner and call it. Owns: the runner. Does not know: requests, or what a step
means.
"""

from __future__ import annotations

from pathlib import Path

from weft.cache.plan import CachePlan
from weft.config import EngineConfig
from weft.messages import SchedulerOutput
from weft.runner.memory import release_workspaces
from weft.runner.model_runner import ModelRunner
from weft.runner.profiler import StepProfiler
from weft.runner.results import PendingStep


class InProcessExecutor:
    """One rank, in this process."""

    def __init__(self, config: EngineConfig) -> None:
        self._runner = ModelRunner(config)
        self._profiler = StepProfiler(Path(config.profile_dir)) if config.profile_dir else None

    @property
    def plan(self) -> CachePlan:
        """The pool sizes that the runner settled on."""
        return self._runner.plan

    @property
    def startup(self) -> dict[str, float]:
        """Seconds of each stage of the start."""
        return self._runner.startup.seconds

    def launch(self, orders: SchedulerOutput) -> PendingStep:
        """Queue one step; its results are fetched from the returned object."""
        if self._profiler is None:
            return self._runner.launch(orders)
        with self._profiler.step(orders):
            return self._runner.launch(orders)

    def shutdown(self) -> None:
        """Write what is still to be written and let go of weights and caches."""
        if self._profiler is not None:
            self._profiler.close()
        del self._runner
        release_workspaces()
