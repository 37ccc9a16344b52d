"""Memory for the caches: the budget of a GPU, and the cache tensors.

How a budget is shared between the caches: ``cache/plan.py``.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

import numpy as np
import torch

from weft.cache.plan import CachePlan
from weft.cache.spec import CacheSpec
from weft.config import EngineConfig
from weft.config.layer_spec import CacheTensor
from weft.errors import CapacityError
from weft.forward_context import LayerCache
from weft.runner.warmup import StepLimits

logger = logging.getLogger(__name__)

GRAPH_BYTES = 2 * 2**30
"""Device memory set aside for captured graphs; sizes that would need more are not captured."""


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Device memory that ``run`` takes at its peak, beside what is allocated. On a CPU ``run`` is not called: 0."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def gpu_cache_budget(
    *, free_bytes: int, total_bytes: int, utilization: float, step_bytes: int, graph_bytes: int
) -> int:
    """Bytes that the caches of a GPU get.

    Args:
        free_bytes, total_bytes: of the device, with the weights loaded.
        utilization: share of the whole device that Weft may use.
        step_bytes: what the largest step needs beside weights and caches.
        graph_bytes: set aside for captured graphs.

    Raises:
        CapacityError: nothing is left.
    """
    reserved = (1.0 - utilization) * total_bytes
    budget = int(free_bytes - reserved - step_bytes - graph_bytes)
    if budget <= 0:
        used = total_bytes - free_bytes
        raise CapacityError(
            f"no memory is left for caches: of {_gib(total_bytes)}, weights and other users hold {_gib(used)}, the "
            f"largest step needs {_gib(step_bytes)}, graphs {_gib(graph_bytes)}, and gpu_memory_utilization="
            f"{utilization} leaves {_gib(int(reserved))} untouched; raise gpu_memory_utilization, or lower "
            "max_num_batched_tokens or max_num_seqs (a smaller step)"
        )
    return budget


T = TypeVar("T")


def largest_that_fits(
    limits: StepLimits, attempt: Callable[[StepLimits], T], out_of_memory: tuple[type[Exception], ...]
) -> tuple[StepLimits, T]:
    """``attempt(limits)`` with the first of ``limits`` and ever smaller ones that does not raise ``out_of_memory``.

    Raises:
        The last attempt's error, where even the smallest does not fit.
    """
    while True:
        smaller = limits.smaller()
        try:
            return limits, attempt(limits)
        except out_of_memory as error:
            if smaller is None:
                raise
            logger.warning(
                "a step of max_num_batched_tokens=%d and max_num_seqs=%d does not fit into the device's memory (%s); "
                "trying %d and %d",
                limits.max_num_batched_tokens, limits.max_num_seqs, str(error).split(". ")[0],
                smaller.max_num_batched_tokens, smaller.max_num_seqs,
            )  # fmt: skip
        limits = smaller


@contextmanager
def explained_out_of_memory(stage: str, config: EngineConfig) -> Iterator[None]:
    """Turn the device's out-of-memory error of a start-up stage into one that names consumers and remedies.

    Raises:
        CapacityError: in place of torch's error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        ours = torch.cuda.memory_allocated()
        raise CapacityError(
            f"out of GPU memory at start, at: {stage}. Of {_gib(total)}, this process holds {_gib(ours)} in tensors "
            f"and {_gib(free)} are free; the rest belongs to other users of the device. Settings that need less: "
            f"gpu_memory_utilization (now {config.gpu_memory_utilization}), max_num_batched_tokens (now "
            f"{config.max_num_batched_tokens}), max_num_seqs (now {config.max_num_seqs}), dtype (now {config.dtype})"
        ) from error


def allocate_caches(spec: CacheSpec, plan: CachePlan, device: torch.device) -> dict[str, LayerCache]:
    """The cache tensors of every layer, zero-filled (padding rows read page 0 and slot 0)."""

    def tensors(of: Sequence[CacheTensor], *entries: int) -> dict[str, torch.Tensor]:
        return {t.name: _zeros((*entries, *t.shape), getattr(torch, t.dtype), device) for t in of}

    return {
        name: tensors(layer.paged, plan.num_pages, spec.page_size) | tensors(layer.states, plan.num_slots)
        for name, layer in spec.layers.items()
    }


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on the CPU from memory that the system hands out zeroed and only when touched, which takes no time."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    block = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(block).view(dtype).view(shape)


def wait_for_steps() -> None:
    """Wait until the device has done all queued work.

    Kernels read a step's inputs from pinned memory and write its results there. torch does not track these accesses
    and reuses the memory as soon as its tensors are freed.
    """
    if torch.cuda.is_initialized():
        with suppress(RuntimeError):  # the device has failed, and reads nothing any more
            torch.cuda.synchronize()


def release_workspaces() -> None:
    """Give back what the matrix library keeps per stream (32 MiB each on Hopper); the next engine uses others."""
    if torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()  # torch has no public name for it


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"
