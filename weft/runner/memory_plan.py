"""The plan of a rank's memory: the largest step that fits, and caches in what the step leaves.

Job: measure the device memory of the largest step, and size the caches so that every rank can run it. Does not know:
what a step computes, how caches are used.
"""

import logging
from dataclasses import replace
from functools import partial

import torch

from weft.cache.plan import CachePlan, mib, plan_for
from weft.errors import CapacityError
from weft.messages import RowSampling
from weft.ops.attention import expansion_bytes
from weft.runner.memory import GRAPH_BYTES, gpu_cache_budget, largest_that_fits, peak_bytes
from weft.runner.starting import StartingRunner
from weft.runner.warmup import StepLimits, step

logger = logging.getLogger(__name__)


def plan_memory(runner: StartingRunner) -> CachePlan:
    """Plan the caches with the largest step that leaves memory for them. The runner's config gets its limits."""
    config, reasons = runner.config, {}
    wanted = StepLimits(config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len)
    # A GPU may have memory for a smaller step, and left over for caches; on a CPU no step is in their way.
    short = (torch.OutOfMemoryError, CapacityError) if runner.device.type == "cuda" else (torch.OutOfMemoryError,)
    limits, plan = largest_that_fits(wanted, lambda limits: _plan_within(runner, limits), short)
    for name in ("max_num_batched_tokens", "max_num_seqs"):
        if (found := getattr(limits, name)) < (given := getattr(wanted, name)):
            reasons[name] = f"clamped to {found}: a step of {given} does not fit into the device's memory"
    if not reasons:
        return plan
    return replace(plan, reasons=plan.reasons | reasons, max_num_batched_tokens=limits.max_num_batched_tokens)


def _plan_within(runner: StartingRunner, limits: StepLimits) -> CachePlan:
    """Plan the caches if no step is larger than ``limits``."""
    runner.drop_steps()
    runner.limit_steps(limits)
    plan = plan_for(runner.config, runner.spec, runner.tp.least(_budget_of_all(runner)))
    return plan if runner.media is None else _with_encoder_cache(plan, runner.media.embeddings)


def _with_encoder_cache(plan: CachePlan, embeddings: torch.Tensor) -> CachePlan:
    """Add the embeddings of images, which have their memory already."""
    tokens, features, size = embeddings.shape
    reason = f"embeddings of {tokens} tokens of images, {features} of {size} numbers each: {mib(embeddings.nbytes)}"
    return replace(plan, encoder_bytes=embeddings.nbytes, reasons=plan.reasons | {"encoder_cache_size": reason})


def _budget_of_all(runner: StartingRunner) -> int:
    """Return the bytes for caches on this rank, if no rank lacks memory for a step.

    Each rank measures alone: if a rank failed in the middle of a common step, the others would wait forever.

    Raises:
        OutOfMemoryError, CapacityError: on every rank.
    """
    error: Exception | None = None
    budget = 0
    try:
        with runner.tp.alone():
            budget = cache_budget(runner)
    except (torch.OutOfMemoryError, CapacityError) as found:
        error = found
    if not runner.tp.least(error is None):
        raise error or torch.OutOfMemoryError("another rank has too little memory")
    return budget


def cache_budget(runner: StartingRunner) -> int:
    """Return the bytes for caches: the setting on a CPU; on a GPU the rest of the share that Weft may use."""
    config = runner.config
    if runner.device.type == "cpu":
        return int(config.cpu_cache_gib * 2**30)
    step_bytes = _measure_step_bytes(runner)
    free, total = torch.cuda.mem_get_info(runner.device)
    budget = gpu_cache_budget(
        free_bytes=free,
        total_bytes=total,
        utilization=config.gpu_memory_utilization,
        step_bytes=step_bytes,
        graph_bytes=GRAPH_BYTES if config.cuda_graph_mode != "NONE" else 0,
    )
    logger.info("memory: step %.2f GiB, caches %.2f GiB", step_bytes / 2**30, budget / 2**30)
    return budget


def _measure_step_bytes(runner: StartingRunner) -> int:
    """Return the device memory that the largest steps take besides weights and caches."""
    peak = peak_bytes(partial(run_largest_steps, runner), runner.device)
    runner.drop_steps()
    # No step of these has enough tokens behind a context for latents to be expanded.
    # A layer that attends to a selection has a cost for each token, and expands none.
    layers = [layer for layer in runner.spec.layers.values() if not layer.flops_per_token]
    if any(tensor.name == "latent" for layer in layers for tensor in layer.paged):
        peak += expansion_bytes(runner.device, backend=runner._backend)
    return peak


def run_largest_steps(runner: StartingRunner) -> None:
    """Run a step of the most tokens, and one of the most sequences that decode at the longest context.

    The caches are tiny: every sequence uses page 0 and the same slot. The results are meaningless, their sizes right.
    """
    config, count = runner.config, runner.config.max_num_seqs
    runner.attach(CachePlan(2, 2, count, config.max_model_len, 0, {}))
    slot, sampling = int(runner.spec.has_states), RowSampling(temperature=1.0, top_p=0.9)
    share = config.max_num_batched_tokens // count
    length = max(1, min(share, config.max_model_len))
    runner.run(step([(0, length)] * count, slot, sampling))
    if config.max_model_len > length:
        num_drafts = min(config.num_drafts_at(count), min(config.max_model_len, share) - 1)
        last = config.max_model_len - 1 - num_drafts
        runner.run(step([(last, 1)] * count, slot, sampling, num_drafts))
    if runner.media is not None:
        with torch.inference_mode():
            runner.media.run_largest()
