"""The interface of executors, and the choice of one. Steps go out; results come back in the same order.

Does not know: processes, devices, requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from weft.cache.plan import CachePlan
from weft.config import EngineConfig
from weft.executor.rank_process import StartedRank
from weft.layers.sampler import LogitsProcessor
from weft.messages import ModelOutput, SchedulerOutput

if TYPE_CHECKING:
    from weft.runner.rollouts import Command, Done
    from weft.weights.sources import Source


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
        """Queue one step, without waiting for the device. If it raises, the step has no result.

        Args:
            processors: logits processors by row. They run in the calling process, so only an executor with all ranks in
                it accepts them.
        """
        ...

    def result(self) -> ModelOutput:
        """Wait for the results of the oldest launched step. If it raises, that step's results are lost."""
        ...

    def command(self, command: Command, tensors: Source | None = None) -> Done:
        """Run a command of ``runner/rollouts.py`` on every rank, while no step is in flight. Raises as
        ``RankControl.run``, and EngineDeadError if a rank has died."""
        ...

    def stop(self) -> None:
        """Drop the steps in flight, and free weights, caches and processes."""
        ...


def make_executor(config: EngineConfig, ranks: Sequence[StartedRank] = ()) -> Executor:
    """Start all ranks of the model. ``ranks``: the ranks that ``begin_start`` has started.

    Raises:
        WeftError: a rank cannot start. The message says why.
    """
    if config.distributed_executor_backend == "uni":
        from weft.executor.in_process import InProcessExecutor

        return InProcessExecutor(config)
    from weft.executor.multi_process import MultiProcessExecutor

    return MultiProcessExecutor(config, ranks)
