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
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING

from msgspec.structs import replace

from weft.cache.manager import Manager
from weft.cache.plan import CachePlan
from weft.cache.spec import CacheSpec
from weft.cache.tuning import AlphaTuner
from weft.config import EngineConfig
from weft.engine.grammars import Grammars
from weft.engine.inspection import Inspection
from weft.engine.views import Snapshot, StepCounts
from weft.executor.in_process import InProcessExecutor
from weft.messages import ModelOutput, SchedulerOutput
from weft.request import FinishReason, Request
from weft.runner.results import PendingStep
from weft.scheduler.scheduler import Scheduler, SchedulerStats

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger(__name__)

_COMPILE_POLL_S = 0.01


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
        self._in_flight: deque[tuple[SchedulerOutput, PendingStep, float]] = deque()  # with the moment of the launch
        self._failed: list[Request] = []
        self._inspection = Inspection(self.manager)
        self._grammars = Grammars(
            config.tokenizer_path,
            config.model_config.vocab_size,
            config.generation.eos_token_ids or config.model_config.eos_token_ids,
        )
        self._compiling: dict[str, tuple[Request, Future[LLMatcher]]] = {}

    def step(self) -> list[Request]:
        """Launch a step and take in the results that are due.

        If a step breaks (an interrupt, out of memory), what it was to write is unknown: its requests end with
        ``"error"``, the exception is passed on, and the next call returns them. Other requests are not disturbed.

        Returns:
            The requests that got a token or ended; with overlap, by the step before.
        """
        self._admit_compiled()
        changed, self._failed = self._failed, []
        orders = self.scheduler.schedule()
        if orders is not None:
            with self._failing(orders):
                launched = time.monotonic()
                self._in_flight.append((orders, self._executor.launch(self._with_masks(orders)), launched))
        due = len(self._in_flight) - (self._max_in_flight if orders is not None else 0)
        if due > 0:
            oldest, pending, launched = self._in_flight.popleft()
            with self._failing(oldest):
                output = pending.result()
            self._inspection.steps.ended(oldest, launched, pending.mode, pending.num_padding_tokens)
            changed += self.scheduler.update(output)
        for request in changed:
            if request.sampling.grammar is not None:
                self._grammars.update(request)
        return changed

    # -- constrained requests --------------------------------------------------------------------------------------

    def _admit_compiled(self) -> None:
        """Requests whose grammar is compiled join the line; one whose grammar does not compile ends."""
        if not self._compiling:
            return
        if not self.scheduler.has_work:  # nothing else to do than to wait, but not for long: requests may be aborted
            wait([future for _, future in self._compiling.values()], _COMPILE_POLL_S, FIRST_COMPLETED)
        for request, future in [entry for entry in self._compiling.values() if entry[1].done()]:
            del self._compiling[request.request_id]
            if future.exception() is not None:
                logger.warning("%s: %s", request.request_id, future.exception())
                request.finish_reason = "error"
                self._failed.append(request)
            else:
                self._grammars.follow(request, future.result())
                self.scheduler.add(request)

    def _with_masks(self, orders: SchedulerOutput) -> SchedulerOutput:
        """The orders with a mask for every row that is to sample under a grammar."""
        sampling = self.scheduler.sampling_requests(orders.step)
        masks = {row: self._grammars.mask(request) for row, request in sampling if request.sampling.grammar is not None}
        known = {row: mask for row, mask in masks.items() if mask is not None}
        return replace(orders, token_masks=known) if known else orders

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
        """A new request joins the line, if need be as soon as its grammar is compiled."""
        self._inspection.added(request)
        if request.sampling.grammar is None:
            self.scheduler.add(request)
        else:
            self._compiling[request.request_id] = (request, self._grammars.compile(request.sampling.grammar))

    def finish(self, request_id: str, reason: FinishReason, stop_reason: str | None = None) -> bool:
        """End a request from outside the loop; see ``Scheduler.finish``."""
        self._grammars.forget(request_id)
        if self._compiling.pop(request_id, None) is not None:
            return True
        return self.scheduler.finish(request_id, reason, stop_reason)

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs, a step is in flight, or an ended request has not been returned."""
        return self.scheduler.has_work or bool(self._failed or self._compiling)

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    def step_counts(self) -> StepCounts:
        return self._inspection.steps.counts()

    def snapshot(self, tokens_per_node: int = 0) -> Snapshot:
        """What the inspector shows: the latest steps and requests, tree and pools."""
        return self._inspection.snapshot(self.stats(), tokens_per_node)

    def shutdown(self) -> None:
        self._in_flight.clear()
        self._grammars.close()
        self._executor.shutdown()
