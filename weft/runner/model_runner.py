"""The model runner of one rank: weights, kernels, caches, graphs, steps.

Job: load the model, compile its kernels, size the caches, capture graphs; then run steps (``step_runner.py``). Owns:
every tensor of one rank. Does not know: requests, why something is scheduled, whose a page is.

``launch`` only queues device work and does not wait for it: the sampled tokens stay on the device for the next
step, and ``PendingStep.result`` fetches them when the host wants to know.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from weft.cache.plan import CachePlan, mib, plan_for
from weft.cache.spec import CacheSpec
from weft.config import EngineConfig
from weft.config.graph_modes import CudaGraphMode, GraphMode
from weft.config.graph_profile import read_profile
from weft.errors import CapacityError, ConfigError
from weft.forward_context import LayerCache
from weft.graph.batch_descriptor import BatchDescriptor, MeasuredModes
from weft.graph.capture_sizes import CaptureSizes
from weft.graph.graph import GraphPool, make_pool
from weft.graph.graph_set import CaptureOptions
from weft.layers.context import ModelContext
from weft.layers.sampler import LogitsProcessor
from weft.layers.table import LayerTable
from weft.messages import ModelOutput, RowSampling, SchedulerOutput
from weft.models.decoder import CausalLM
from weft.models.registry import create_model
from weft.models.vision_language import VisionLanguageModel
from weft.ops.backend import Backend, resolve_backend
from weft.parallel.tensor_parallel import SingleRank, TensorParallel
from weft.processes.collector import objects_frozen
from weft.runner.media_inputs import MediaInputs
from weft.runner.memory import (
    GRAPH_BYTES,
    explained_out_of_memory,
    gpu_cache_budget,
    largest_that_fits,
)
from weft.runner.results import PendingStep
from weft.runner.startup import StartupTimes
from weft.runner.step_graphs import StepGraphs, capture_graphs
from weft.runner.step_runner import StepRunner
from weft.runner.warmup import (
    StepLimits,
    compiled_meanwhile,
    covering_steps,
    image_step,
    one_layer_of_each_kind,
    prepare_triton,
    slow_steps,
    step,
)
from weft.weights import load_weights

if TYPE_CHECKING:
    from weft.pieces.model_compiler import ModelCompiler

logger = logging.getLogger(__name__)


def check_ranks(config: EngineConfig, num_ranks: int = 1) -> None:
    """Raises ConfigError if the model is to be split over more ranks than there are."""
    if config.tensor_parallel_size != num_ranks:
        raise ConfigError(
            f"tensor_parallel_size={config.tensor_parallel_size}: this command looks into a model on one rank; "
            "leave it out"
        )


class ModelRunner:
    """One rank: weights, caches, rows.

    Args:
        config: resolved settings.
        pool_maker: where graphs come from, for a device.
        tp: the ranks that share the model; by default this one alone.

    Attributes:
        config, spec, plan: settings, with limits of a step that fits; the caches' geometry; their sizes.
        compiler: prepares the model for capture in pieces or for torch.compile; None if the settings use neither.
        steps: runs them, with the caches, rows and graphs.
        startup: where the time of the start went.

    Raises:
        WeightsError, UnsupportedModelError, CapacityError: the model cannot be loaded, and why.
    """

    @objects_frozen()  # memory is given back on the way by collecting
    def __init__(
        self,
        config: EngineConfig,
        pool_maker: Callable[[torch.device], GraphPool] = make_pool,
        tp: TensorParallel | None = None,
    ) -> None:
        self.config = config
        self._tp = tp if tp is not None else SingleRank()
        check_ranks(config, self._tp.size)
        self.device = torch.device(config.device)
        self._backend = resolve_backend(config.backend, self.device.type)
        if self._backend is Backend.TRITON:
            prepare_triton(self.device)
        self._layers = LayerTable()
        self._table = _measured_modes(config)
        self._make_pool = pool_maker
        self.spec = CacheSpec.of(config)
        self.startup = StartupTimes()
        stage = self.startup.stage
        with explained_out_of_memory("loading the weights", config):
            with stage("model"):
                self.model = self._make_model()
                self.media: MediaInputs | None = None
                if isinstance(self.model, VisionLanguageModel):
                    self.media = MediaInputs(self.model, config)
                self.compiler = _make_compiler(config, self.model)
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
            custom_all_reduce=not config.disable_custom_all_reduce,
            backend=self._backend,
            layers=self._layers,
            max_model_len=config.max_model_len,
            num_media_rows=config.max_num_batched_tokens if config.model_config.runs_vision else 0,
        )
        return create_model(config.model_config, context)

    def _kernels_compiled_meanwhile(self) -> AbstractContextManager[None]:
        """Compiles the model's Triton kernels, if it has any, while the body runs."""
        return compiled_meanwhile(self._walk_steps, self.device) if self._backend is Backend.TRITON else nullcontext()

    @torch.inference_mode()
    def _walk_steps(self) -> None:
        """Every kind of step, on the smallest caches; with kernels that do not run, or with meaningless results."""
        config = self.config
        self.plan = CachePlan(2, 2, config.max_num_seqs, config.max_model_len, 0, {})
        self._attach(self.plan)
        limits = StepLimits(config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len)
        slot = int(self.spec.has_states)
        with one_layer_of_each_kind(self.model.model):
            self._walk(slow_steps(limits, slot))
            self._walk_captured_steps()
            self._walk(covering_steps(limits, slot))
            if self.media is not None:
                self.media.run_smallest()
                self.launch(image_step(slot, self.media.merge))
        del self.steps

    def _walk(self, steps: Iterable[SchedulerOutput]) -> None:
        for scheduler_output in steps:
            self.launch(scheduler_output)
            self.steps.rows.last_token.zero_()  # what was sampled may be no token

    def _walk_captured_steps(self) -> None:
        """Every size that is captured: a capture must meet no kernel that is not compiled. The largest first, whose
        kernels take longest to compile."""
        sizes, functions = self._capture_sizes(self.plan), self.steps.functions
        kinds: tuple[tuple[Iterable[int], Callable[[int], BatchDescriptor], Callable[[int], object]], ...] = (
            ({*sizes.forward, *sizes.pieces}, functions.mixed_shape, functions.forward),
            (sizes.decode, functions.decode_shape, functions.decode),
            (sizes.verification, functions.verification_shape, functions.verify),
            (sizes.samples, functions.mixed_shape, functions.sample),
        )
        for captured, shape_of, function in kinds:
            for size in sorted(captured, reverse=True):
                functions.pad(shape_of(size))
                function(size)
                self.steps.rows.last_token.zero_()

    def _plan(self) -> CachePlan:
        """The plan of the caches, beside the largest step that leaves memory for them; ``config`` holds its limits."""
        config, reasons = self.config, {}
        wanted = StepLimits(config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len)
        # A GPU may have memory for a smaller step, and left over for caches; on a CPU no step is in their way.
        short = (torch.OutOfMemoryError, CapacityError) if self.device.type == "cuda" else (torch.OutOfMemoryError,)
        limits, plan = largest_that_fits(wanted, self._plan_within, short)
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            if (found := getattr(limits, name)) < (given := getattr(wanted, name)):
                reasons[name] = f"clamped to {found}: a step of {given} does not fit into the device's memory"
        if not reasons:
            return plan
        return replace(plan, reasons=plan.reasons | reasons, max_num_batched_tokens=limits.max_num_batched_tokens)

    def _plan_within(self, limits: StepLimits) -> CachePlan:
        """The plan if no step is larger than ``limits``."""
        self._forget_steps()
        self.config = replace(
            self.config, max_num_batched_tokens=limits.max_num_batched_tokens, max_num_seqs=limits.max_num_seqs
        )
        plan = plan_for(self.config, self.spec, self._tp.least(self._budget_of_all()))
        return plan if self.media is None else self._with_encoder_cache(plan, self.media.embeddings)

    def _with_encoder_cache(self, plan: CachePlan, embeddings: torch.Tensor) -> CachePlan:
        """The plan with the embeddings of images, which have their memory already."""
        tokens, features, size = embeddings.shape
        reason = f"embeddings of {tokens} tokens of images, {features} of {size} numbers each: {mib(embeddings.nbytes)}"
        return replace(plan, encoder_bytes=embeddings.nbytes, reasons=plan.reasons | {"encoder_cache_size": reason})

    def _forget_steps(self) -> None:
        """Give back what an attempt to run a step left behind."""
        self.__dict__.pop("steps", None)
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def _budget_of_all(self) -> int:
        """Bytes for caches on this rank, if no rank lacks memory for a step. Each finds out by itself: one that ended
        in the middle of a step would leave the others waiting for it.

        Raises:
            OutOfMemoryError, CapacityError: on every rank.
        """
        error: Exception | None = None
        budget = 0
        try:
            with self._tp.alone():
                budget = self._cache_budget()
        except (torch.OutOfMemoryError, CapacityError) as found:
            error = found
        if not self._tp.least(error is None):
            raise error or torch.OutOfMemoryError("another rank has too little memory")
        return budget

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
        """Device memory that the largest steps take beside weights and caches."""
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self._run_largest_steps()
        peak = torch.cuda.max_memory_allocated(self.device)
        self._forget_steps()
        return peak - before

    def _run_largest_steps(self) -> None:
        """On tiny caches: as many tokens as a step may have, and as many sequences decoding at the longest context.

        Every sequence uses page 0 and the same slot: what is computed is meaningless, but its size is right.
        """
        config, count = self.config, self.config.max_num_seqs
        self._attach(CachePlan(2, 2, count, config.max_model_len, 0, {}))
        slot, sampling = int(self.spec.has_states), RowSampling(temperature=1.0, top_p=0.9)
        share = config.max_num_batched_tokens // count
        length = max(1, min(share, config.max_model_len))
        self.run(step([(0, length)] * count, slot, sampling))
        if config.max_model_len > length:
            num_drafts = min(config.num_drafts_at(count), min(config.max_model_len, share) - 1)
            last = config.max_model_len - 1 - num_drafts
            self.run(step([(last, 1)] * count, slot, sampling, num_drafts))
        if self.media is not None:
            with torch.inference_mode():
                self.media.run_largest()

    def _attach(self, plan: CachePlan) -> None:
        """Make caches, rows and buffers of the planned sizes."""
        max_tokens = self._capture_sizes(plan).max_tokens
        self.steps = StepRunner(
            self.model, self._layers, self.config, self.spec, plan, self._backend, max_tokens, self.media
        )

    def _capture_graphs(self) -> None:
        config, sizes = self.config, self._capture_sizes(self.plan)
        if CudaGraphMode(config.cuda_graph_mode) is CudaGraphMode.NONE:
            return
        watched = self.steps.read_by_graphs if config.enable_torch_compile_debug_mode else None
        options = CaptureOptions(
            self.device,
            keep_gc=config.enable_cudagraph_gc,
            watched=watched,
            show_progress=self._tp.rank == 0,
            least=self._tp.least,
        )
        pool = self._make_pool(self.device)
        functions = self.steps.functions
        encoder = self.media.graphs if self.media is not None else None
        self.steps.graphs = capture_graphs(sizes, functions, self.compiler, pool, options, config, self._table, encoder)

    def _capture_sizes(self, plan: CachePlan) -> CaptureSizes:
        verifies, longest = self.spec.verifies, plan.max_model_len
        return CaptureSizes.of(self.config, plan.max_num_seqs, self._table, verifies=verifies, max_model_len=longest)

    @property
    def caches(self) -> dict[str, LayerCache]:
        """By layer name."""
        return self.steps.caches

    @property
    def layers(self) -> list[nn.Module]:
        """Those of the layer table."""
        return list(self._layers.values())

    @property
    def graphs(self) -> StepGraphs:
        """What was captured."""
        return self.steps.graphs

    def run(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        """Run one step and wait for its results."""
        return self.launch(scheduler_output).result()

    def launch(
        self, scheduler_output: SchedulerOutput, processors: Mapping[int, LogitsProcessor] | None = None
    ) -> PendingStep:
        """See ``StepRunner.launch``."""
        return self.steps.launch(scheduler_output, processors)


def _measured_modes(config: EngineConfig) -> MeasuredModes | None:
    """Return the modes that the profile of the settings chooses; None without a profile."""
    if not config.graph_profile:
        return None
    from weft.pieces.mode_table import ModeTable

    return ModeTable.of(read_profile(Path(config.graph_profile)))


def _make_compiler(config: EngineConfig, model: nn.Module) -> ModelCompiler | None:
    """Return what prepares the model for pieces and torch.compile; None if the settings use neither.

    Raises:
        ConfigError: a source is not available here, or a split op does not exist.
    """
    mode = CudaGraphMode(config.cuda_graph_mode)
    captures_pieces = GraphMode.PIECEWISE in (*mode.decode, *mode.mixed)
    if not (captures_pieces or config.splitting_ops is not None or config.enable_torch_compile):
        return None
    from weft.pieces.model_compiler import ModelCompiler

    return ModelCompiler(config, model)
