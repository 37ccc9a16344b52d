"""Sampling: the tokens of one step, from its logits.

Job: sample what a graph has not sampled, sample again only the rows with penalties, masks and the like, and compute log
probabilities for the rows that want them. The functions that graphs capture sample here too. Owns: the
order of this, and the rows' sampling state. Does not know: how a token is chosen, requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from weft.config import EngineConfig
from weft.layers.sampler import Logprobs, Sampler, SamplerOutput, logprobs_of, processed_logits
from weft.messages import ScheduledRequest
from weft.ops.backend import Backend
from weft.runner.batch_builder import BatchBuilder
from weft.runner.buffers import device_ints
from weft.runner.drafting.acceptance import Acceptance, sampled_positions
from weft.runner.drafting.step_drafts import StepDrafts
from weft.runner.rows import RowTable
from weft.runner.sampling.state import NO_EDITS, SamplingState, StepEdits
from weft.runner.step_inputs import SamplingTensors, StepInputs


class FullStepOutput(NamedTuple):
    """Device tensors of a captured function that samples.

    Attributes:
        logits: ``[N, V]``.
        acceptance: which of them count; None if all do.
        hidden_states: ``[T, hidden_size]``, kept where drafts are made on the device; otherwise None.
        drafts: ``[S, K]`` int64, for every sequence; None if nothing is drafted on the device.
    """

    logits: Tensor
    result: SamplerOutput
    acceptance: Acceptance | None = None
    hidden_states: Tensor | None = None
    drafts: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens sampled at M positions of a step.

    Attributes:
        rows: the row of each position, in order; a row with drafts has several.
        token_ids: ``[M]`` int64.
        nan_rows: ``[M]`` bool, as in ``SamplerOutput``.
        acceptance: which tokens are the sequences'; None if all are, because there were no drafts.
        num_logprobs: place among the M -> how many alternatives its row asked for.
        drafts: ``[S or more, K]`` int64, drafted in the step's graph, padding included. None if nothing is drafted on
            the device, or if tokens were sampled again after the graph.
        logprobs: of the places in ``num_logprobs``, in that order; see ``EngineConfig.logprobs_mode``.
    """

    rows: list[int]
    token_ids: Tensor
    nan_rows: Tensor
    acceptance: Acceptance | None = None
    drafts: Tensor | None = None
    num_logprobs: dict[int, int] = field(default_factory=dict)
    logprobs: Logprobs | None = None


class StepSampler:
    """Samples the tokens of steps and stores each row's last token for the next step.

    Args:
        builder, rows, drafts: the runner's.
    """

    def __init__(
        self,
        config: EngineConfig,
        builder: BatchBuilder,
        rows: RowTable,
        drafts: StepDrafts | None,
        backend: Backend,
    ) -> None:
        self._builder, self._rows, self._drafts = builder, rows, drafts
        self._device = rows.last_token.device
        self._sampler = Sampler(backend)
        self._reports_processed = config.logprobs_mode == "processed_logprobs"
        self.state = SamplingState(rows, config.model_config.vocab_size, self._device)

    def sample_any(self, logits: Tensor, samples: SamplingTensors) -> FullStepOutput:
        """Sample for rows whose parameters only the device knows, and store the tokens."""
        result = self._sampler(logits, self.state.any_row(samples))
        self._rows.set_last_tokens(samples.rows, result.token_ids)
        return FullStepOutput(logits, result)

    def sample_whole(self, logits: Tensor, inputs: StepInputs) -> FullStepOutput:
        """Sample for every sequence of a step. If the sequences verify drafts, sample at each of their positions, and
        accept or reject the drafts."""
        if inputs.batch.verification is None:
            return self.sample_any(logits, inputs.samples)
        assert self._drafts is not None
        result = self._sampler(logits, self.state.any_row(inputs.samples))
        token_ids, acceptance = self._drafts.accept_alike(result.token_ids, inputs)
        return FullStepOutput(logits, replace(result, token_ids=token_ids), acceptance)

    def sample(
        self,
        logits: Tensor,
        requests: Sequence[ScheduledRequest],
        samples: SamplingTensors | None = None,
        replayed: FullStepOutput | None = None,
        edits: StepEdits = NO_EDITS,
    ) -> StepTokens:
        """Sample a token at every position of ``requests`` that wants one.

        Args:
            logits: ``[M or more, V]``, a row per position, in order.
            samples: parameters of the positions; read from the builder's buffers if None.
            replayed: what a graph has sampled of these logits, without edits, and stored.
            edits: edits of this step besides those that rows ask for.
        """
        sampled = self._positions(requests, replayed, edits)
        count, edited = len(sampled), self.state.edited(sampled, edits)
        rows = [request.row for request in sampled]
        if replayed is not None and not edited:
            tokens = self._as_replayed(rows, replayed)
        else:
            before = replayed.result if replayed is not None else None
            samples = samples or self._builder.sampling_tensors(count)
            result = self._sample(logits[:count], sampled, samples, edited, before, edits)
            tokens = StepTokens(rows, result.token_ids, result.nan_rows)
        if tokens.acceptance is None and self._drafts is not None:  # a sampling graph alone accepts nothing
            found = self._drafts.accept(sampled, tokens.token_ids, samples or self._builder.sampling_tensors(count))
            if found is not None:
                tokens = replace(tokens, token_ids=found[0], acceptance=found[1])
        wanted = self.state.num_logprobs(sampled)
        if wanted:  # before the tokens count for penalties
            scores, chosen = self._scores(logits[:count], sampled, tokens.token_ids, list(wanted), samples, edits)
            tokens = replace(tokens, num_logprobs=wanted, logprobs=logprobs_of(scores, chosen, max(wanted.values())))
        counted = tokens.acceptance.counted if tokens.acceptance is not None else None
        self.state.record(sampled, tokens.token_ids, counted)
        return tokens

    def _positions(
        self, requests: Sequence[ScheduledRequest], replayed: FullStepOutput | None, edits: StepEdits
    ) -> Sequence[ScheduledRequest]:
        """Return a request for every position that samples, in order.

        Where a graph has verified drafts, the drafts before each position matter only if somebody's logits are edited.
        """
        if self._drafts is None:
            return [request for request in requests if request.samples]
        if replayed is not None and replayed.acceptance is not None and not self.state.edited(requests, edits):
            return [request for request in requests for _ in range(request.num_samples)]
        return sampled_positions(requests)

    def _as_replayed(self, rows: list[int], replayed: FullStepOutput) -> StepTokens:
        """Return what a graph has sampled, without its padding."""
        count, result, acceptance = len(rows), replayed.result, replayed.acceptance
        if acceptance is not None:
            query_len = len(result.token_ids) // len(acceptance.last)
            acceptance = acceptance.leading(count // query_len, count)
        return StepTokens(rows, result.token_ids[:count], result.nan_rows[:count], acceptance, replayed.drafts)

    def _scores(
        self,
        logits: Tensor,
        sampled: Sequence[ScheduledRequest],
        token_ids: Tensor,
        wanted: list[int],
        samples: SamplingTensors | None,
        edits: StepEdits,
    ) -> tuple[Tensor, Tensor]:
        """Return the logits that log probabilities are of, and the tokens, at the wanted ones of the positions."""
        places = None
        if len(wanted) < len(sampled):
            places = self._places(wanted)
            logits, token_ids = logits.index_select(0, places), token_ids.index_select(0, places)
        if self._reports_processed:
            samples = samples or self._builder.sampling_tensors(len(sampled))
            own = samples if places is None else samples.select(places)
            metadata = self.state.with_edits([sampled[i] for i in wanted], own, edits)
            logits = processed_logits(logits, metadata, token_ids)
        return logits, token_ids

    def _sample(
        self,
        logits: Tensor,
        sampled: Sequence[ScheduledRequest],
        samples: SamplingTensors,
        edited: list[int],
        replayed: SamplerOutput | None,
        edits: StepEdits,
    ) -> SamplerOutput:
        count = len(sampled)
        if len(edited) == count:
            result = self._sampler(logits, self.state.with_edits(sampled, samples, edits))
        else:
            if replayed is None:
                result = self._sampler(logits, self.state.without_edits(sampled, samples))
            else:
                result = SamplerOutput(replayed.token_ids[:count], replayed.nan_rows[:count])
            if edited:
                places = self._places(edited)
                metadata = self.state.with_edits([sampled[i] for i in edited], samples.select(places), edits)
                again = self._sampler(logits.index_select(0, places), metadata)
                result = SamplerOutput(
                    result.token_ids.index_copy(0, places, again.token_ids),
                    result.nan_rows.index_copy(0, places, again.nan_rows),
                )
        self._rows.set_last_tokens(samples.rows, result.token_ids)
        return result

    def _places(self, indices: Sequence[int]) -> Tensor:
        return device_ints(indices, self._device)
