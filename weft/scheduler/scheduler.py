"""The scheduler: continuous batching with chunked prefill and preemption.

Job: continuous batching under a token budget: admission, chunked prefill, growth, preemption, results. Owns: the
waiting queue, the running requests with their rows and leases, and the life of each request. Does not know: tensors,
models, text, or how a step is executed. Pages and slots come from the cache manager.

One step is filled in this order:

1. running requests, in policy order: one token each if they decode, a chunk of the missing tokens if they still
  prefill;
2. waiting requests, in policy order, while rows, pages, slots and budget last.

A running request that finds no page preempts the *last* running request in policy order, until there is room or it is
itself the last. The pages of a preempted request move to the cache, where they can be evicted. It waits again, and
resumes from what is left by then. Nothing is admitted in a step with a preemption. A request is admitted only if all
its known tokens fit and every running request can still grow by a page; otherwise it would soon be preempted again. The
first running request is never preempted: alone it always finds pages.

A waiting request lets others pass while its prefix is restored from a tier below the device
(``weft/offload/restores.py``).

A waiting request that shares a long prefix with a prefill in flight lets others pass until that prefill is done, and
then reuses it (``MIN_IN_FLIGHT_MATCH``). Prompts that arrive together are thus computed once.

Results may be some steps late (``num_pending``). Resources of a launched step are freed only after its results arrived,
so nothing that a running step reads or writes changes its owner.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from weft.cache.lease import Lease
from weft.cache.manager import Manager
from weft.messages import ModelOutput, SchedulerOutput
from weft.request import FinishReason, Request, RequestStatus
from weft.scheduler.draft_planner import DraftPlanner, refusal
from weft.scheduler.draft_steps import (
    add_drafts,
    apply_acceptance,
    following_step,
    must_wait,
    retry_without_drafts,
)  # fmt: skip
from weft.scheduler.encoder_cache import EncoderCache
from weft.scheduler.fair_order import FairOrder
from weft.scheduler.launches import LaunchedSteps, extend_request, tokens_by_row
from weft.scheduler.lookups import PrefixLookups
from weft.scheduler.queue import SchedulePolicy, WaitingQueue
from weft.scheduler.running import Planned, Running, RunningRequests
from weft.scheduler.stalls import StallDetector
from weft.scheduler.step_grid import StepGrid
from weft.stats import SchedulerStats

if TYPE_CHECKING:
    from weft.offload.restores import Restores

logger = logging.getLogger(__name__)


class Scheduler:
    """Continuous batching over one cache manager."""

    def __init__(
        self,
        manager: Manager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: SchedulePolicy = "fcfs",
        drafts: DraftPlanner | None = None,
        encoder: EncoderCache | None = None,
        grid: StepGrid | None = None,
        restores: Restores | None = None,
    ) -> None:
        assert max_num_batched_tokens >= max_num_seqs, "every running request must be able to decode in one step"
        self.manager = manager
        self.max_num_batched_tokens = max_num_batched_tokens
        self.policy: SchedulePolicy = policy
        self.drafts = drafts
        self.encoder = encoder
        self._grid = grid
        self.restores = restores
        self._rows = RunningRequests(manager, max_num_seqs, policy)
        self._order = FairOrder()
        self._waiting = WaitingQueue(policy, self._order)
        self._by_id: dict[str, Request] = {}
        self._lookups = PrefixLookups(manager)
        self._num_preemptions = self._num_by_history = self._num_admitted = 0
        self._stalls = StallDetector()
        self.steps = LaunchedSteps(manager, self._rows, encoder, restores, self._stalls)

    def add(self, request: Request) -> None:
        """Add a new request to the waiting queue."""
        assert request.request_id not in self._by_id, f"request id {request.request_id} is already in use"
        assert request.num_prompt_tokens + request.max_tokens - 1 <= self.manager.max_tokens, "request can never fit"
        self._by_id[request.request_id] = request
        self._num_by_history += request.samples_by_history
        if self.drafts is not None:
            request.no_drafts_because = refusal(request)
        self._order.begin(request.caller)
        self._waiting.push(request)

    def finish(self, request_id: str, reason: FinishReason, stop_reason: str | None = None) -> bool:
        """End a request from outside (abort, stop string). Returns False if it is unknown or has already ended."""
        request = self._by_id.get(request_id)
        if request is None:
            return False
        request.finish_reason, request.stop_reason = reason, stop_reason
        if request.status is RequestStatus.WAITING:
            if self.restores is not None:
                self.restores.ended(request)
            self._waiting.remove(request)
            self._lookups.remove(request)
            self._end(request)
        else:
            running = self._rows.find(request)
            if running.retries:
                self._end(request)
            else:
                self._leave(running)
        return True

    @property
    def requests(self) -> list[Request]:
        return list(self._by_id.values())

    @property
    def has_work(self) -> bool:
        """Whether a request waits, runs, or has a step in flight."""
        return bool(self._waiting or self._rows.running or self.steps.in_flight) or self._restores_now

    @property
    def _restores_now(self) -> bool:
        return self.restores is not None and self.restores.needs_steps

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_waiting=len(self._waiting),
            num_running=len(self._rows.running),
            num_preemptions=self._num_preemptions,
            num_stalls=self._stalls.num_stalls,
            **(self.drafts.stats() if self.drafts is not None else {}),
            **(self.encoder.stats() if self.encoder is not None else {}),
            **(self.restores.stats() if self.restores is not None else {}),
            **asdict(self.manager.stats()),
        )

    @property
    def samples_by_history(self) -> bool:
        """True if a request samples by its history: it has a grammar or logits processors."""
        return self._num_by_history > 0

    def schedule(self) -> SchedulerOutput | None:
        """Plan the next step. Returns None if nothing can run now."""
        if self._rows.leaving and not self._rows.running:
            return None  # only ended requests are in flight: the tree gets their KV and states before the next turn
        if self.encoder is not None:
            self.encoder.begin_step()
        if self.drafts is not None and must_wait(self.drafts, self._rows.running, self.steps.in_flight):
            return self._follow(self.drafts)
        preempted_before = self._num_preemptions
        planned, budget = self._plan_running()
        if self._num_preemptions == preempted_before:
            if self.drafts is not None and self._grid is None:
                planned, budget = add_drafts(self.drafts, planned, budget)
            self._plan_waiting(planned, budget)
            if self.drafts is not None and self._grid is not None:  # a step with prefills verifies nothing
                planned, _ = add_drafts(self.drafts, planned, budget, self._grid)
        return self.steps.launch(planned) if planned or self._restores_now else None

    def _follow(self, planner: DraftPlanner) -> SchedulerOutput | None:
        """Plan a step while the accepted drafts of the previous step are unknown; None if the plan needs them."""
        num_blocked = self.restores.num_blocked if self.restores is not None else 0
        if len(self._waiting) > num_blocked and self._rows.has_room:
            return None
        running, in_flight = self._rows.running, self.steps.in_flight
        planned = following_step(planner, self.manager, running, in_flight, self.max_num_batched_tokens, self._grid)
        return self.steps.launch(planned) if planned else None

    def _plan_running(self) -> tuple[list[Planned], int]:
        """Plan the tokens of each running request, decodes and prefill chunks alike. Returns the plan and the remaining
        budget."""
        planned: list[Planned] = []
        budget, page_size = self.max_num_batched_tokens, self.manager.spec.page_size
        all_wanted = [running.request.num_tokens_to_compute for running in self._rows.running]
        decoding = all_wanted.count(1)
        for running, wanted in zip(list(self._rows.running), all_wanted, strict=True):
            request = running.request
            if request.status is not RequestStatus.RUNNING or request.will_be_full:
                continue  # preempted just now for another request, or its last token is on its way
            if request.num_pending and request.samples_by_history:
                continue
            is_decode = wanted == 1
            # Decodes always fit; chunks of prefill get the rest of the budget.
            num_tokens = 1 if is_decode else min(wanted, budget - decoding)
            if request.media or self._grid is not None:
                num_tokens = self._reach(request, num_tokens)
            if num_tokens <= 0:
                continue
            end = request.num_computed_tokens + num_tokens
            if end > len(running.lease.pages) * page_size and not self._grow(running, end):
                continue
            decoding -= is_decode
            budget -= num_tokens
            planned.append(Planned(running, num_tokens))
        return planned, budget

    def _grow(self, running: Running, num_tokens: int) -> bool:
        """Allocate pages for ``num_tokens`` tokens in all, preempting other requests if needed."""
        while self.manager.allocate(running.lease, num_tokens) is None:
            if self.restores is not None and self.restores.is_active:
                if not self.restores.give_up():
                    return False
                continue
            victim = self._rows.running[-1]
            if victim.in_flight or self._rows.leaving:
                return False  # a launched step frees room when it is done, so this request just waits
            assert len(self._rows.running) > 1, "a request alone always finds pages: the context is clamped to the pool"
            self._preempt(victim)
            if victim is running:
                return False
        return True

    def _preempt(self, victim: Running) -> None:
        """Take all resources from ``victim`` and put it back into the queue."""
        request = victim.request
        self._stalls.preempted(request)
        self._rows.preempt(victim)
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._wait_again(request)

    def preempt_all(self) -> None:
        """Put every running request back into the queue, while no step is in flight. This is no lack of memory."""
        for running in list(self._rows.running):
            self._rows.preempt(running)
            self._wait_again(running.request)

    def _wait_again(self, request: Request) -> None:
        request.num_computed_tokens = 0
        request.prompt_logprobs.clear()
        request.status = RequestStatus.WAITING
        self._waiting.push(request)

    def _plan_waiting(self, planned: list[Planned], budget: int) -> None:
        """Admit waiting requests in order. Stops at the first that does not fit."""
        if not self._rows.has_room:
            return
        if self.restores is not None:
            self.restores.begin_step(len(self._rows.running))
        for request in self._lookups.candidates(self._waiting, self.policy, self.steps.step):
            if self._lookups.awaits_prefill(request):
                continue
            if self.restores is not None and self.restores.still_waits(request):
                continue
            if self.restores is not None and self._rows.running and self.restores.lacks_room(request):
                break
            match = self._lookups.match(request)
            self._lookups.await_in_flight_match(request, match, self._rows.running)
            if self._lookups.awaits_prefill(request):
                continue
            if not self._rows.has_room or budget <= 0:
                break
            if self._grid is not None and not self._grid.reach(request, match.num_tokens, budget):
                break
            if self.restores is not None:
                if self.restores.restore_first(request, match, len(self._rows.running)):
                    continue
                if match.version != self.manager.tree.version:
                    match = self._lookups.match(request)
            lease = self.manager.lease(
                match,
                request.num_tokens,
                reserve_pages=len(self._rows.running) + (self.restores.num_missing_pages if self.restores else 0),
                num_prompt_tokens=request.num_prompt_tokens,
                boundaries=request.checkpoint_positions,
            )
            if lease is None:
                if self.restores is not None:
                    self.restores.did_not_fit(request)
                break
            self._waiting.remove(request)
            self._lookups.remove(request)
            running = self._admit(request, lease)
            num_tokens = self._reach(request, min(request.num_tokens_to_compute, budget))
            if num_tokens == 0:
                continue  # its image is encoded in a later step
            pages = self.manager.allocate(lease, request.num_computed_tokens + num_tokens)
            assert pages is not None, "the lease promised room"
            budget -= num_tokens
            planned.append(Planned(running, num_tokens))

    def _reach(self, request: Request, num_tokens: int) -> int:
        """Cut ``num_tokens`` tokens at the first image that has to wait, and at the last point of the grid."""
        if request.media and num_tokens > 0:
            assert self.encoder is not None, "a request with images came to a model without a vision tower"
            num_tokens = self.encoder.reach(request.media, request.num_computed_tokens, num_tokens)
        if self._grid is not None:
            num_tokens = self._grid.reach(request, request.num_computed_tokens, num_tokens)
        return num_tokens

    def _admit(self, request: Request, lease: Lease) -> Running:
        report = lease.report if self.restores is None else self.restores.admitted(request, lease)
        logger.debug("%s: %s", request.request_id, report)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = lease.num_cached_tokens
            request.cache_report = report
            request.times.first_scheduled = time.monotonic()
            self._num_admitted += 1
            request.admission = self._num_admitted
            self._order.admit(request.caller, request.num_prompt_tokens - lease.num_cached_tokens)
        return self._rows.admit(request, lease)

    def update(
        self, output: ModelOutput, no_token_left: Callable[[Request, list[int]], tuple[int, str] | None] | None = None
    ) -> list[Request]:
        """Process the results of a launched step.

        Args:
            no_token_left: explains a request of ``failed_rows``, given its sampled tokens: the number of tokens before
                the position where its options leave no token, and the reason. None: the computation is at fault.

        Returns:
            The requests that got a token or ended. Tokens of requests that had ended before are dropped.
        """
        if self.encoder is not None:
            self.encoder.seconds += output.encoder_seconds
        if self.restores is not None:
            self.restores.done(output.transfers)
            if output.files:
                self.restores.files_done(output.files)
        tokens = tokens_by_row(output)
        changed: list[Request] = []
        charges: dict[str, int] = {}
        for launched in self.steps.in_flight.pop(output.step):
            running, request = launched.running, launched.running.request
            sampled = tokens.get(running.row, [])
            running.in_flight -= 1
            request.num_pending -= launched.samples + launched.num_drafts
            failed, exclusion = running.row in output.failed_rows, None
            if failed and launched.samples and no_token_left is not None and request.finish_reason is None:
                exclusion = no_token_left(request, sampled)
            if failed and exclusion is None:
                running.failed = True
            elif not running.failed:
                self.manager.confirm(running.lease, launched.num_tokens)
            if self.drafts is not None and launched.num_drafts:
                apply_acceptance(self.drafts, self.manager, launched, len(sampled))
            if failed and exclusion is None and launched.num_drafts and retry_without_drafts(running):
                self._rows.leave(running)
            if request.finish_reason is not None or running.retries:
                if self._rows.release_if_idle(running) and running.retries and request.finish_reason is None:
                    self._wait_again(request)
                continue
            num_new = extend_request(running, output, sampled, failed, exclusion)
            charges[request.caller] = charges.get(request.caller, 0) + num_new
            if request.finish_reason is not None:
                self._leave(running)
            if launched.samples or request.finish_reason is not None:
                changed.append(request)
        for caller, num_tokens in charges.items():
            self._order.charge(caller, num_tokens)
        return changed

    def _leave(self, running: Running) -> None:
        """End a running request. Its resources are freed as soon as no launched step uses them."""
        self._rows.leave(running)
        self._end(running.request)
        self._rows.release_if_idle(running)

    def _end(self, request: Request) -> None:
        request.status = RequestStatus.FINISHED
        request.times.finished = time.monotonic()
        del self._by_id[request.request_id]
        self._order.end(request.caller)
        self._num_by_history -= request.samples_by_history
        request.drop_pixels()

    def check(self) -> None:
        """Assert that rows, leases and counters agree, that work makes progress, and the manager's invariants."""
        self.manager.check()
        if self.encoder is not None:
            self.encoder.check()
        if self.restores is not None:
            self.restores.check()
        assert self._stalls.num_stalls == 0, "a request was preempted twice, and no token was computed in between"
        self._rows.check()
        for request in self._waiting:
            assert request.status is RequestStatus.WAITING and request.num_computed_tokens == 0
        assert self._num_by_history == sum(r.samples_by_history for r in self._by_id.values())
        self._lookups.check(self._waiting)
