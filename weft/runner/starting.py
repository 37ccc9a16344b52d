"""A rank's runner while it starts, as the walk over kernels and the plan of the memory see it."""

from typing import Protocol

import torch

from weft.cache.plan import CachePlan
from weft.cache.spec import CacheSpec
from weft.config import EngineConfig
from weft.graph.capture_sizes import CaptureSizes
from weft.messages import ModelOutput, SchedulerOutput
from weft.models.decoder import CausalLM
from weft.parallel.tensor_parallel import TensorParallel
from weft.runner.media_inputs import MediaInputs
from weft.runner.results import PendingStep
from weft.runner.step_runner import StepRunner
from weft.runner.warmup import StepLimits


class StartingRunner(Protocol):
    """The part of ``ModelRunner`` that its start uses. Attributes are those of ``ModelRunner``."""

    config: EngineConfig
    spec: CacheSpec
    plan: CachePlan
    device: torch.device
    tp: TensorParallel
    model: CausalLM
    media: MediaInputs | None
    steps: StepRunner

    def attach(self, plan: CachePlan) -> None:
        """Make caches, rows and buffers of the planned sizes."""
        ...

    def drop_steps(self) -> None:
        """Free the caches and buffers of an attempt to run a step."""
        ...

    def limit_steps(self, limits: StepLimits) -> None: ...

    def capture_sizes(self, plan: CachePlan) -> CaptureSizes: ...

    def run(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        """Run one step and wait for its results."""
        ...

    def launch(self, scheduler_output: SchedulerOutput) -> PendingStep: ...
