"""Copying a step's results to the host.

Job: start copies without waiting, and turn them into a ``ModelOutput`` when asked. Owns: the host copies and the event
that says when they are complete. Does not know: how tokens were chosen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.layers.sampler import Logprobs, logprobs_of
from weft.messages import ModelOutput, ScheduledRequest, SchedulerOutput, TokenLogprobs
from weft.ops.draft_types import NO_DRAFT
from weft.runner.buffers import to_device
from weft.runner.media_inputs import EncoderTime
from weft.runner.rows import RowTable
from weft.runner.step_sampler import SampledTokens


def to_host(tensor: Tensor) -> Tensor:
    """Start copying ``tensor`` to the host; valid once an event recorded after this call has passed.

    On the CPU this is a real copy too: the original may be a static buffer that the next step overwrites.
    """
    if tensor.device.type == "cpu":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def logprobs_to_host(logprobs: Logprobs) -> Logprobs:
    """Start copying log probabilities to the host."""
    return Logprobs(to_host(logprobs.token_ids), to_host(logprobs.logprobs), to_host(logprobs.ranks))


def _entries(logprobs: Logprobs) -> list[TokenLogprobs]:
    """Those on the host, position by position."""
    columns = (logprobs.token_ids.tolist(), logprobs.logprobs.tolist(), logprobs.ranks.tolist())
    return [TokenLogprobs(ids, values, rank) for ids, values, rank in zip(*columns, strict=True)]


@dataclass(slots=True)
class PendingStep:
    """A launched step.

    Attributes:
        step: its number.
        rows: rows that sampled, in batch order; a row with drafts once for each of its positions.
        token_ids, failed: ``[len(rows)]`` on the host; None if nothing was sampled.
        counted: ``[len(rows)]`` on the host, whether the token is the sequence's; None if all are.
        num_logprobs: of the rows that want log probabilities: place in ``rows`` -> how many alternatives.
        logprobs: of their sampled tokens, in that order, on the host.
        prompt_logprobs: row -> those of its prompt tokens, on the host.
        prefill_rows: rows that did not sample.
        prefill_failed: ``[len(prefill_rows)]`` on the host: what they computed is NaN or infinite; None without rows.
        drafts: ``[len(draft_rows), K]`` on the host, for the next step, ``NO_DRAFT`` where none was found; None if
            nothing is drafted on the device.
        draft_rows: whose they are.
        mode: how the step runs (NONE, PIECEWISE, FULL).
        num_padding_tokens: rows that it computes for nobody.
        encoder_time: of its images; None if it encodes none.
    """

    step: int
    rows: list[int]
    token_ids: Tensor | None = None
    failed: Tensor | None = None
    counted: Tensor | None = None
    num_logprobs: dict[int, int] = field(default_factory=dict)
    logprobs: Logprobs | None = None
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)
    prefill_rows: list[int] = field(default_factory=list)
    prefill_failed: Tensor | None = None
    drafts: Tensor | None = None
    draft_rows: list[int] = field(default_factory=list)
    mode: str = "NONE"
    num_padding_tokens: int = 0
    encoder_time: EncoderTime | None = None
    _done: torch.cuda.Event | None = None

    def __post_init__(self) -> None:
        copies = [self.token_ids, self.prefill_failed, *(values.ranks for values in self.prompt_logprobs.values())]
        if any(copy is not None and copy.is_pinned() for copy in copies):
            self._done = torch.cuda.Event()
            self._done.record()

    @property
    def is_done(self) -> bool:
        """True if ``result`` does not have to wait."""
        return self._done is None or self._done.query()

    def result(self) -> ModelOutput:
        """Wait until the results are on the host."""
        if self._done is not None:
            self._done.synchronize()
        prompt_logprobs = {row: _entries(values) for row, values in self.prompt_logprobs.items()}
        rows, token_ids, failed = self.rows, self.token_ids, self.failed
        if self.counted is not None and token_ids is not None and failed is not None:
            rows, token_ids, failed = _where(self.counted, rows), token_ids[self.counted], failed[self.counted]
        return ModelOutput(
            self.step,
            rows,
            token_ids.tolist() if token_ids is not None else [],
            self._logprobs(),
            prompt_logprobs,
            _where(failed, rows) + _where(self.prefill_failed, self.prefill_rows),
            self.mode,
            self.num_padding_tokens,
            self._drafts(),
            self.encoder_time.seconds() if self.encoder_time is not None else 0.0,
        )

    def _drafts(self) -> dict[int, list[int]]:
        """By row; nothing for a row for which none was found."""
        if self.drafts is None:
            return {}
        by_row = zip(self.draft_rows, self.drafts.tolist(), strict=True)
        return {row: drafts for row, drafts in by_row if drafts and drafts[0] != NO_DRAFT}

    def _logprobs(self) -> dict[int, list[TokenLogprobs]]:
        if self.logprobs is None:
            return {}
        counted = self.counted.tolist() if self.counted is not None else None
        by_row: dict[int, list[TokenLogprobs]] = {}
        for (place, count), entry in zip(self.num_logprobs.items(), _entries(self.logprobs), strict=True):
            if counted is None or counted[place]:
                by_row.setdefault(self.rows[place], []).append(_first(entry, count))
        return by_row


def _where(flags: Tensor | None, rows: list[int]) -> list[int]:
    """The rows whose flag is set; none if there are no flags."""
    return [row for row, flag in zip(rows, flags.tolist(), strict=True) if flag] if flags is not None else []


def _first(entry: TokenLogprobs, top_n: int) -> TokenLogprobs:
    """The entry with only ``top_n`` alternatives (the batch may have computed more for another row)."""
    return TokenLogprobs(entry.token_ids[: top_n + 1], entry.logprobs[: top_n + 1], entry.rank)


def pending_step(
    scheduler_output: SchedulerOutput,
    sampled: SampledTokens | None,
    prompt_logprobs: Mapping[int, Logprobs] | None = None,
    prefill_failed: Tensor | None = None,
    drafts: Tensor | None = None,
) -> PendingStep:
    """Start the copies of a step's results to the host.

    Args:
        sampled: None if no row samples.
        prompt_logprobs: see ``prompt_logprobs_of``.
        prefill_failed: see ``failed_prefills``.
        drafts: from ``Drafter``.
    """
    logprobs = sampled.logprobs if sampled is not None else None
    acceptance = sampled.acceptance if sampled is not None else None
    return PendingStep(
        scheduler_output.step,
        sampled.rows if sampled is not None else [],
        token_ids=to_host(sampled.token_ids) if sampled is not None else None,
        failed=to_host(sampled.nan_rows) if sampled is not None else None,
        counted=to_host(acceptance.counted) if acceptance is not None else None,
        num_logprobs=sampled.num_logprobs if sampled is not None else {},
        logprobs=logprobs_to_host(logprobs) if logprobs is not None else None,
        prompt_logprobs=dict(prompt_logprobs or {}),
        prefill_rows=[r.row for r in scheduler_output.requests if not r.samples],
        prefill_failed=to_host(prefill_failed) if prefill_failed is not None else None,
        drafts=to_host(drafts) if drafts is not None else None,
        draft_rows=[r.row for r in scheduler_output.requests if r.samples] if drafts is not None else [],
    )


def failed_prefills(scheduler_output: SchedulerOutput, hidden_states: Tensor) -> Tensor | None:
    """``[N] bool``: is the hidden state of the last token NaN or infinite, for each row that does not sample?

    The last token reads all KV and every state of its sequence: if one of them is NaN, so is what it computes. A NaN
    token spoils what comes before it in its step too (a weight of zero times NaN), so all that the step stored for the
    row is worthless. Rows that sample are judged by their logits.

    Args:
        hidden_states: ``[T, hidden_size]`` of the step's tokens.

    Returns:
        None if every row samples.
    """
    ends = itertools.accumulate(request.num_tokens for request in scheduler_output.requests)
    last = [end - 1 for end, request in zip(ends, scheduler_output.requests, strict=True) if not request.samples]
    if not last:
        return None
    indices = to_device(torch.tensor(last), hidden_states.device)
    return hidden_states.index_select(0, indices).isfinite().all(-1).logical_not()


def _num_prompt_logprobs(request: ScheduledRequest, rows: RowTable) -> int:
    """Tokens of its prompt that follow the ones run in this step."""
    stop = min(request.start + request.num_tokens + 1, int(rows.num_prompt_tokens[request.row]))
    return max(0, stop - request.start - 1)


def wants_prompt_logprobs(scheduler_output: SchedulerOutput, rows: RowTable) -> bool:
    """Whether ``prompt_logprobs_of`` reads hidden states of the step."""
    table = rows.prompt_logprobs
    return bool(table) and any(r.row in table and _num_prompt_logprobs(r, rows) for r in scheduler_output.requests)


def prompt_logprobs_of(
    scheduler_output: SchedulerOutput, hidden_states: Tensor, compute_logits: Callable[[Tensor], Tensor], rows: RowTable
) -> dict[int, Logprobs]:
    """Log probabilities of the prompt tokens that follow the ones run in this step, for the rows that ask.

    Args:
        hidden_states: ``[T, hidden_size]`` of the step's tokens.
        compute_logits: ``[N, hidden_size] -> [N, V]``.
    """
    result: dict[int, Logprobs] = {}
    if not rows.prompt_logprobs:
        return result
    start = 0
    for request in scheduler_output.requests:
        wanted = rows.prompt_logprobs.get(request.row)
        count = _num_prompt_logprobs(request, rows)
        if wanted is not None and count > 0:
            first = request.start + 1
            targets = torch.from_numpy(rows.known_tokens(request.row, first, first + count))
            logits = compute_logits(hidden_states[start : start + count])
            targets = targets.long().to(hidden_states.device)
            result[request.row] = logprobs_to_host(logprobs_of(logits, targets, wanted))
        start += request.num_tokens
    return result
