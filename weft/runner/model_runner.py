"""Runs a step: scheduler output in, tokens out.

Job: own the model, its caches and the rows; build the batch, run the forward pass (as a graph where one fits), sample.
Owns: every tensor of one rank. Does not know: requests, why something is scheduled, whose a page is.

One step, in the order that ``messages.py`` promises::

    forget finished rows -> fill new rows -> copy pages, fork states -> batch -> forward -> sample -> remember tokens

``launch`` only queues device work and does not wait for it: the sampled tokens stay on the device for the next
step, and ``PendingStep.result`` fetches them when the host wants to know.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from weft.cache.plan import CachePlan, plan_caches
from weft.cache.spec import CacheSpec
from weft.config import EngineConfig
from weft.config.graph_modes import CudaGraphMode, GraphMode
from weft.config.graph_profile import read_profile
from weft.errors import ConfigError
from weft.forward_context import Batch, ForwardContext, LayerCache, forward_context
from weft.graph.capture_sizes import CaptureSizes
from weft.graph.dispatcher import Choice
from weft.graph.graph import GraphPool, make_pool
from weft.graph.graph_set import CaptureOptions
from weft.graph.profile import ModeTable
from weft.layers.context import ModelContext
from weft.layers.sampler import LogitsProcessor, Sampler
from weft.layers.table import LayerTable
from weft.messages import ModelOutput, NewRequest, RowSampling, ScheduledRequest, SchedulerOutput
from weft.models.decoder import CausalLM
from weft.models.registry import create_model
from weft.ops.backend import Backend, resolve_backend
from weft.parallel.tensor_parallel import SingleRank, TensorParallel
from weft.runner.batch_builder import BatchBuilder, StepShape
from weft.runner.buffers import to_device
from weft.runner.compilation import ModelCompiler
from weft.runner.memory import (
    GRAPH_BYTES,
    allocate_caches,
    cache_tensors,
    explained_out_of_memory,
    gpu_cache_budget,
)
from weft.runner.moves import CacheMover
from weft.runner.results import PendingStep, failed_prefills, pending_step, prompt_logprobs_of
from weft.runner.rows import RowTable
from weft.runner.sampling_inputs import SamplingInputs
from weft.runner.startup import StartupTimes
from weft.runner.step_functions import StepFunctions
from weft.runner.step_graphs import StepGraphs, capture_graphs
from weft.runner.step_sampler import StepSampler
from weft.runner.warmup import StepLimits, compiled_meanwhile, covering_steps, one_layer_of_each_kind, powers_of_two
from weft.weights import load_weights

logger = logging.getLogger(__name__)


class ModelRunner:
    """One rank: weights, caches, rows.

    Args:
        config: resolved settings.
        pool_maker: where graphs come from, for a device.
        tp: the ranks that share the model; by default this one alone.

    Attributes:
        config, spec, plan: settings; the caches' geometry; their sizes.
        compiler: prepares the model for capture.
        graphs: what was captured.
        startup: where the time of the start went.

    Raises:
        WeightsError, UnsupportedModelError, CapacityError: the model cannot be loaded, and why.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool_maker: Callable[[torch.device], GraphPool] = make_pool,
        tp: TensorParallel | None = None,
    ) -> None:
        self.config = config
        self._tp = tp if tp is not None else SingleRank()
        if self._tp.size != config.tensor_parallel_size:
            raise ConfigError(
                f"tensor_parallel_size={config.tensor_parallel_size}: this command looks into a model on one rank; "
                "leave it out"
            )
        self.device = torch.device(config.device)
        self._backend = resolve_backend(config.backend, self.device.type)
        self._layers = LayerTable()
        self._sampler = Sampler(self._backend)
        profile = read_profile(Path(config.graph_profile)) if config.graph_profile else None
        self._table = ModeTable.of(profile) if profile is not None else None
        self._make_pool = pool_maker
        self.graphs = StepGraphs()
        self.caches: dict[str, LayerCache] = {}
        self.spec = CacheSpec.of(config)
        self.startup = StartupTimes()
        stage = self.startup.stage
        with explained_out_of_memory("loading the weights", config):
            with stage("model"):
                self.model = self._make_model()
                self.compiler = ModelCompiler(config, self.model)
                assert self.spec.layers.keys() <= self._layers.keys(), "the model's layers are not those of its specs"
            with stage("kernels"), self._kernels_compiled_meanwhile(), stage("weights"):
                load_weights(self.model, config.model_config, config.model_path, config.load_format, config.seed)
        with explained_out_of_memory("the largest step", config), stage("memory"):
            self.plan = self._plan()
        with explained_out_of_memory("caches and graphs", config):
            with stage("caches"):
                self._attach(self.plan)
            with stage("graphs"):
                self._capture_graphs()
        quantization = config.model_config.quantization
        if config.kv_cache_dtype == "fp8" and not (quantization and quantization.kv_cache):
            logger.warning("kv_cache_dtype=fp8: the checkpoint has no scales of keys and values; 1.0 is used")
        why = config.reasons.get("graph_profile" if config.graph_profile else "cuda_graph_mode", "given")
        logger.info("kernels: %s (%s)", config.backend, config.reasons.get("backend", "given"))
        logger.info("graphs: mode %s (%s), profile %s", config.cuda_graph_mode, why, config.graph_profile or "none")

    def _make_model(self) -> CausalLM:
        """The model with parameters that are not filled yet."""
        config = self.config
        context = ModelContext(
            dtype=getattr(torch, config.dtype),
            device=self.device,
            tp=self._tp,
            expert_parallel=config.enable_expert_parallel,
            custom_all_reduce=config.enable_custom_all_reduce,
            backend=self._backend,
            layers=self._layers,
            max_model_len=config.max_model_len,
        )
        model = create_model(config.model_config, context)
        model.eval()
        return model

    def _kernels_compiled_meanwhile(self) -> AbstractContextManager[None]:
        """Compiles the model's Triton kernels, if it has any, while the body runs."""
        return compiled_meanwhile(self._walk_steps) if self._backend is Backend.TRITON else nullcontext()

    @torch.inference_mode()
    def _walk_steps(self) -> None:
        """Every kind of step, on the smallest caches; with kernels that do not run, or with meaningless results."""
        config = self.config
        self.plan = CachePlan(2, 2, config.max_num_seqs, config.max_model_len, 0, {})
        self._attach(self.plan)
        limits = StepLimits(config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len)
        with one_layer_of_each_kind(self.model.model):
            for scheduler_output in covering_steps(limits, state_slot=1 if self.spec.has_states else 0):
                self.launch(scheduler_output)
                self._rows.last_token.zero_()  # what was sampled may be no token
            self._walk_captured_steps()
        self.caches = {}

    def _walk_captured_steps(self) -> None:
        sizes, steps = self._capture_sizes(self.config.max_num_seqs), self._functions
        for size in powers_of_two(max(sizes.decode)) if sizes.decode else ():
            steps.pad(steps.decode_shape(size))
            steps.decode(size)
            self._rows.last_token.zero_()
        for size in powers_of_two(sizes.max_tokens) if sizes.max_tokens else ():
            steps.pad(steps.mixture_shape(size))
            steps.forward(size)

    def _plan(self) -> CachePlan:
        config = self.config
        return plan_caches(
            self.spec,
            budget_bytes=self._tp.least(self._cache_budget()),
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            num_kv_pages=config.num_kv_pages,
            num_state_slots=config.num_state_slots,
            keeps_prefixes=config.enable_prefix_caching,
        )

    def _cache_budget(self) -> int:
        """Bytes for caches: given on the CPU; on a GPU what is left of the share that Weft may use."""
        if self.device.type == "cpu":
            return int(self.config.cpu_cache_gib * 2**30)
        step_bytes = self._measure_step_bytes()
        free, total = torch.cuda.mem_get_info(self.device)
        budget = gpu_cache_budget(
            free_bytes=free,
            total_bytes=total,
            utilization=self.config.gpu_memory_utilization,
            step_bytes=step_bytes,
            graph_bytes=GRAPH_BYTES if self.config.cuda_graph_mode != "NONE" else 0,
        )
        logger.info("memory: step %.2f GiB, caches %.2f GiB", step_bytes / 2**30, budget / 2**30)
        return budget

    def _measure_step_bytes(self) -> int:
        """Device memory that the largest steps take beside weights and caches, found by running them on tiny caches: as
        many tokens as a step may have, and as many sequences decoding at the longest context.

        Every sequence uses the same page and slot: what is computed is meaningless, but its size is right.
        """
        config = self.config
        count = config.max_num_seqs
        length = max(1, min(config.max_num_batched_tokens // count, config.max_model_len))
        pages = self.spec.pages_for(length)
        self._attach(CachePlan(2, 2, count, config.max_model_len, 0, {}))
        greedy = RowSampling(temperature=1.0, top_p=0.9)
        slot = 1 if self.spec.has_states else 0
        new = [NewRequest(row, [0] * length, length, greedy) for row in range(count)]
        more = [1] * (self.spec.pages_for(config.max_model_len) - pages)
        prefills = [ScheduledRequest(row, 0, length, [1] * pages, slot, True) for row in range(count)]
        decodes = [ScheduledRequest(row, config.max_model_len - 1, 1, more, slot, True) for row in range(count)]
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.run(SchedulerOutput(0, prefills, new))
        if config.max_model_len > length:
            self.run(SchedulerOutput(1, decodes))
        peak = torch.cuda.max_memory_allocated(self.device)
        self.caches = {}
        torch.cuda.empty_cache()
        return peak - before

    def _attach(self, plan: CachePlan) -> None:
        """Make caches, rows and buffers of the planned sizes."""
        config = self.config
        self.caches = allocate_caches(self.spec, plan, self.device)
        self._mover = CacheMover(self.spec.layers, self.caches, self._backend, self.device)
        self._rows = RowTable(plan.max_num_seqs, self.spec.pages_for(plan.max_model_len), self.device)
        self._builder = BatchBuilder(
            self._rows,
            page_size=config.page_size,
            max_num_tokens=config.max_num_batched_tokens,
            max_num_seqs=plan.max_num_seqs,
            chunk_sizes=self.spec.chunk_sizes,
            device=self.device,
        )
        self._sampling = SamplingInputs(self._rows, config.model_config.vocab_size, self.device)
        self._sample = StepSampler(self._sampler, self._sampling, self._builder, self._rows)
        self._functions = StepFunctions(
            self.model,
            self._builder,
            self._rows,
            self._sampler,
            self._sampling,
            self._context,
            max_num_seqs=plan.max_num_seqs,
            max_model_len=plan.max_model_len,
            hidden=torch.zeros(
                self._capture_sizes(plan.max_num_seqs).max_tokens,
                config.model_config.hidden_size,
                dtype=getattr(torch, config.dtype),
                device=self.device,
            ),
        )

    def _capture_graphs(self) -> None:
        config, sizes = self.config, self._capture_sizes(self.plan.max_num_seqs)
        if CudaGraphMode(config.cuda_graph_mode) is CudaGraphMode.NONE:
            return
        watched = self._read_by_graphs if config.enable_torch_compile_debug_mode else None
        options = CaptureOptions(
            self.device,
            keep_gc=config.enable_cudagraph_gc,
            watched=watched,
            show_progress=self._tp.rank == 0,
            least=self._tp.least,
        )
        pool = self._make_pool(self.device)
        self.graphs = capture_graphs(sizes, self._functions, self.compiler, pool, options, config, self._table)

    def _capture_sizes(self, max_num_seqs: int) -> CaptureSizes:
        return CaptureSizes.of(self.config, max_num_seqs, self._table)

    def _read_by_graphs(self) -> dict[str, Tensor]:
        """Everything that captured graphs read and that must stay where it is, by name."""
        stored = [*self.model.named_parameters(), *self.model.named_buffers()]
        rows = {"page table": self._rows.device_page_table, "last tokens": self._rows.last_token}
        steps = {"step buffers": self._builder.device_block, "hidden states": self._functions.hidden}
        return dict(stored) | cache_tensors(self.caches) | rows | steps

    # -- a step --------------------------------------------------------------------------------------------------

    def run(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        """Run one step and wait for its results."""
        return self.launch(scheduler_output).result()

    @torch.inference_mode()
    def launch(
        self, scheduler_output: SchedulerOutput, processors: Mapping[int, LogitsProcessor] | None = None
    ) -> PendingStep:
        """Queue one step. ``processors``: logits processors by row, called before this returns."""
        self._update_rows(scheduler_output)
        self._sampling.set_processors(processors or {})
        self._move(scheduler_output)
        sampled = [r for r in scheduler_output.requests if r.samples]
        shape = self._builder.fill(scheduler_output)
        choice = self.graphs.choose(shape)
        if choice.mode is GraphMode.FULL and shape.is_decode:
            return self._launch_decode_graph(scheduler_output, sampled, shape, choice.size)
        return self._launch_batch(scheduler_output, sampled, shape, choice)

    def _launch_decode_graph(
        self, scheduler_output: SchedulerOutput, sampled: list[ScheduledRequest], shape: StepShape, size: int
    ) -> PendingStep:
        """Replay a decode step."""
        assert self.graphs.decode is not None
        self._builder.pad_decodes(shape, size)
        self._builder.send()
        logits, replayed = self.graphs.decode.replay(size, shape.num_seqs)
        pending = pending_step(scheduler_output, self._sample(logits, sampled, replayed))
        pending.mode, pending.num_padding_tokens = str(GraphMode.FULL), size - shape.num_seqs
        return pending

    def _launch_batch(
        self, scheduler_output: SchedulerOutput, sampled: list[ScheduledRequest], shape: StepShape, choice: Choice
    ) -> PendingStep:
        """Run any batch as chosen: its forward pass, then what it samples."""
        sample_size = None
        if choice.mode is not GraphMode.NONE:
            self._builder.pad_mixture(shape, choice.size)
            sample_size = self.graphs.sample_size(shape.num_samples) if sampled else None
        if sample_size is not None:
            self._builder.pad_samples(shape, sample_size)
        self._builder.send()
        hidden_states = self._forward(shape, choice)
        prompt_logprobs = prompt_logprobs_of(scheduler_output, hidden_states, self.model.compute_logits, self._rows)
        failed = failed_prefills(scheduler_output, hidden_states)
        result = None
        if sample_size is not None and self.graphs.samples is not None:
            if choice.mode is not GraphMode.FULL:
                self._functions.keep(hidden_states)
            logits, replayed = self.graphs.samples.replay(sample_size, shape.num_samples)
            result = self._sample(logits, sampled, replayed)
        elif sampled:
            indices = self._builder.sample_rows(shape.num_samples).indices
            result = self._sample(self.model.compute_logits(hidden_states.index_select(0, indices)), sampled)
        pending = pending_step(scheduler_output, result, prompt_logprobs, failed)
        pending.mode, pending.num_padding_tokens = str(choice.mode), choice.size - shape.num_tokens
        return pending

    @torch.inference_mode()
    def decode_both_ways(
        self, scheduler_output: SchedulerOutput
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """One decode step that fits a graph, run eagerly and then replayed, from the same states and last tokens.

        Returns:
            ``(logits [N, V], token_ids [N])`` of both, as copies. To verify graphs; serving has no use for it.
        """
        shape = self._builder.fill(scheduler_output)
        choice = self.graphs.choose(shape)
        graphs = self.graphs.decode
        assert graphs is not None and choice.mode is GraphMode.FULL and shape.is_decode, "no graph fits the step"
        count = shape.num_seqs
        self._builder.pad_decodes(shape, choice.size)
        self._builder.send()
        slots = to_device(torch.tensor([r.state_slot for r in scheduler_output.requests]), self.device)
        states = [self.caches[name][t.name] for name, spec in self.spec.layers.items() for t in spec.states]
        before, last_token = [t.index_select(0, slots) for t in states], self._rows.last_token.clone()
        logits, result = self._functions.decode(choice.size)
        eager = logits[:count].clone(), result.token_ids[:count].clone()
        for tensor, values in zip(states, before, strict=True):
            tensor.index_copy_(0, slots, values)
        self._rows.last_token.copy_(last_token)
        logits, result = graphs.replay(choice.size, count)
        return eager, (logits[:count].clone(), result.token_ids[:count].clone())

    def _forward(self, shape: StepShape, choice: Choice) -> Tensor:
        """``[num_tokens, hidden_size]``; from graphs valid until the next step."""
        if choice.mode is GraphMode.FULL:
            assert self.graphs.forward is not None
            return self.graphs.forward.replay(choice.size, shape.num_tokens)[: shape.num_tokens]
        inputs = self._builder.materialise(shape)
        context = self._context(inputs.batch, choice.mode)
        if choice.mode is GraphMode.PIECEWISE:
            assert self.graphs.pieces is not None
            return self.graphs.pieces.run(context, inputs.input_ids, choice.size)
        with forward_context(context):
            return self.model(inputs.input_ids)

    def _context(self, batch: Batch, mode: GraphMode) -> ForwardContext:
        return ForwardContext(batch, self.caches, self._layers, mode=mode)

    def _update_rows(self, scheduler_output: SchedulerOutput) -> None:
        self._sampling.set_step_masks(scheduler_output.token_masks)
        for row in scheduler_output.finished_rows:
            self._sampling.forget(row)
        for new in scheduler_output.new_requests:
            self._rows.fill(new)
            self._sampling.fill(new)

    def _move(self, scheduler_output: SchedulerOutput) -> None:
        """Copy partial pages and fork states, before anything reads them."""
        self._mover.copy_pages(scheduler_output.page_copies)
        self._mover.fork_states(scheduler_output.state_forks)
