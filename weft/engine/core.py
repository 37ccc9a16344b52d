"""The loop: schedule, launch, update.

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
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from weft.cache.manager import EndedRequest, Manager
from weft.cache.plan import CachePlan
from weft.cache.reuse_grid import ReuseGrid
from weft.cache.spec import CacheSpec
from weft.cache.tuning import AlphaTuner
from weft.config import EngineConfig
from weft.config.chunks import CHUNK_SIZE
from weft.config.sum_order import LONGER_SPLITS_FROM
from weft.engine.exclusions import no_token_left
from weft.engine.failures import Failures
from weft.engine.grammars import Grammars
from weft.engine.inspection import Inspection
from weft.engine.logits_processors import processors_of
from weft.engine.prefix_hashes import reusable_prefixes
from weft.engine.snapshot import Snapshot
from weft.engine.wire import CachedPrefixes
from weft.errors import EngineDeadError
from weft.executor.executor import Executor, make_executor
from weft.executor.rank_process import StartedRank
from weft.messages import ModelOutput, SchedulerOutput
from weft.request import FinishReason, Request
from weft.scheduler.draft_planner import DraftPlanner
from weft.scheduler.encoder_cache import EncoderCache
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.step_grid import StepGrid
from weft.stats import EngineStats

if TYPE_CHECKING:
    from weft.engine.rollouts import Rollouts
    from weft.layers.sampler import LogitsProcessor
    from weft.offload.restores import Restores
    from weft.offload.tier import HostTier

logger = logging.getLogger(__name__)

SAVE_S = 30.0
"""Upper bound on the time that a shutdown spends on files of the disk tier."""

MAX_ENDED = 64
"""Upper bound on ended requests that wait for the tuner of the eviction policy. Earlier ones are dropped."""


class EngineCore:
    """The engine without text: requests in, tokens out. ``ranks``: see ``make_executor``."""

    def __init__(self, config: EngineConfig, ranks: Sequence[StartedRank] = ()) -> None:
        self._executor: Executor = make_executor(config, ranks)
        self.plan: CachePlan = self._executor.plan
        self.startup: dict[str, float] = dict(self._executor.startup)
        for name, reason in self.plan.reasons.items():
            logger.info("%s: %s", name, reason)
        spec = CacheSpec.of(config)
        tier = _make_tier(config, spec)
        self.manager = _make_manager(config, spec, self.plan, tier)
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=self.plan.max_num_seqs,
            max_num_batched_tokens=self.plan.max_num_batched_tokens or config.max_num_batched_tokens,
            policy=config.schedule_policy,
            drafts=_make_drafts(config, self.manager, self.plan.max_model_len),
            encoder=_make_encoder(config),
            grid=_step_grid(config) if config.deterministic else None,
            restores=_make_restores(config, self.manager, tier),
        )
        tunes = config.enable_prefix_caching and config.eviction_policy == "flops"
        self._tuner = AlphaTuner(self.manager) if tunes else None
        self._ended: deque[EndedRequest] = deque(maxlen=MAX_ENDED)
        if self._tuner is not None:
            self.manager.observer = self._ended.append
        self._max_in_flight = 1 if config.enable_overlap else 0
        self._in_flight: deque[tuple[SchedulerOutput, float]] = deque()  # and the time of the launch
        self._failures = Failures(self.scheduler)
        self._inspection = Inspection(self.manager)
        self._vocab_size = config.model_config.vocab_size
        self._grammars = Grammars(
            config.tokenizer_path,
            self._vocab_size,
            config.eos_token_ids,
        )
        self._rollouts: Rollouts | None = None

    def step(self) -> list[Request]:
        """Launch a step, and process the results that are due.

        If a step raises (an interrupt, out of memory), its writes are undefined. Its requests end with ``"error"``, the
        exception is passed on, and the next call returns the requests. Other requests are not affected.

        Returns:
            The requests that got a token or ended, with overlap in the previous step.

        Raises:
            EngineDeadError: a rank has died or hangs. All requests end with ``"error"``; the next call returns them.
        """
        if self._failures.fatal is not None:
            return self._failures.take()
        if self._rollouts is not None and self._rollouts.is_still:
            return self.settle()
        self._admit_compiled()
        scheduler_output = self.scheduler.schedule()
        if scheduler_output is not None:
            self._launch(scheduler_output)
            self._tune_eviction()
        output = self._result(max_in_flight=self._max_in_flight if scheduler_output is not None else 0)
        updated = self.scheduler.update(output, self._no_token_left) if output is not None else []
        changed = self._failures.take() + updated
        self._grammars.update(changed)
        return changed

    def settle(self) -> list[Request]:
        """Process the results of all steps in flight, and launch none. Raises as ``step``.

        Returns:
            The requests that got a token or ended.
        """
        changed: list[Request] = []
        while (output := self._result(max_in_flight=0)) is not None:
            changed += self.scheduler.update(output, self._no_token_left)
        changed = self._failures.take() + changed
        self._grammars.update(changed)
        return changed

    def move_copies(self) -> list[Request]:
        """Run a step without requests, which moves the copies of a tier on. Returns as ``settle``."""
        self._launch(self.scheduler.steps.launch([]))
        return self.settle()

    @property
    def rollouts(self) -> Rollouts:
        """The pauses and updates of a training loop, made on first use."""
        if self._rollouts is None:
            from weft.engine.rollouts import Rollouts

            self._rollouts = Rollouts(self)
        return self._rollouts

    @property
    def executor(self) -> Executor:
        return self._executor

    def _admit_compiled(self) -> None:
        """Add requests with a compiled grammar to the waiting queue, and end those with an invalid one."""
        if not self._grammars.num_compiling:
            return
        for request, error in self._grammars.compiled(may_wait=not self.scheduler.has_work):
            if error is None:
                self.scheduler.add(request)
            else:
                logger.warning("%s: %s", request.request_id, error)
                self._failures.end(request, str(error))

    def _launch(self, scheduler_output: SchedulerOutput) -> None:
        launched = time.monotonic()
        try:
            processors: Mapping[int, LogitsProcessor] = {}
            if self.scheduler.samples_by_history:
                sampling = self.scheduler.steps.sampling_by_history(scheduler_output.step)
                processors = processors_of(sampling)
                if masks := self._grammars.masks(sampling, scheduler_output.requests):
                    scheduler_output = replace(scheduler_output, token_masks=masks)
            self._executor.launch(scheduler_output, processors)
        except BaseException as error:
            self._end_broken(scheduler_output, error)
            raise
        self._in_flight.append((scheduler_output, launched))

    def _tune_eviction(self) -> None:
        """Replay one ended request for the tuner. The replay takes longer than everything else at the end of a request.
        It waits until the device is busy, and one request is replayed per step."""
        if self._tuner is not None and self._ended:
            self._tuner(self._ended.popleft())

    def _result(self, max_in_flight: int) -> ModelOutput | None:
        """The results of the oldest step, unless at most ``max_in_flight`` steps are in flight."""
        if len(self._in_flight) <= max_in_flight:
            return None
        scheduler_output, launched = self._in_flight.popleft()
        try:
            output = self._executor.result()
        except BaseException as error:
            self._end_broken(scheduler_output, error)
            raise
        self._inspection.steps.ended(scheduler_output, launched, output.mode, output.num_padding_tokens)
        if self.scheduler.restores is not None:
            self.scheduler.restores.computed(scheduler_output, self._inspection.steps.steps[-1].seconds)
        return output

    def _no_token_left(self, request: Request, sampled: list[int]) -> tuple[int, str] | None:
        """The reason why no token is left; see ``Scheduler.update``. ``sampled``: with drafts, all tokens of the
        step."""
        drafts = sampled[:-1]
        masks: Sequence[bytes | None] = self._grammars.masks_after(request, drafts) or [None] * (1 + len(drafts))
        known = request.output_token_ids
        for count, mask in enumerate(masks):
            reason = no_token_left(request.sampling, [*known, *drafts[:count]], mask, self._vocab_size)
            if reason is not None:
                return count, reason
        return None

    def _end_broken(self, scheduler_output: SchedulerOutput, error: BaseException) -> None:
        """End the requests of a step that raised, or all requests if no step can run any more."""
        self._failures.end_step(scheduler_output, error)
        if self._failures.fatal is not None:
            self._failures.end_all([output for output, _ in self._in_flight], self._grammars.drop())
            self._in_flight.clear()

    @property
    def failure(self) -> EngineDeadError | None:
        """The reason why no step can run any more; None if steps can run."""
        return self._failures.fatal

    @property
    def unavailable(self) -> str:
        """The reason why no request can run until the weights or the memory are back; empty if requests can run."""
        return self._rollouts.unavailable if self._rollouts is not None else ""

    def add(self, request: Request) -> None:
        """Add a request to the waiting queue, after its grammar is compiled if it has one."""
        self._inspection.added(request)
        if self._rollouts is None or not self._rollouts.holds(request):
            self.enter(request)

    def enter(self, request: Request) -> None:
        """Add a request that nothing holds back."""
        if request.sampling.grammar is None:
            self.scheduler.add(request)
        else:
            self._grammars.add(request)

    def refuse(self, request: Request, why: str) -> None:
        """End a request that cannot run with an error. The next step returns it."""
        self._failures.end(request, why)

    @property
    def requests(self) -> list[Request]:
        """All requests that have not ended."""
        return [*self.scheduler.requests, *self._grammars.requests]

    def finish(self, request_id: str, reason: FinishReason, stop_reason: str | None = None) -> bool:
        """End a request from outside the loop; see ``Scheduler.finish``."""
        if self._rollouts is not None and self._rollouts.drop_held(request_id, reason, stop_reason):
            return True
        waiting_for_grammar = self._grammars.cancel(request_id)
        if waiting_for_grammar is None:
            return self.scheduler.finish(request_id, reason, stop_reason)
        waiting_for_grammar.end(reason, stop_reason)
        return True

    def reset_prefix_cache(self) -> bool:
        """Drop every cached prefix. Returns False, and changes nothing, while requests run."""
        return self.manager.reset()

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, a step is in flight, or an ended request was not returned yet."""
        if self._rollouts is not None and self._rollouts.is_still:
            return bool(self._in_flight or self._failures)
        return self.scheduler.has_work or self._grammars.num_compiling > 0 or bool(self._failures)

    def stats(self) -> EngineStats:
        scheduler = self.scheduler.stats()
        num_waiting = scheduler.num_waiting + self._grammars.num_compiling
        stats = self._inspection.steps.stats(replace(scheduler, num_waiting=num_waiting))
        return stats if self._rollouts is None else replace(stats, weight_version=self._rollouts.version)

    def snapshot(self, tokens_per_node: int = 0) -> Snapshot:
        """A snapshot for the inspector: the latest steps and requests, tree and pools."""
        return self._inspection.snapshot(self.stats(), tokens_per_node)

    def cached_prefixes(self, known_version: int) -> tuple[int, CachedPrefixes]:
        """The version of the prefix tree, and hashes of the reusable prefixes; no hashes if the caller knows the
        version."""
        tree, restores = self.manager.tree, self.scheduler.restores
        if tree.version == known_version:
            return known_version, CachedPrefixes([])
        needs_state = self.manager.spec.slot_bytes > 0
        if restores is None:
            return tree.version, CachedPrefixes(reusable_prefixes(tree, needs_state=needs_state))
        reports = restores.reports
        hashes = reusable_prefixes(tree, needs_state=needs_state, listener=reports.on_device)
        return tree.version, CachedPrefixes(hashes, reports.below(hashes), reports.price)

    def _save_tier(self) -> None:
        """Write all that the tree holds to the disk tier, if there is one, for the next start."""
        restores = self.scheduler.restores
        if restores is None or restores.tier.disk is None or self.failure is not None or self.has_work:
            return
        deadline = time.monotonic() + SAVE_S
        self.manager.evict_all()
        while restores.has_unsaved and time.monotonic() < deadline:
            self.move_copies()

    def shutdown(self) -> None:
        try:
            self._save_tier()
        finally:
            self._stop()

    def _stop(self) -> None:
        self._in_flight.clear()
        self._grammars.close()
        self._executor.stop()


def _make_drafts(config: EngineConfig, manager: Manager, max_model_len: int) -> DraftPlanner | None:
    if config.speculative_config is None:
        return None
    return DraftPlanner.of(config.speculative_config, manager, max_model_len, on_device=config.drafts_on_device)


def _make_encoder(config: EngineConfig) -> EncoderCache | None:
    """Make the encoder cache of a model that reads images."""
    if not config.model_config.runs_vision:
        return None
    assert config.encoder_cache_size is not None and config.max_num_encoder_input_tokens is not None
    return EncoderCache(config.encoder_cache_size, config.max_num_encoder_input_tokens)


def _make_tier(config: EngineConfig, spec: CacheSpec) -> HostTier | None:
    if not config.kv_offloading_size:
        return None
    from weft.offload.build import make_tier

    return make_tier(config, spec)


def _step_grid(config: EngineConfig) -> StepGrid:
    return StepGrid(CHUNK_SIZE, (LONGER_SPLITS_FROM, 8 * LONGER_SPLITS_FROM), config.num_drafts)


def _make_restores(config: EngineConfig, manager: Manager, tier: HostTier | None) -> Restores | None:
    if tier is None:
        return None
    from weft.offload.build import make_restores

    return make_restores(manager, tier, config)


def _make_manager(config: EngineConfig, spec: CacheSpec, plan: CachePlan, tier: HostTier | None) -> Manager:
    """Make the cache manager over pools of the planned sizes."""
    return Manager(
        spec,
        num_pages=plan.num_pages,
        num_slots=plan.num_slots,
        enable_prefix_caching=config.enable_prefix_caching,
        checkpoint_policy=config.state_checkpoint_policy,
        eviction=config.eviction_policy,
        grid=ReuseGrid(CHUNK_SIZE) if config.deterministic else None,
        tier=tier,
    )
