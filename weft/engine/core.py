"""The loop: schedule, execute, update.

Job: connect scheduler and executor, one step at a time. Owns: both. Does not know: text, prompts, HTTP.
"""

from __future__ import annotations

import logging

from weft.cache.manager import Manager
from weft.cache.spec import CacheSpec
from weft.config import EngineConfig
from weft.executor.in_process import InProcessExecutor
from weft.request import FinishReason, Request
from weft.runner.memory import CachePlan
from weft.scheduler.scheduler import Scheduler, SchedulerStats

logger = logging.getLogger(__name__)


class EngineCore:
    """Requests in, tokens out."""

    def __init__(self, config: EngineConfig) -> None:
        self._executor = InProcessExecutor(config)
        self.plan: CachePlan = self._executor.plan
        for name, reason in self.plan.reasons.items():
            logger.info("%s: %s", name, reason)
        spec = CacheSpec.from_model(
            config.model_config, page_size=config.page_size, dtype=config.dtype, state_dtype=config.mamba_ssm_dtype
        )
        self.manager = Manager(spec, num_pages=self.plan.num_pages, num_slots=self.plan.num_slots)
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=self.plan.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            policy=config.schedule_policy,
        )

    def step(self) -> list[Request]:
        """Run one step. Returns the requests that got a token or ended."""
        orders = self.scheduler.schedule()
        if orders is None:
            return []
        output = self._executor.execute(orders)
        return self.scheduler.update(output)

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def finish(self, request_id: str, reason: FinishReason, stop_reason: str | None = None) -> bool:
        """End a request from outside the loop; see ``Scheduler.finish``."""
        return self.scheduler.finish(request_id, reason, stop_reason)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    def shutdown(self) -> None:
        self._executor.shutdown()
