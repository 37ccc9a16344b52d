"""The sampled tokens of one step: all rows at once, and once more those whose logits are edited first.

Job: sample what a graph has not sampled, sample again only the rows with penalties, masks and the like, and compute log
probabilities of the rows that want them. Owns: the order of this. Does not know: how a token is chosen, requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.layers.sampler import Logprobs, Sampler, SamplerOutput, logprobs_of
from weft.messages import ScheduledRequest
from weft.runner.batch_builder import BatchBuilder
from weft.runner.buffers import to_device
from weft.runner.rows import RowTable
from weft.runner.sampling_inputs import SamplingInputs
from weft.speculation.acceptance import NO_DRAFT, Acceptance, accept


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What was sampled at M positions.

    Attributes:
        rows: whose they are, in order; a row with drafts has several.
        token_ids: ``[M]`` int64.
        nan_rows: ``[M]`` bool, as in ``SamplerOutput``.
        acceptance: which of them are the sequences'; None if all are, because there were no drafts.
        num_logprobs: place among the M -> how many alternatives its row asked for.
        logprobs: of the places in ``num_logprobs``, in that order; of the model's own distribution, before any edit.
    """

    rows: list[int]
    token_ids: Tensor
    nan_rows: Tensor
    acceptance: Acceptance | None = None
    num_logprobs: dict[int, int] = field(default_factory=dict)
    logprobs: Logprobs | None = None


class StepSampler:
    """Samples the tokens of steps and remembers them for the next ones. All arguments are the runner's."""

    def __init__(self, sampler: Sampler, inputs: SamplingInputs, builder: BatchBuilder, rows: RowTable) -> None:
        self._sampler, self._inputs, self._builder, self._rows = sampler, inputs, builder, rows

    def __call__(
        self, logits: Tensor, sampled: Sequence[ScheduledRequest], replayed: SamplerOutput | None = None
    ) -> SampledTokens:
        """One token for each of ``sampled``, from ``sampled_positions``.

        Args:
            logits: ``[M or more, V]``, rows in the order of ``sampled``.
            replayed: what a graph has sampled of these logits, without edits, and remembered.
        """
        count, edited = len(sampled), self._inputs.edited(sampled)
        if replayed is not None and not edited:
            token_ids, nan_rows = replayed.token_ids[:count], replayed.nan_rows[:count]
        else:
            result = self._sample(logits[:count], sampled, edited, replayed)
            token_ids, nan_rows = result.token_ids, result.nan_rows
        acceptance = self._accept_drafts(sampled, token_ids)
        self._inputs.record(sampled, token_ids, acceptance.counted if acceptance is not None else None)
        rows, wanted = [request.row for request in sampled], self._inputs.num_logprobs(sampled)
        if not wanted:
            return SampledTokens(rows, token_ids, nan_rows, acceptance)
        top_n = max(wanted.values())
        if len(wanted) == count:
            logprobs = logprobs_of(logits[:count], token_ids, top_n)
        else:
            places = self._places(list(wanted))
            logprobs = logprobs_of(logits.index_select(0, places), token_ids.index_select(0, places), top_n)
        return SampledTokens(rows, token_ids, nan_rows, acceptance, wanted, logprobs)

    def _accept_drafts(self, sampled: Sequence[ScheduledRequest], token_ids: Tensor) -> Acceptance | None:
        """Which of ``token_ids [M]`` count; each row's last one of these is remembered. None without drafts."""
        if not (self._builder.num_drafts and any(request.draft_token_ids for request in sampled)):
            return None
        following = [after.draft_token_ids[-1:] for after in sampled[1:]] + [[]]
        drafts = [draft[0] if draft else NO_DRAFT for draft in following]
        first = [i for i, request in enumerate(sampled) if not request.draft_token_ids]
        acceptance = accept(token_ids, self._places(drafts), self._places(first))
        rows = self._places([sampled[i].row for i in first])
        self._rows.set_last_tokens(rows, token_ids.index_select(0, acceptance.last))
        return acceptance

    def _sample(
        self, logits: Tensor, sampled: Sequence[ScheduledRequest], edited: list[int], replayed: SamplerOutput | None
    ) -> SamplerOutput:
        count, samples = len(sampled), self._builder.sample_rows(len(sampled))
        if len(edited) == count:
            result = self._sampler(logits, self._inputs.build(sampled, samples))
        else:
            if replayed is None:
                result = self._sampler(logits, self._inputs.plain(sampled, samples))
            else:
                result = SamplerOutput(replayed.token_ids[:count], replayed.nan_rows[:count])
            if edited:
                places = self._places(edited)
                batch = self._inputs.build([sampled[i] for i in edited], samples.select(places))
                again = self._sampler(logits.index_select(0, places), batch)
                result = SamplerOutput(
                    result.token_ids.index_copy(0, places, again.token_ids),
                    result.nan_rows.index_copy(0, places, again.nan_rows),
                )
        self._rows.set_last_tokens(samples.rows, result.token_ids)
        return result

    def _places(self, indices: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(indices, dtype=torch.int64), self._rows.last_token.device)
