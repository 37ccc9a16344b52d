"""The interface of executors: steps go out, results come back in the same order.

Job: the interface that every executor implements. Owns: nothing. Does not know: processes, devices, requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from weft.cache.plan import CachePlan
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
