"""The step runner: a scheduler output in, launched device work out.

Job: update rows, copy inside the caches, build the batch, run the forward pass (as a graph where one fits), sample.
Owns: rows, step buffers, memory for results, caches and graphs. Does not know: requests, why something is scheduled,
whose a page is; how the model was loaded or the caches were sized.

One step, in the order that ``messages.py`` promises:

1. Copy evicted entries to the host, encode images, free finished rows, add new rows, copy pages, fork states, and load
   the rows of images.
2. Lay the step out, choose a graph, build the batch.
3. Run the forward pass, sample, store the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace
from torch import Tensor

from weft.cache.plan import CachePlan
from weft.cache.spec import CacheSpec
from weft.config import EngineConfig
from weft.config.graph_modes import GraphMode
from weft.forward_context import Batch, ForwardContext, cache_tensors, forward_context
from weft.graph.batch_descriptor import BatchDescriptor
from weft.graph.dispatcher import Choice
from weft.layers.sampler import LogitsProcessor
from weft.messages import ScheduledRequest, SchedulerOutput
from weft.models.decoder import CausalLM
from weft.ops.backend import Backend
from weft.runner.batch_builder import BatchBuilder
from weft.runner.cache_copies import CacheCopier
from weft.runner.drafting.drafters import make_drafts
from weft.runner.drafting.step_drafts import DraftRules, RunStep
from weft.runner.logits_rows import spread
from weft.runner.media_inputs import MediaInputs
from weft.runner.memory import allocate_caches
from weft.runner.results import PendingStep, ResultMemory, pending_step
from weft.runner.rows import RowTable
from weft.runner.sampling.prompt_logprobs import prompt_logprobs_of, wants_prompt_logprobs
from weft.runner.sampling.state import NO_EDITS, StepEdits
from weft.runner.sampling.step_sampler import FullStepOutput, StepSampler, StepTokens
from weft.runner.step_functions import StepFunctions
from weft.runner.step_graphs import StepGraphs
from weft.runner.step_inputs import StepInputs
from weft.runner.step_layout import LayoutRules, StepLayout

if TYPE_CHECKING:
    from weft.runner.host_memory import HostMemory


class StepRunner:
    """Steps of one model over newly made caches.

    Args:
        layers: the model's, by name.
        spec, plan: of the caches.
        max_captured_tokens: of the largest forward pass that will be captured.
        media: of the model, if it reads images.
        host: memory of a tier below the device.

    Attributes:
        caches: by layer name.
        context: from a batch to its forward context.
        rows, drafts, builder, copier, sampler: what a step needs. ``drafts`` is None if the engine drafts nothing.
        functions: to capture.
        graphs: what was captured; none at first.
    """

    def __init__(
        self,
        model: CausalLM,
        layers: Mapping[str, Any],
        config: EngineConfig,
        spec: CacheSpec,
        plan: CachePlan,
        backend: Backend,
        max_captured_tokens: int,
        media: MediaInputs | None = None,
        host: HostMemory | None = None,
    ) -> None:
        self._model, self._media = model, media
        device, model_config = torch.device(config.device), config.model_config
        self.graphs = StepGraphs()
        self.caches = caches = allocate_caches(spec, plan, device)

        def context(batch: Batch) -> ForwardContext:
            # Not a method: those who hold it would hold this object too, whose memory would wait for the collector.
            return ForwardContext(batch, caches, layers)

        self.context = context
        self.copier = CacheCopier(spec.layers, caches, backend, device)
        self.transfers = host.transfers(spec, caches, device, backend) if host is not None else None
        self.rows = _row_table(config, spec, plan, device, reads_images=media is not None)
        self.drafts = make_drafts(config, model, self.rows, context, plan.max_model_len, backend)
        rules = LayoutRules(spec.has_states, DraftRules.of(config), reads_images=media is not None)
        self.builder = BatchBuilder(
            self.rows,
            rules,
            page_size=config.page_size,
            max_num_tokens=config.max_num_batched_tokens,
            max_num_seqs=plan.max_num_seqs,
            ends_sparse=model_config.is_sparse(model_config.num_hidden_layers - 1),
            device=device,
            drafts=self.drafts,
            backend=backend,
            first_media=(model_config.vocab_size, config.max_model_len) if media is not None else None,
        )
        self.sampler = StepSampler(config, self.builder, self.rows, self.drafts, backend)
        self._results = ResultMemory(plan.max_num_seqs * (1 + config.num_drafts), device, backend)
        dtype, shape = getattr(torch, config.dtype), (max_captured_tokens, model_config.output_size)
        self.functions = StepFunctions(
            model,
            self.builder,
            self.sampler,
            self.drafts,
            context,
            max_num_seqs=plan.max_num_seqs,
            max_model_len=plan.max_model_len,
            hidden=torch.zeros(shape, dtype=dtype, device=device),
        )

    def read_by_graphs(self) -> dict[str, Tensor]:
        """Return everything that captured graphs read and that must stay where it is, by name."""
        stored = [*self._model.named_parameters(), *self._model.named_buffers()]
        rows = {"page table": self.rows.device_page_table, "last tokens": self.rows.last_token}
        drafts = self.drafts.static_memory if self.drafts is not None else {}
        steps = {"step buffers": self.builder.device_block, "sequence numbers": self.builder.one_each}
        steps |= {"hidden states": self.functions.hidden}
        images = self._media.graphs.inputs if self._media is not None else {}
        return dict(stored) | cache_tensors(self.caches) | rows | drafts | steps | images

    def prepare(self, scheduler_output: SchedulerOutput) -> None:
        """Free and add rows, copy partial pages, fork states: all that has to be there before the batch is built."""
        for row in scheduler_output.finished_rows:
            self.sampler.state.free_row(row)
            self.rows.free(row)
        for new in scheduler_output.new_requests:
            self.rows.add(new)
            if self.drafts is not None:
                self.drafts.add_row(new)
            self.sampler.state.add_row(new)
        if scheduler_output.page_copies or scheduler_output.state_forks:
            self.copier.copy(scheduler_output.page_copies, scheduler_output.state_forks)

    @torch.inference_mode()
    def launch(
        self, scheduler_output: SchedulerOutput, processors: Mapping[int, LogitsProcessor] | None = None
    ) -> PendingStep:
        """Queue one step. ``processors``: logits processors by row, called before this returns."""
        if self.transfers is not None:
            self.transfers.begin(scheduler_output)
        encodings = scheduler_output.encodings
        encoder_time = self._media.encode(encodings) if self._media is not None and encodings else None
        self.prepare(scheduler_output)
        if not scheduler_output.requests:
            pending = pending_step(self._results, scheduler_output, None)
            pending.transfers = self.transfers
            return pending
        if self._media is not None and self.rows.rope_positions:
            self._media.load(scheduler_output.requests, self.rows)
        edits = NO_EDITS
        if scheduler_output.token_masks or processors:
            edits = self.sampler.state.step_edits(scheduler_output.token_masks, processors or {})
        layout = self.builder.rules.layout(scheduler_output)
        shape = layout.shape
        needs_all_rows = bool(self.rows.prompt_logprobs) and wants_prompt_logprobs(layout.requests, self.rows)
        choice = self._choose(shape, needs_all_rows)
        padded = self._padded(shape, choice)
        if choice.mode is GraphMode.FULL and shape.is_uniform:
            self.builder.build(layout, padded)
            pending = self._sample_whole(scheduler_output, shape, self.graphs.replay(shape, choice.size), edits)
        elif self._verifies_on_device(shape):
            self.builder.build(layout, padded)
            pending = self._sample_whole(scheduler_output, shape, self.functions.verify(shape.num_seqs), edits)
        else:
            pending = self._run_mixed(scheduler_output, layout, padded, choice, needs_all_rows, edits)
        self.builder.mark_sent()
        pending.mode, pending.num_padding_tokens = str(choice.mode), padded.num_tokens - shape.num_tokens
        pending.encoder_time, pending.transfers = encoder_time, self.transfers
        return pending

    def _choose(self, shape: BatchDescriptor, needs_all_rows: bool) -> Choice:
        """Choose the graph of a step. A graph that leaves rows out runs no step that needs all rows."""
        choice = self.graphs.dispatcher.choose(shape)
        if choice.mode is not GraphMode.FULL:
            self.graphs.count_missed(shape)
        elif needs_all_rows and self.builder.selects_rows(shape):
            return Choice(GraphMode.NONE, shape.num_tokens)
        return choice

    def _verifies_on_device(self, shape: BatchDescriptor) -> bool:
        """Whether the step verifies drafts that stay on the device. Its parts then run as one function."""
        return shape.query_len > 0 and self.drafts is not None and self.drafts.rules.on_device

    def _padded(self, shape: BatchDescriptor, choice: Choice) -> BatchDescriptor:
        """Return the sizes that a step is padded to, for its graph or function."""
        if choice.mode is GraphMode.NONE:
            on_device = self._verifies_on_device(shape)
            return self.functions.verification_shape(shape.num_seqs) if on_device else shape
        if choice.mode is GraphMode.FULL and shape.is_uniform:
            functions, size = self.functions, choice.size
            return functions.verification_shape(size) if shape.query_len else functions.decode_shape(size)
        num_samples = self.graphs.sample_size(shape.num_samples) or shape.num_samples
        return replace(self.functions.mixed_shape(choice.size), num_samples=num_samples)

    def _sample_whole(
        self, scheduler_output: SchedulerOutput, shape: BatchDescriptor, output: FullStepOutput, edits: StepEdits
    ) -> PendingStep:
        """Take over what a function of a whole step sampled and drafted, and sample edited rows again."""
        tokens = self.sampler.sample(output.logits, scheduler_output.requests, replayed=output, edits=edits)
        drafts = tokens.drafts
        if drafts is None and output.hidden_states is not None:  # other tokens were sampled than in the graph
            drafts = self._drafts_after(
                scheduler_output.requests, shape, output.hidden_states[: shape.num_tokens], tokens
            )
        return pending_step(self._results, scheduler_output, tokens, drafts=drafts)

    def _drafts_after(
        self,
        requests: Sequence[ScheduledRequest],
        shape: BatchDescriptor,
        hidden_states: Tensor,
        tokens: StepTokens | None,
    ) -> Tensor | None:
        """Return drafts for the next step; None if nothing is drafted."""
        if self.drafts is None:
            return None
        token_ids, acceptance = (tokens.token_ids, tokens.acceptance) if tokens is not None else (None, None)
        materialise = self.builder.materialise
        return self.drafts.after_step(RunStep(requests, shape, hidden_states, token_ids, acceptance, materialise))

    def _run_mixed(
        self,
        scheduler_output: SchedulerOutput,
        layout: StepLayout,
        padded: BatchDescriptor,
        choice: Choice,
        needs_all_rows: bool,
        edits: StepEdits,
    ) -> PendingStep:
        """Run any batch as chosen: its forward pass, then what it samples."""
        requests, shape, compute_logits = scheduler_output.requests, layout.shape, self._model.compute_logits
        samples = None
        if choice.mode is GraphMode.FULL:
            self.builder.build(layout, padded)
            hidden_states = self.graphs.replay_forward(shape, choice.size)
        else:
            is_whole = choice.mode is GraphMode.PIECEWISE or shape.is_decode or needs_all_rows
            selects_rows = not is_whole and self.builder.selects_rows(shape)
            inputs = self.builder.inputs(layout, padded, selects_rows=selects_rows)
            hidden_states, samples = self.forward(inputs, choice), inputs.samples
        prompt_logprobs = None
        if self.rows.prompt_logprobs:
            prompt_logprobs = prompt_logprobs_of(requests, hidden_states, compute_logits, self.rows)
        tokens = None
        sample_size = self.graphs.sample_size(shape.num_samples) if choice.mode is not GraphMode.NONE else None
        if sample_size is not None:
            if choice.mode is not GraphMode.FULL:
                hidden_states = self.functions.keep(hidden_states)
            output = self.graphs.replay_sampling(shape, sample_size)
            tokens = self.sampler.sample(output.logits, requests, samples, output, edits)
        elif shape.num_samples:
            samples = samples or self.builder.sampling_tensors(shape.num_samples)
            logits = compute_logits(hidden_states.index_select(0, samples.indices))
            tokens = self.sampler.sample(logits, requests, samples, edits=edits)
        drafts = self._drafts_after(requests, shape, hidden_states, tokens)
        return pending_step(self._results, scheduler_output, tokens, hidden_states, prompt_logprobs, drafts)

    def forward(self, inputs: StepInputs, choice: Choice) -> Tensor:
        """Run the forward pass without a graph, or in pieces.

        Returns:
            ``[num_tokens, hidden_size]``, from pieces valid until the next step. If the batch selects rows, the other
            rows are arbitrary.
        """
        context = self.context(inputs.batch)
        if choice.mode is GraphMode.PIECEWISE:
            assert self.graphs.pieces is not None
            return self.graphs.pieces.run(context, inputs.input_ids, choice.size)
        with forward_context(context):
            hidden_states = self._model(inputs.input_ids)
        rows = inputs.batch.logits_rows
        return hidden_states if rows is None else spread(hidden_states, rows, inputs.batch.num_tokens)


def _row_table(
    config: EngineConfig, spec: CacheSpec, plan: CachePlan, device: torch.device, *, reads_images: bool
) -> RowTable:
    vision = config.model_config.vision if reads_images else None
    merge = vision.spatial_merge_size if vision is not None and vision.mrope_section is not None else 0
    return RowTable(plan.max_num_seqs, spec.pages_for(plan.max_model_len), device, merge)
