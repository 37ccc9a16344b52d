"""The interface of executors (steps go out, results come back in the same order), and the choice of one.

Does not know: processes, devices, requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from weft.cache.plan import CachePlan
from weft.config import EngineConfig
from weft.executor.rank_process import StartedRank
from weft.layers.sampler import LogitsProcessor
from weft.messages import ModelOutput, SchedulerOutput


class Executor(Protocol):
    """All ranks of one model."""

    @property
    def plan(self) -> CachePlan:
        """The pool sizes, the same on every rank."""
        ...

    @property
    def startup(self) -> Mapping[str, float]:
        """Seconds of each stage of the start."""
        ...

    def launch(
        self, scheduler_output: SchedulerOutput, processors: Mapping[int, LogitsProcessor] | None = None
    ) -> None:
        """Queue one step; does not wait for the device. If it raises, no result of this step will come.

        Args:
            processors: logits processors by row. They run where this is called, so only an executor whose ranks are in
                this process takes any.
        """
        ...

    def result(self) -> ModelOutput:
        """Wait for the results of the oldest launched step. If it raises, that step's results are lost."""
        ...

    def stop(self) -> None:
        """Drop the steps in flight and let go of weights, caches and processes."""
        ...


def make_executor(config: EngineConfig, ranks: Sequence[StartedRank] = ()) -> Executor:
    """Start all ranks of the model. ``ranks``: those that ``begin_start`` has started for it.

    Raises:
        WeftError: a rank cannot start, and why.
    """
    if config.distributed_executor_backend == "uni":
        from weft.executor.in_process import InProcessExecutor

        return InProcessExecutor(config)
    from weft.executor.multi_process import MultiProcessExecutor

    return MultiProcessExecutor(config, ranks)
