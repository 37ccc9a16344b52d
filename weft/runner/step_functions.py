"""The functions that full graphs capture: a decode step, the forward pass of any batch, and sampling.

Job: run each of them for a padded size, from the static step buffers, with device work only, so that a graph of it
serves every batch that fits. Owns: the order of the work. Does not know: graphs, requests, which size a batch runs in.

A decode step is one graph, from the packed inputs to the sampled token. In a batch with prefill only the sequences
whose prompt ends in the step sample a token, which are mostly few; so it runs as two graphs, one sized by its tokens
and one by its samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from weft.forward_context import Batch, ForwardContext, forward_context
from weft.layers.sampler import Sampler, SamplerOutput
from weft.models.decoder import CausalLM
from weft.runner.batch_builder import BatchBuilder
from weft.runner.drafts import Drafter
from weft.runner.rows import RowTable
from weft.runner.sampling_state import SamplingInputs
from weft.runner.step_inputs import SampleRows, StepInputs, StepShape
from weft.speculation.acceptance import Acceptance, RejectionSampler


class SampledLogits(NamedTuple):
    """What a full graph leaves on the device.

    Attributes:
        logits: ``[N, V]``.
        result: the sampled tokens.
        acceptance: which of them count; None if all do.
        hidden_states: ``[T, hidden_size]``, kept where drafts are made on the device; otherwise None.
        drafts: ``[S, K]`` int64, for every sequence; None if nothing is drafted on the device.
    """

    logits: Tensor
    result: SamplerOutput
    acceptance: Acceptance | None = None
    hidden_states: Tensor | None = None
    drafts: Tensor | None = None


@dataclass(slots=True)
class StepFunctions:
    """The functions that a runner's full graphs capture.

    Attributes:
        context: from a batch to its forward context.
        max_num_seqs, max_model_len: what a graph must be able to serve.
        hidden: ``[T, hidden_size]``, static memory for the hidden states of the largest captured forward pass.
        drafter: makes drafts for the next step, if the engine has some made.
        The others: the runner's.
    """

    model: CausalLM
    builder: BatchBuilder
    rows: RowTable
    sampler: Sampler
    sampling: SamplingInputs
    drafter: Drafter | None
    rejection_sampler: RejectionSampler
    context: Callable[[Batch], ForwardContext]
    max_num_seqs: int
    max_model_len: int
    hidden: Tensor
    _compiled: Callable[..., Tensor] | None = None
    _max_compiled: int = 0

    def pad(self, shape: StepShape) -> None:
        """Put padding of the given sizes into the step buffers."""
        self.builder.send_padding(shape)

    def decode_shape(self, size: int) -> StepShape:
        return StepShape.decodes(size, self.max_model_len)

    def query_len(self, size: int) -> int:
        """Tokens of each of ``size`` sequences that verify drafts."""
        return 1 + self.builder.num_drafts_at(size)

    def verification_shape(self, size: int) -> StepShape:
        return StepShape.verification(size, self.query_len(size), self.max_model_len)

    def mixture_shape(self, num_tokens: int) -> StepShape:
        return self.builder.mixture_shape(num_tokens, self.max_model_len)

    def pieces_context(self, num_tokens: int) -> ForwardContext:
        """The forward context in which pieces of ``num_tokens`` tokens are captured."""
        return self.context(self.builder.materialise(self.mixture_shape(num_tokens)).batch)

    def compile_decodes(
        self, compile_model: Callable[[ForwardContext, int], Callable[..., Tensor]], max_size: int
    ) -> None:
        """Compile the model for decode steps of up to ``max_size`` rows. Later decode steps run the compiled model."""
        batch = self.builder.materialise(self.decode_shape(min(max_size, self.max_num_seqs))).batch
        self._compiled = compile_model(self.context(batch), batch.num_tokens)
        self._max_compiled = max_size

    def decode(self, size: int) -> SampledLogits:
        """The whole decode step of ``size`` rows, with drafts for the next one."""
        inputs = self.builder.materialise(self.decode_shape(size))
        model = self._compiled if self._compiled is not None and size <= self._max_compiled else self.model
        with forward_context(self.context(inputs.batch)):
            hidden_states = model(input_ids=inputs.input_ids)
        sampled = self._sample(hidden_states, inputs.samples)
        return self._with_drafts(sampled, inputs, hidden_states)

    def verify(self, size: int) -> SampledLogits:
        """The step of ``size`` sequences that verify drafts: a token for every position, which of them count, and
        drafts for the next step."""
        inputs = self.builder.materialise(self.verification_shape(size))
        with forward_context(self.context(inputs.batch)):
            hidden_states = self.model(inputs.input_ids)
        logits = self.model.compute_logits(hidden_states)
        result = self.sampler(logits, self.sampling.any_row(inputs.samples))
        samples = inputs.samples
        sampled = (result.token_ids, inputs.input_ids, samples.seeds, samples.positions, samples.rows)
        token_ids, acceptance = self.rejection_sampler.accept_alike(*sampled, self.query_len(size), self.rows.state)
        result = replace(result, token_ids=token_ids)
        return self._with_drafts(SampledLogits(logits, result, acceptance), inputs, hidden_states)

    def _with_drafts(self, sampled: SampledLogits, inputs: StepInputs, hidden_states: Tensor) -> SampledLogits:
        if self.drafter is None:
            return sampled
        drafts = self.drafter.after_full_step(inputs, hidden_states, sampled.result.token_ids, sampled.acceptance)
        return sampled._replace(hidden_states=hidden_states, drafts=drafts)

    def forward(self, num_tokens: int) -> Tensor:
        """The forward pass of ``num_tokens`` tokens of any sequences: ``[num_tokens, hidden_size]``, kept. Where rows
        are selected, what stands in the others is arbitrary."""
        shape = self.mixture_shape(num_tokens)
        inputs = self.builder.materialise(shape, selects_rows=self.builder.selects_rows(shape))
        with forward_context(self.context(inputs.batch)):
            hidden_states = self.model(inputs.input_ids)
        rows = inputs.batch.logits_rows
        if rows is None:
            return self.keep(hidden_states)
        return self.hidden[:num_tokens].index_copy_(0, rows.indices, hidden_states)

    def keep(self, hidden_states: Tensor) -> Tensor:
        """Leave ``[T, hidden_size]`` where ``sample`` finds it. Returns that memory."""
        return self.hidden[: hidden_states.shape[0]].copy_(hidden_states)

    def sample(self, size: int) -> SampledLogits:
        """Sample ``size`` tokens from the kept hidden states."""
        samples = self.builder.sample_rows(size)
        return self._sample(self.hidden.index_select(0, samples.indices), samples)

    def _sample(self, hidden_states: Tensor, samples: SampleRows) -> SampledLogits:
        logits = self.model.compute_logits(hidden_states)
        result = self.sampler(logits, self.sampling.any_row(samples))
        self.rows.set_last_tokens(samples.rows, result.token_ids)
        return SampledLogits(logits, result)
