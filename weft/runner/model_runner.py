"""The model runner of one rank: weights, kernels, caches, graphs, steps.

Job: start in four steps: load the model, compile its kernels (``kernel_walk.py``), plan the memory
(``memory_plan.py``), capture graphs (``step_graphs.py``). ``step_runner.py`` runs the steps then. Owns: every tensor of
one rank. Does not know: requests, why something is scheduled, whose a page is.

``launch`` only queues device work and does not wait for it: the sampled tokens stay on the device for the next
step, and ``PendingStep.result`` fetches them when the host wants to know.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from weft.cache.spec import CacheSpec
from weft.config import EngineConfig
from weft.config.graph_modes import CudaGraphMode, GraphMode
from weft.config.graph_profile import read_profile
from weft.errors import ConfigError
from weft.forward_context import LayerCache, cache_tensors
from weft.graph.batch_descriptor import MeasuredModes
from weft.graph.graph import GraphPool, make_pool
from weft.graph.graph_set import CaptureOptions
from weft.layers.context import ModelContext
from weft.layers.table import LayerTable
from weft.models.decoder import CausalLM
from weft.models.registry import create_model
from weft.models.vision_language import VisionLanguageModel
from weft.ops.backend import resolve_backend
from weft.parallel.tensor_parallel import SingleRank, TensorParallel
from weft.processes.collector import objects_frozen
from weft.runner.kernel_walk import walk_kernels
from weft.runner.media_inputs import MediaInputs
from weft.runner.memory import (
    explained_out_of_memory,
)
from weft.runner.memory_plan import plan_memory
from weft.runner.starting import StartingRunner
from weft.runner.startup import StartupTimes
from weft.runner.step_graphs import StepGraphs, capture_graphs
from weft.runner.warmup import (
    compiled_meanwhile,
    prepare_triton,
)
from weft.weights import load_weights

if TYPE_CHECKING:
    from weft.pieces.model_compiler import ModelCompiler
    from weft.runner.host_memory import HostMemory
    from weft.runner.sleep import SleepMemory

logger = logging.getLogger(__name__)


def check_ranks(config: EngineConfig, num_ranks: int = 1) -> None:
    """Raises ConfigError if the model is to be split over more ranks than there are."""
    if config.tensor_parallel_size != num_ranks:
        raise ConfigError(
            f"tensor_parallel_size={config.tensor_parallel_size}: this command looks into a model on one rank; "
            "leave it out"
        )


class ModelRunner(StartingRunner):
    """One rank: weights, caches, rows.

    Args:
        pool_maker: where graphs come from, for a device.
        tp: the ranks that share the model; by default this one alone.

    Attributes:
        config, spec, plan: settings, with limits of a step that fits; the caches' geometry; their sizes.
        compiler: prepares the model for capture in pieces or for torch.compile; None if the settings use neither.
        steps: runs them, with the caches, rows and graphs.
        media: encodes the images of a model that reads images.
        tp: the ranks that share the model.
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
        self.tp = tp if tp is not None else SingleRank()
        check_ranks(config, self.tp.size)
        self.device = torch.device(config.device)
        if config.deterministic:
            _check_order_of_sums(self.device)
        self._backend = resolve_backend(config.backend, self.device.type, invariant=config.deterministic)
        if not self._backend.is_torch:
            prepare_triton(self.device)
        self._layers = LayerTable()
        self._table = _measured_modes(config)
        self._make_pool = pool_maker
        self.spec = CacheSpec.of(config)
        self.startup = StartupTimes()
        stage = self.startup.stage
        with explained_out_of_memory("loading the weights", config):
            with stage("model"):
                self._make_model()
                self.sleep = _make_sleep_memory(config, self.device)
                if self.sleep is not None:
                    self.sleep.move("weights", self.model.parameters())
            self.host = _make_host_memory(config, self.spec, self.device, self.tp)
            with stage("kernels"), self._kernels_compiled_meanwhile(), stage("weights"):
                load_weights(self.model, config.model_config, config.model_path, config.load_format, config.seed)
        with explained_out_of_memory("the largest step", config), stage("memory"):
            self.plan = plan_memory(self)
        with explained_out_of_memory("caches and graphs", config):
            with stage("caches"):
                self.attach(self.plan)
                if self.sleep is not None:
                    self.sleep.move("kv_cache", cache_tensors(self.caches).values())
            with stage("graphs"):
                self._capture_graphs()
        self._log_choices()

    def _log_choices(self) -> None:
        config = self.config
        quantization = config.model_config.quantization
        if config.kv_cache_dtype == "fp8" and not (quantization and quantization.kv_cache):
            logger.warning("kv_cache_dtype=fp8: the checkpoint has no scales of keys and values; 1.0 is used")
        why = config.reasons.get("graph_profile" if config.graph_profile else "cuda_graph_mode", "given")
        logger.info("kernels: %s (%s)", config.backend, config.reasons.get("backend", "given"))
        logger.info("graphs: mode %s (%s), profile %s", config.cuda_graph_mode, why, config.graph_profile or "none")

    def _make_model(self) -> None:
        """Make the model, with parameters that are not filled yet, and what prepares it for graphs."""
        config = self.config
        context = ModelContext(
            dtype=getattr(torch, config.dtype),
            device=self.device,
            tp=self.tp,
            expert_parallel=config.enable_expert_parallel,
            custom_all_reduce=not config.disable_custom_all_reduce,
            backend=self._backend,
            layers=self._layers,
            max_model_len=config.max_model_len,
            num_media_rows=config.max_num_batched_tokens if config.model_config.runs_vision else 0,
        )
        self.model: CausalLM = create_model(config.model_config, context)
        self.media: MediaInputs | None = None
        if isinstance(self.model, VisionLanguageModel):
            self.media = MediaInputs(self.model, config)
        self.compiler = _make_compiler(config, self.model)
        assert self.spec.layers.keys() <= self._layers.keys(), "the model's layers are not those of its specs"

    def _kernels_compiled_meanwhile(self) -> AbstractContextManager[None]:
        """Compile the model's Triton kernels, if it has any, while the body runs."""
        if self._backend.is_torch:
            return nullcontext()
        return compiled_meanwhile(lambda: walk_kernels(self), self.device)

    def _capture_graphs(self) -> None:
        config, sizes = self.config, self.capture_sizes(self.plan)
        if CudaGraphMode(config.cuda_graph_mode) is CudaGraphMode.NONE:
            return
        watched = self.steps.read_by_graphs if config.enable_torch_compile_debug_mode else None
        options = CaptureOptions(
            self.device,
            keep_gc=config.enable_cudagraph_gc,
            watched=watched,
            show_progress=self.tp.rank == 0,
            least=self.tp.least,
        )
        pool = self._make_pool(self.device)
        functions = self.steps.functions
        encoder = self.media.graphs if self.media is not None else None
        self.steps.graphs = capture_graphs(sizes, functions, self.compiler, pool, options, config, self._table, encoder)

    @property
    def caches(self) -> dict[str, LayerCache]:
        return self.steps.caches

    @property
    def layers(self) -> list[nn.Module]:
        return list(self._layers.values())

    @property
    def graphs(self) -> StepGraphs:
        return self.steps.graphs


def _check_order_of_sums(device: torch.device) -> None:
    """Raises ConfigError on a GPU whose products add in an order that was not measured."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    if capability != (9, 0):
        raise ConfigError(
            f"deterministic=True is proven for GPUs with compute capability 9.0 (H100, H200); this one has "
            f"{'.'.join(map(str, capability))}. Leave it out, or use device='cpu'"
        )


def _measured_modes(config: EngineConfig) -> MeasuredModes | None:
    """Return the modes that the profile of the settings chooses; None without a profile."""
    if not config.graph_profile:
        return None
    from weft.pieces.mode_table import ModeTable

    return ModeTable.of(read_profile(Path(config.graph_profile)))


def _make_host_memory(
    config: EngineConfig, spec: CacheSpec, device: torch.device, tp: TensorParallel
) -> HostMemory | None:
    """Allocate the memory of the tier below the device, if the settings have one."""
    if not config.kv_offloading_size:
        return None
    from weft.offload.plan import plan_tier
    from weft.runner.host_memory import HostMemory

    fingerprint = ""
    if config.kv_offloading_dir is not None:
        from weft.offload.fingerprint import fingerprint_of

        fingerprint = fingerprint_of(config, spec)
    return HostMemory(plan_tier(config, spec), device, config.kv_offloading_dir, fingerprint, tp)


def _make_sleep_memory(config: EngineConfig, device: torch.device) -> SleepMemory | None:
    """Return what gives memory back; None if the settings do not ask for it."""
    if not config.enable_sleep_mode:
        return None
    from weft.runner.sleep import SleepMemory

    return SleepMemory(device)


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
