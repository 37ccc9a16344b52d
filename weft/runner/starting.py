"""A model and the steps that run it: the part of a rank's runner that a start and a step need."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from weft.cache.plan import CachePlan
from weft.cache.spec import CacheSpec
from weft.config import EngineConfig
from weft.graph.batch_descriptor import MeasuredModes
from weft.graph.capture_sizes import CaptureSizes
from weft.layers.sampler import LogitsProcessor
from weft.layers.table import LayerTable
from weft.messages import ModelOutput, SchedulerOutput
from weft.models.decoder import CausalLM
from weft.ops.backend import Backend
from weft.parallel.tensor_parallel import TensorParallel
from weft.runner.media_inputs import MediaInputs
from weft.runner.results import PendingStep
from weft.runner.step_runner import StepRunner
from weft.runner.warmup import StepLimits

if TYPE_CHECKING:
    from weft.runner.host_memory import HostMemory


class StartingRunner:
    """A model whose steps can be made, run and dropped. Attributes are those of ``ModelRunner``."""

    config: EngineConfig
    spec: CacheSpec
    plan: CachePlan
    device: torch.device
    tp: TensorParallel
    model: CausalLM
    media: MediaInputs | None
    host: HostMemory | None
    steps: StepRunner
    _layers: LayerTable
    _backend: Backend
    _table: MeasuredModes | None

    def limit_steps(self, limits: StepLimits) -> None:
        self.config = replace(
            self.config, max_num_batched_tokens=limits.max_num_batched_tokens, max_num_seqs=limits.max_num_seqs
        )

    def drop_steps(self) -> None:
        """Free the caches and buffers of an attempt to run a step."""
        self.__dict__.pop("steps", None)
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def attach(self, plan: CachePlan) -> None:
        """Make caches, rows and buffers of the planned sizes."""
        max_tokens = self.capture_sizes(plan).max_tokens
        self.steps = StepRunner(
            self.model, self._layers, self.config, self.spec, plan, self._backend, max_tokens, self.media, self.host
        )

    def capture_sizes(self, plan: CachePlan) -> CaptureSizes:
        return CaptureSizes.of(self.config, plan.max_num_seqs, self._table, max_model_len=plan.max_model_len)

    def run(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        """Run one step and wait for its results."""
        return self.launch(scheduler_output).result()

    def launch(
        self, scheduler_output: SchedulerOutput, processors: Mapping[int, LogitsProcessor] | None = None
    ) -> PendingStep:
        return self.steps.launch(scheduler_output, processors)
