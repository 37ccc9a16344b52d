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


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What N sequences sampled.

    Attributes:
        token_ids: ``[N]`` int64.
        nan_rows: ``[N]`` bool, as in ``SamplerOutput``.
        num_logprobs: row -> how many alternatives it asked for.
        logprobs: of the rows in ``num_logprobs``, in that order; of the model's own distribution, before any edit.
    """

    token_ids: Tensor
    nan_rows: Tensor
    num_logprobs: dict[int, int] = field(default_factory=dict)
    logprobs: Logprobs | None = None


class StepSampler:
    """Samples the tokens of steps and remembers them for the next ones. All arguments are the runner's."""

    def __init__(self, sampler: Sampler, inputs: SamplingInputs, builder: BatchBuilder, rows: RowTable) -> None:
        self._sampler, self._inputs, self._builder, self._rows = sampler, inputs, builder, rows

    def __call__(
        self, logits: Tensor, sampled: Sequence[ScheduledRequest], replayed: SamplerOutput | None = None
    ) -> SampledTokens:
        """One token for each of the N requests ``sampled``.

        Args:
            logits: ``[N or more, V]``, rows in the order of ``sampled``.
            replayed: what a graph has sampled of these logits, without edits, and remembered.
        """
        count, edited = len(sampled), self._inputs.edited(sampled)
        if replayed is not None and not edited:
            token_ids, nan_rows = replayed.token_ids[:count], replayed.nan_rows[:count]
        else:
            result = self._sample(logits[:count], sampled, edited, replayed)
            token_ids, nan_rows = result.token_ids, result.nan_rows
        self._inputs.record(sampled, token_ids)
        wanted = self._inputs.num_logprobs(sampled)
        if not wanted:
            return SampledTokens(token_ids, nan_rows)
        top_n = max(wanted.values())
        if len(wanted) == count:
            return SampledTokens(token_ids, nan_rows, wanted, logprobs_of(logits[:count], token_ids, top_n))
        places = self._places([i for i, request in enumerate(sampled) if request.row in wanted])
        logprobs = logprobs_of(logits.index_select(0, places), token_ids.index_select(0, places), top_n)
        return SampledTokens(token_ids, nan_rows, wanted, logprobs)

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

    def _places(self, indices: list[int]) -> Tensor:
        return to_device(torch.tensor(indices, dtype=torch.int64), self._rows.last_token.device)
