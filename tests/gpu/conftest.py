"""Shared helpers of the GPU tests: exact float32 matrix products, and a counter of compiled kernels.

Tests here state what only a GPU can show; everything else is tested on the CPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from weft.runner import memory_plan
from weft.runner.memory import gpu_cache_budget

MOST_CACHE_BYTES = 4 * 2**30


@pytest.fixture(autouse=True)
def _exact_float32() -> Iterator[None]:
    """No TF32 in torch's products, so that float32 results can be compared with the CPU's."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(autouse=True, scope="session")
def _small_caches() -> Iterator[None]:
    """No engine whose caches have no given size takes the memory of the tests that run beside it."""

    def budget(**sizes: Any) -> int:
        return min(gpu_cache_budget(**sizes), MOST_CACHE_BYTES)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_plan, "gpu_cache_budget", budget)
        yield


@pytest.fixture(autouse=True)
def _free_memory() -> Iterator[None]:
    """Memory of an engine is given back before the next one measures what is free."""
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def compiled_kernels() -> Iterator[list[str]]:
    """The names of the Triton kernels that are compiled, or loaded from disk, in the body."""
    import triton

    names: list[str] = []

    def note(*, repr: str, **rest: Any) -> None:
        names.append(repr)

    before: Callable[..., Any] | None = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = note
    try:
        yield names
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
