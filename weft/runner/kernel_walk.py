"""The walk that compiles every kernel of a model before it serves: each kind of step once, on the smallest caches.

While kernels compile, launches do not run, or compute meaningless results (``warmup.compiled_meanwhile``).
"""

from collections.abc import Callable, Iterable

import torch

from weft.cache.plan import CachePlan
from weft.graph.batch_descriptor import BatchDescriptor
from weft.messages import SchedulerOutput
from weft.runner.starting import StartingRunner
from weft.runner.warmup import StepLimits, covering_steps, image_step, one_layer_of_each_kind, slow_steps


@torch.inference_mode()
def walk_kernels(runner: StartingRunner) -> None:
    """Run every kind of step. The steps that take longest to compile go first."""
    config = runner.config
    runner.plan = CachePlan(2, 2, config.max_num_seqs, config.max_model_len, 0, {})
    runner.attach(runner.plan)
    limits = StepLimits(config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len)
    slot = int(runner.spec.has_states)
    with one_layer_of_each_kind(runner.model.model):
        _walk(runner, slow_steps(limits, slot))
        walk_captured_steps(runner)
        _walk(runner, covering_steps(limits, slot))
        if runner.steps.transfers is not None:
            runner.steps.transfers.walk()
        if runner.media is not None:
            runner.media.run_smallest()
            runner.launch(image_step(slot, runner.media.merge))
    del runner.steps


def _walk(runner: StartingRunner, steps: Iterable[SchedulerOutput]) -> None:
    for scheduler_output in steps:
        runner.launch(scheduler_output)
        runner.steps.rows.last_token.zero_()  # what was sampled may be no token


def walk_captured_steps(runner: StartingRunner) -> None:
    """Run every size that is captured: a capture must launch no kernel that is not compiled.

    The largest size of each kind goes first: its kernels take longest to compile.
    """
    sizes, functions = runner.capture_sizes(runner.plan), runner.steps.functions
    kinds: tuple[tuple[Iterable[int], Callable[[int], BatchDescriptor], Callable[[int], object]], ...] = (
        ({*sizes.forward, *sizes.pieces}, functions.mixed_shape, functions.forward),
        (sizes.decode, functions.decode_shape, functions.decode),
        (sizes.verification, functions.verification_shape, functions.verify),
        (sizes.samples, functions.mixed_shape, functions.sample),
    )
    for captured, shape_of, function in kinds:
        for size in sorted(captured, reverse=True):
            functions.builder.send_padding(shape_of(size))
            function(size)
            runner.steps.rows.last_token.zero_()
