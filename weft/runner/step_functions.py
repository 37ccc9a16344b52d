"""The functions that full graphs capture: a whole step, the forward pass of any batch, and sampling.

Job: run a function for a padded size, from the static step buffers, with device work only: its graph serves every
batch that fits. Owns: the order of the work. Does not know: graphs, requests, which size a batch runs in.

A step in which every sequence decodes, or verifies equally many drafts, is one graph, from the packed inputs to the
sampled token. In a batch with prefill, only sequences whose prompt ends in the step sample a token, mostly few of them.
Such a batch runs as two graphs: the forward pass sized by tokens, the sampling by samples.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from weft.forward_context import Batch, ForwardContext, forward_context
from weft.graph.batch_descriptor import BatchDescriptor
from weft.models.decoder import CausalLM
from weft.runner.batch_builder import BatchBuilder
from weft.runner.drafting.step_drafts import StepDrafts
from weft.runner.sampling.step_sampler import FullStepOutput, StepSampler


@dataclass(slots=True)
class StepFunctions:
    """The functions that a runner's full graphs capture.

    Attributes:
        drafts: drafts of the runner's rows; None if the engine drafts nothing.
        context: from a batch to its forward context.
        max_num_seqs, max_model_len: the largest batch and the longest sequence that a graph serves.
        hidden: ``[T, hidden_size]``, static memory for the hidden states of the largest captured forward pass.
    """

    model: CausalLM
    builder: BatchBuilder
    sampler: StepSampler
    drafts: StepDrafts | None
    context: Callable[[Batch], ForwardContext]
    max_num_seqs: int
    max_model_len: int
    hidden: Tensor
    _compiled: Callable[..., Tensor] | None = None
    _max_compiled: int = 0

    def decode_shape(self, size: int) -> BatchDescriptor:
        return BatchDescriptor.decodes(size, self.max_model_len)

    def verification_shape(self, size: int) -> BatchDescriptor:
        assert self.drafts is not None
        return BatchDescriptor.verification(size, self.drafts.rules.query_len(size), self.max_model_len)

    def mixed_shape(self, num_tokens: int) -> BatchDescriptor:
        return self.builder.mixed_shape(num_tokens, self.max_model_len)

    def pieces_context(self, num_tokens: int) -> ForwardContext:
        """Return the forward context in which pieces of ``num_tokens`` tokens are captured."""
        return self.context(self.builder.materialise(self.mixed_shape(num_tokens)).batch)

    def compile_decodes(
        self, compile_model: Callable[[ForwardContext, int], Callable[..., Tensor]], max_size: int
    ) -> None:
        """Compile the model for decode steps of up to ``max_size`` rows. Later decode steps run the compiled model."""
        batch = self.builder.materialise(self.decode_shape(min(max_size, self.max_num_seqs))).batch
        self._compiled = compile_model(self.context(batch), batch.num_tokens)
        self._max_compiled = max_size

    def decode(self, size: int) -> FullStepOutput:
        """Run the whole decode step of ``size`` rows, with drafts for the next one."""
        compiled = self._compiled if size <= self._max_compiled else None
        return self._whole_step(compiled or self.model, self.decode_shape(size))

    def verify(self, size: int) -> FullStepOutput:
        """Run the whole step of ``size`` sequences that verify drafts, with drafts for the next one."""
        return self._whole_step(self.model, self.verification_shape(size))

    def _whole_step(self, model: Callable[..., Tensor], shape: BatchDescriptor) -> FullStepOutput:
        inputs = self.builder.materialise(shape)
        with forward_context(self.context(inputs.batch)):
            hidden_states = model(input_ids=inputs.input_ids)
        output = self.sampler.sample_whole(self.model.compute_logits(hidden_states), inputs)
        if self.drafts is None:
            return output
        drafts = self.drafts.after_full_step(inputs, hidden_states, output.result.token_ids, output.acceptance)
        return output._replace(hidden_states=hidden_states, drafts=drafts)

    def forward(self, num_tokens: int) -> Tensor:
        """Run the forward pass of ``num_tokens`` tokens of any sequences.

        Returns:
            ``[num_tokens, hidden_size]``, kept. Where rows are selected, the other rows are arbitrary.
        """
        shape = self.mixed_shape(num_tokens)
        inputs = self.builder.materialise(shape, selects_rows=self.builder.selects_rows(shape))
        with forward_context(self.context(inputs.batch)):
            hidden_states = self.model(inputs.input_ids)
        rows = inputs.batch.logits_rows
        if rows is None:
            return self.keep(hidden_states)
        return self.hidden[:num_tokens].index_copy_(0, rows.indices, hidden_states)

    def keep(self, hidden_states: Tensor) -> Tensor:
        """Copy ``[T, hidden_size]`` to where ``sample`` reads it. Returns that memory."""
        return self.hidden[: hidden_states.shape[0]].copy_(hidden_states)

    def sample(self, size: int) -> FullStepOutput:
        """Sample ``size`` tokens from the kept hidden states."""
        samples = self.builder.sampling_tensors(size)
        logits = self.model.compute_logits(self.hidden.index_select(0, samples.indices))
        return self.sampler.sample_any(logits, samples)
