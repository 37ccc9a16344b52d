"""The loop: schedule, execute, update.

Job: connect scheduler and executor, and keep the device busy. Owns: both, and the steps in flight.
Does not know: text, prompts, HTTP.

With overlap, one step stays in flight while the host handles the results of the one before it::

    host    schedule 2 | launch 2 | results of 1 | schedule 3 | launch 3 | results of 2 | …
    device  ---- step 1 ----------|---------- step 2 ---------------|---------- step 3 …

The token that step 1 samples stays on the device and is fed to step 2 there. A request that turns out to have stopped
in step 1 is in step 2 for nothing; the scheduler drops that token.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from weft.cache.lease import CacheStats
from weft.cache.manager import Manager
from weft.cache.spec import CacheSpec
from weft.cache.tuning import AlphaTuner
from weft.config import EngineConfig
from weft.executor.in_process import InProcessExecutor
from weft.messages import ModelOutput, SchedulerOutput
from weft.request import FinishReason, Request
from weft.runner.memory import CachePlan
from weft.runner.results import PendingStep
from weft.scheduler.scheduler import Scheduler, SchedulerStats

logger = logging.getLogger(__name__)


class EngineCore:
    """Requests in, tokens out."""

    def __init__(self, config: EngineConfig) -> None:
        self._executor = InProcessExecutor(config)
        self.plan: CachePlan = self._executor.plan
        self.startup: dict[str, float] = self._executor.startup
        for name, reason in self.plan.reasons.items():
            logger.info("%s: %s", name, reason)
        spec = CacheSpec.from_model(
            config.model_config, page_size=config.page_size, dtype=config.dtype, state_dtype=config.mamba_ssm_dtype
        )
        self.manager = Manager(
            spec,
            num_pages=self.plan.num_pages,
            num_slots=self.plan.num_slots,
            enable_prefix_caching=config.enable_prefix_caching,
            checkpoint_policy=config.state_checkpoint_policy,
            eviction=config.eviction_policy,
        )
        if config.enable_prefix_caching and config.eviction_policy == "flops":
            self.manager.observer = AlphaTuner(self.manager)
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=self.plan.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            policy=config.schedule_policy,
        )
        self._max_in_flight = 1 if config.enable_overlap else 0
        self._in_flight: deque[tuple[SchedulerOutput, PendingStep]] = deque()
        self._failed: list[Request] = []

    def step(self) -> list[Request]:
        """Launch a step and take in the results that are due.

        If a step breaks (an interrupt, out of memory), what it was to write is unknown: its requests end with
        ``"error"``, the exception is passed on, and the next call returns them. Other requests are not disturbed.

        Returns:
            The requests that got a token or ended; with overlap, by the step before.
        """
        changed, self._failed = self._failed, []
        orders = self.scheduler.schedule()
        if orders is not None:
            with self._failing(orders):
                self._in_flight.append((orders, self._executor.launch(orders)))
        due = len(self._in_flight) - (self._max_in_flight if orders is not None else 0)
        if due > 0:
            oldest, pending = self._in_flight.popleft()
            with self._failing(oldest):
                output = pending.result()
            changed += self.scheduler.update(output)
        return changed

    @contextmanager
    def _failing(self, orders: SchedulerOutput) -> Iterator[None]:
        """Whatever goes wrong inside ends the requests of this step."""
        try:
            yield
        except BaseException:
            rows = [order.row for order in orders.requests]
            self._failed += self.scheduler.update(ModelOutput(orders.step, [], [], failed_rows=rows))
            raise

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def finish(self, request_id: str, reason: FinishReason, stop_reason: str | None = None) -> bool:
        """End a request from outside the loop; see ``Scheduler.finish``."""
        return self.scheduler.finish(request_id, reason, stop_reason)

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs, a step is in flight, or an ended request has not been returned."""
        return self.scheduler.has_work or bool(self._failed)

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    def cache_stats(self) -> CacheStats:
        """Free and evictable pages and slots, hits, evictions."""
        return self.manager.stats()

    def shutdown(self) -> None:
        self._in_flight.clear()
        self._executor.shutdown()
