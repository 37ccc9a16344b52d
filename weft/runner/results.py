"""A step's results on their way to the host.

Job: start copies without waiting, and turn them into a ``ModelOutput`` when asked. Owns: the host copies and the event
that says when they are complete. Does not know: how tokens were chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.layers.sampler import Logprobs, SamplerOutput, logprobs_of
from weft.messages import ModelOutput, ScheduledRequest, SchedulerOutput, TokenLogprobs
from weft.runner.rows import RowTable


def to_host(tensor: Tensor) -> Tensor:
    """Start copying ``tensor`` to the host; valid once an event recorded after this call has passed.

    On the CPU this is a real copy too: the original may be a static buffer that the next step overwrites.
    """
    if tensor.device.type == "cpu":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


@dataclass(frozen=True, slots=True)
class HostLogprobs:
    """Log probabilities on the host, of N positions; see ``Logprobs``."""

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor

    @classmethod
    def fetch(cls, logprobs: Logprobs) -> HostLogprobs:
        """Start copying them."""
        return cls(to_host(logprobs.token_ids), to_host(logprobs.logprobs), to_host(logprobs.ranks))

    def entries(self) -> list[TokenLogprobs]:
        columns = (self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist())
        return [TokenLogprobs(ids, values, rank) for ids, values, rank in zip(*columns, strict=True)]


@dataclass(slots=True)
class PendingStep:
    """A launched step.

    Attributes:
        step: its number.
        rows: rows that sampled, in batch order.
        token_ids, failed: ``[len(rows)]`` on the host; None if nothing was sampled.
        logprobs: of the sampled tokens, if any row asked.
        num_logprobs: row -> how many alternatives it asked for.
        prompt_logprobs: row -> those of its prompt tokens.
        mode: how the step runs (NONE, PIECEWISE, FULL).
        num_padding_tokens: rows that it computes for nobody.
    """

    step: int
    rows: list[int]
    token_ids: Tensor | None = None
    failed: Tensor | None = None
    logprobs: HostLogprobs | None = None
    num_logprobs: dict[int, int] = field(default_factory=dict)
    prompt_logprobs: dict[int, HostLogprobs] = field(default_factory=dict)
    mode: str = "NONE"
    num_padding_tokens: int = 0
    _done: torch.cuda.Event | None = None

    def __post_init__(self) -> None:
        copies = [self.token_ids, *(values.ranks for values in self.prompt_logprobs.values())]
        if any(copy is not None and copy.is_pinned() for copy in copies):
            self._done = torch.cuda.Event()
            self._done.record()

    def result(self) -> ModelOutput:
        """Wait until the results are on the host."""
        if self._done is not None:
            self._done.synchronize()
        prompt_logprobs = {row: values.entries() for row, values in self.prompt_logprobs.items()}
        failed = self.failed.tolist() if self.failed is not None else []
        return ModelOutput(
            self.step,
            self.rows,
            self.token_ids.tolist() if self.token_ids is not None else [],
            self._logprobs(),
            prompt_logprobs,
            [row for row, bad in zip(self.rows, failed, strict=True) if bad],
            self.mode,
            self.num_padding_tokens,
        )

    def _logprobs(self) -> dict[int, TokenLogprobs]:
        if self.logprobs is None:
            return {}
        entries = dict(zip(self.rows, self.logprobs.entries(), strict=True))
        return {row: _first(entries[row], count) for row, count in self.num_logprobs.items()}


def _first(entry: TokenLogprobs, top_n: int) -> TokenLogprobs:
    """The entry with only ``top_n`` alternatives (the batch may have computed more for another row)."""
    return TokenLogprobs(entry.token_ids[: top_n + 1], entry.logprobs[: top_n + 1], entry.rank)


def pending_step(
    number: int,
    sampled: Sequence[ScheduledRequest],
    result: SamplerOutput,
    rows: RowTable,
    prompt_logprobs: Mapping[int, HostLogprobs] | None = None,
) -> PendingStep:
    """Start the copies of what ``sampled`` drew to the host."""
    wanted = {r.row: n for r in sampled if (n := rows.sampling(r.row).logprobs) is not None}
    return PendingStep(
        number,
        [r.row for r in sampled],
        token_ids=to_host(result.token_ids),
        failed=to_host(result.nan_rows),
        logprobs=HostLogprobs.fetch(result.logprobs) if result.logprobs is not None else None,
        num_logprobs=wanted,
        prompt_logprobs=dict(prompt_logprobs or {}),
    )


def prompt_logprobs_of(
    orders: SchedulerOutput, hidden_states: Tensor, compute_logits: Callable[[Tensor], Tensor], rows: RowTable
) -> dict[int, HostLogprobs]:
    """Log probabilities of the prompt tokens that follow the ones run in this step, for the rows that ask.

    Args:
        hidden_states: ``[T, hidden_size]`` of the step's tokens.
        compute_logits: ``[N, hidden_size] -> [N, V]``.
    """
    result: dict[int, HostLogprobs] = {}
    start = 0
    for order in orders.requests:
        wanted = rows.sampling(order.row).prompt_logprobs
        stop = min(order.start + order.num_tokens + 1, rows.num_prompt_tokens(order.row))
        count = stop - order.start - 1
        if wanted is not None and count > 0:
            targets = torch.from_numpy(rows.known_tokens(order.row, order.start + 1, stop))
            logits = compute_logits(hidden_states[start : start + count])
            targets = targets.long().to(hidden_states.device)
            result[order.row] = HostLogprobs.fetch(logprobs_of(logits, targets, wanted))
        start += order.num_tokens
    return result
