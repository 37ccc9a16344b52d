"""Launched steps: from a plan to the scheduler output, and what is in flight.

Job: turn each planned request into a message, with new pages, state slots and checkpoints. Count its tokens as computed
from then on. Give a request the tokens that came back. Owns: the numbers of steps, and the records of steps in flight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.cache.manager import Manager
from weft.messages import ModelOutput, NewRequest, ScheduledRequest, SchedulerOutput
from weft.request import Request
from weft.scheduler.encoder_cache import EncoderCache
from weft.scheduler.running import EMPTY, Launched, Planned, Running, RunningRequests
from weft.scheduler.stalls import StallDetector

if TYPE_CHECKING:
    from weft.offload.restores import Restores


class LaunchedSteps:
    """The steps in flight.

    Attributes:
        step: number of the newest step.
    """

    def __init__(
        self,
        manager: Manager,
        rows: RunningRequests,
        encoder: EncoderCache | None,
        restores: Restores | None,
        stalls: StallDetector,
    ) -> None:
        self._manager, self._rows, self._encoder, self._restores = manager, rows, encoder, restores
        self._stalls = stalls
        self.step = 0
        self.in_flight: dict[int, list[Launched]] = {}

    def sampling_by_history(self, step: int) -> list[tuple[int, Request]]:
        """Rows and requests of a launched step whose sampling depends on their history."""
        sampling = [(entry.running.row, entry.running.request) for entry in self.in_flight[step] if entry.samples]
        return [(row, request) for row, request in sampling if request.samples_by_history]

    def launch(self, planned: list[Planned]) -> SchedulerOutput:
        """Make the scheduler output of a plan, which counts as launched from now on."""
        self.step += 1
        restores = self._restores
        starting = [plan.running for plan in planned if not plan.running.announced]
        scheduled = [(plan, self._make_scheduled_request(plan)) for plan in planned]
        scheduled.sort(key=lambda pair: -pair[1].start if pair[1].is_decode else 0)
        self.in_flight[self.step] = [
            Launched(p.running, e.samples, e.start + e.num_tokens, len(p.drafts), p.num_proposed) for p, e in scheduled
        ]
        stores, fills, restored = restores.take_orders() if restores is not None else (EMPTY, EMPTY, EMPTY)
        return SchedulerOutput(
            self.step,
            [entry for _, entry in scheduled],
            [self._announce(running) for running in starting],
            self._rows.take_finished_rows(),
            state_forks=[running.lease.state_fork for running in starting if running.lease.state_fork],
            page_copies=[running.lease.page_copy for running in starting if running.lease.page_copy],
            encodings=self._encoder.take_encodings() if self._encoder is not None else [],
            stores=stores,
            restores=fills,
            restored=restored,
            files=restores.take_file_orders() if restores is not None else EMPTY,
        )

    def _announce(self, running: Running) -> NewRequest:
        running.announced = True
        request = running.request
        runs = [run for item in request.media for run in item.runs()]
        return NewRequest(running.row, request.known_token_ids, request.num_prompt_tokens, request.sampling, runs)

    def _make_scheduled_request(self, plan: Planned) -> ScheduledRequest:
        running, num_tokens, drafts = plan.running, plan.num_tokens, plan.drafts
        request, lease = running.request, running.lease
        start = request.num_computed_tokens
        num_drafts = len(drafts)
        known_end = start + num_tokens - num_drafts
        samples = known_end == request.num_tokens
        new_pages = EMPTY
        if running.num_pages_sent < len(lease.pages):
            new_pages = lease.pages[running.num_pages_sent :]
            running.num_pages_sent = len(lease.pages)
        running.in_flight += 1
        request.num_computed_tokens = start + num_tokens
        sure_end = known_end - num_drafts if plan.follows else known_end  # the step before may accept no draft
        if sure_end > request.max_computed_tokens:
            self._stalls.num_new_tokens += sure_end - request.max_computed_tokens
            request.max_computed_tokens = sure_end
        request.num_pending += samples + num_drafts
        state_slot = lease.state_slot
        if plan.follows and lease.drafts.num_unsettled:
            checkpoints, state_slot = self._manager.drafts.follow(lease, start)
        else:
            checkpoints = self._manager.allocate_checkpoints(lease, start, num_tokens, num_drafts)
        self._manager.commit(lease, request.num_computed_tokens)
        media = self._encoder.sources(request.media, start, num_tokens) if self._encoder and request.media else EMPTY
        return ScheduledRequest(
            running.row, start, num_tokens, new_pages, state_slot, samples, checkpoints, lease.write_start, drafts,
            media, plan.follows,
        )  # fmt: skip


def extend_request(
    running: Running, output: ModelOutput, sampled: list[int], failed: bool, exclusion: tuple[int, str] | None
) -> int:
    """Give a request what a step has sampled and drafted for it. End it if the step has failed.

    Args:
        exclusion: as ``no_token_left`` of ``Scheduler.update`` returns it. The tokens before that position count.

    Returns:
        The number of new tokens.
    """
    request, logprobs = running.request, output.logprobs.get(running.row, ())
    num_output_tokens = len(request.output_token_ids)
    request.prompt_logprobs.extend(output.prompt_logprobs.get(running.row, ()))
    if exclusion is not None:
        num_tokens, reason = exclusion
        request.extend(sampled[:num_tokens], logprobs)
        if request.finish_reason is None:  # none of these tokens was the last one
            request.finish_reason, request.stop_reason = "error", reason
    elif failed:
        request.finish_reason = "error"
    else:
        request.extend(sampled, logprobs)
        request.draft_token_ids = output.draft_token_ids.get(running.row, EMPTY)
    return len(request.output_token_ids) - num_output_tokens


def tokens_by_row(output: ModelOutput) -> dict[int, list[int]]:
    """The tokens that a step has sampled for each row. A row with drafts may have several."""
    tokens: dict[int, list[int]] = {}
    for row, token_id in zip(output.rows, output.token_ids, strict=True):
        tokens.setdefault(row, []).append(token_id)
    return tokens
