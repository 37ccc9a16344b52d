"""The sampled tokens of one step: all rows at once, and once more those whose logits are edited first.

Job: sample what a graph has not sampled, sample again only the rows with penalties, masks and the like, and compute log
probabilities of the rows that want them. Owns: the order of this. Does not know: how a token is chosen, requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from weft.layers.sampler import Logprobs, Sampler, SamplerOutput, logprobs_of
from weft.messages import ScheduledRequest
from weft.ops.drafts.types import NO_DRAFT
from weft.runner.batch_builder import BatchBuilder
from weft.runner.buffers import device_ints
from weft.runner.rows import RowTable
from weft.runner.sampling_state import SamplingInputs
from weft.runner.step_functions import SampledLogits
from weft.speculation.acceptance import Acceptance, RejectionSampler, accept


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What was sampled at M positions.

    Attributes:
        rows: whose they are, in order; a row with drafts has several.
        token_ids: ``[M]`` int64.
        nan_rows: ``[M]`` bool, as in ``SamplerOutput``.
        acceptance: which of them are the sequences'; None if all are, because there were no drafts.
        num_logprobs: place among the M -> how many alternatives its row asked for.
        drafts: ``[S, K]`` int64, what was drafted in the step's graph; None if nothing is drafted on the device, or if
            tokens were sampled again, of which the graph knew nothing.
        logprobs: of the places in ``num_logprobs``, in that order; of the model's own distribution, before any edit.
    """

    rows: list[int]
    token_ids: Tensor
    nan_rows: Tensor
    acceptance: Acceptance | None = None
    drafts: Tensor | None = None
    num_logprobs: dict[int, int] = field(default_factory=dict)
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class StepSampler:
    """Samples the tokens of steps and remembers them for the next ones. All fields are the runner's."""

    sampler: Sampler
    inputs: SamplingInputs
    builder: BatchBuilder
    rows: RowTable
    rejection_sampler: RejectionSampler

    def __call__(
        self, logits: Tensor, sampled: Sequence[ScheduledRequest], replayed: SampledLogits | None = None
    ) -> SampledTokens:
        """One token for each of ``sampled``, from ``sampled_positions``.

        Args:
            logits: ``[M or more, V]``, rows in the order of ``sampled``.
            replayed: what a graph has sampled of these logits, without edits, and remembered.
        """
        count, edited = len(sampled), self.inputs.edited(sampled)
        rows = [request.row for request in sampled]
        if replayed is not None and not edited:
            tokens = self._as_replayed(rows, replayed)
        else:
            result = self._sample(logits[:count], sampled, edited, replayed.result if replayed is not None else None)
            tokens = SampledTokens(rows, result.token_ids, result.nan_rows)
        if tokens.acceptance is None and self.builder.num_drafts:
            tokens = self._accept_drafts(sampled, tokens)
        counted = tokens.acceptance.counted if tokens.acceptance is not None else None
        self.inputs.record(sampled, tokens.token_ids, counted)
        wanted = self.inputs.num_logprobs(sampled)
        if not wanted:
            return tokens
        return replace(tokens, num_logprobs=wanted, logprobs=self._logprobs(logits[:count], tokens.token_ids, wanted))

    def _as_replayed(self, rows: list[int], replayed: SampledLogits) -> SampledTokens:
        """What a graph leaves, without its padding."""
        count, acceptance, drafts = len(rows), replayed.acceptance, replayed.drafts
        result, num_requests = replayed.result, count
        if acceptance is not None:
            num_requests = count // (len(result.token_ids) // len(acceptance.last))
            acceptance = acceptance.leading(num_requests, count)
        drafts = drafts[:num_requests] if drafts is not None else None
        return SampledTokens(rows, result.token_ids[:count], result.nan_rows[:count], acceptance, drafts)

    def _logprobs(self, logits: Tensor, token_ids: Tensor, wanted: dict[int, int]) -> Logprobs:
        top_n = max(wanted.values())
        if len(wanted) == len(token_ids):
            return logprobs_of(logits, token_ids, top_n)
        places = self._places(list(wanted))
        return logprobs_of(logits.index_select(0, places), token_ids.index_select(0, places), top_n)

    def _accept_drafts(self, sampled: Sequence[ScheduledRequest], tokens: SampledTokens) -> SampledTokens:
        """With what became of the drafts, if there are any; each row's last token that counts is remembered."""
        if not any(request.draft_token_ids for request in sampled):
            return tokens
        following = [after.draft_token_ids[-1:] for after in sampled[1:]] + [[]]
        drafts = self._places([draft[0] if draft else NO_DRAFT for draft in following])
        first = [i for i, request in enumerate(sampled) if not request.draft_token_ids]
        samples = self.builder.sample_rows(len(sampled))
        token_ids, is_right = self.rejection_sampler(tokens.token_ids, drafts, samples.seeds, samples.positions)
        acceptance = accept(is_right, self._places(first))
        rows = self._places([sampled[i].row for i in first])
        self.rows.set_last_tokens(rows, token_ids.index_select(0, acceptance.last))
        return replace(tokens, token_ids=token_ids, acceptance=acceptance)

    def _sample(
        self, logits: Tensor, sampled: Sequence[ScheduledRequest], edited: list[int], replayed: SamplerOutput | None
    ) -> SamplerOutput:
        count, samples = len(sampled), self.builder.sample_rows(len(sampled))
        if len(edited) == count:
            result = self.sampler(logits, self.inputs.build(sampled, samples))
        else:
            if replayed is None:
                result = self.sampler(logits, self.inputs.plain(sampled, samples))
            else:
                result = SamplerOutput(replayed.token_ids[:count], replayed.nan_rows[:count])
            if edited:
                places = self._places(edited)
                batch = self.inputs.build([sampled[i] for i in edited], samples.select(places))
                again = self.sampler(logits.index_select(0, places), batch)
                result = SamplerOutput(
                    result.token_ids.index_copy(0, places, again.token_ids),
                    result.nan_rows.index_copy(0, places, again.nan_rows),
                )
        self.rows.set_last_tokens(samples.rows, result.token_ids)
        return result

    def _places(self, indices: Sequence[int]) -> Tensor:
        return device_ints(indices, self.rows.last_token.device)
