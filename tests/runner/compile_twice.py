"""Compiles four kernels for a GPU that is not there, as a start does:

    python -m tests.runner.compile_twice [broken | asleep]

There is one more kernel, which is broken, or the processes fall asleep instead of compiling.

A program of its own, because kernels are interpreted in the tests' process. It prints counts as JSON: the kernels, the
kernels compiled in this process, the kernels given to other processes, and the child processes still running. Every
process that compiles a kernel adds a line to the file ``compiled`` in the cache folder.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.driver import driver

from tests.runner.compile_only import AbsentGpu
from weft.ops.triton.launch import jit
from weft.runner import compile_processes, warmup


@triton.jit
def _plus(x, y):  # type: ignore[no-untyped-def]
    return x + y


@jit
def _kernel(x, y, COMBINE: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)
    tl.store(y + at, COMBINE(tl.load(x + at), 1.0))


_FACTOR = tl.constexpr(2)


@triton.jit
def _scaled(x):  # type: ignore[no-untyped-def]
    """Triton's keys of kernels that call this depend on the order in which they were met."""
    return x * _FACTOR


@jit
def _scaling_kernel(x, y, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)
    tl.store(y + at, _scaled(tl.load(x + at)))


@jit
def _adding_kernel(x, y, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)
    tl.store(y + at, tl.load(y + at) + _scaled(tl.load(x + at)))


@jit
def _broken_kernel(x, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x + tl.arange(0, SIZE), unknown)  # type: ignore[name-defined]  # noqa: F821


def _sleep(*args: Any) -> None:
    time.sleep(60)


def main(what: str = "") -> None:
    if what == "asleep":
        compile_processes._compile, compile_processes.STUCK_S = _sleep, 0.5
    driver.set_active(AbsentGpu())
    compile_processes.compile_seconds = lambda name: float(name == "_adding_kernel")  # in another order
    compiled_here: list[bool] = []

    def note(*, cache_hit: bool, **rest: Any) -> None:
        compiled_here.append(not cache_hit)
        if not cache_hit:
            with (Path(triton.knobs.cache.dir) / "compiled").open("a") as file:
                file.write("a kernel\n")

    triton.knobs.compilation.listener = note
    given_away: list[Any] = []
    elsewhere = compile_processes.CompileProcesses._compile_in_child

    def noted(self: compile_processes.CompileProcesses, src: Any, options: dict[str, Any]) -> Any:
        given_away.append(src)
        return elsewhere(self, src, options)

    compile_processes.CompileProcesses._compile_in_child = noted  # type: ignore[method-assign]
    x = torch.ones(64)

    def walk() -> None:
        for size in (32, 64):
            _kernel[(1,)](x, x, COMBINE=_plus, SIZE=size)
        _scaling_kernel[(1,)](x, x, SIZE=64)
        _adding_kernel[(1,)](x, x, SIZE=64)
        if what == "broken":
            _broken_kernel[(1,)](x, SIZE=64)

    found: dict[str, Any] = {}
    try:
        with warmup.compiled_meanwhile(walk, torch.device("cpu")):
            pass
    except Exception as error:
        found["error"] = type(error).__name__
    found |= {"kernels": len(compiled_here), "compiled_here": sum(compiled_here), "given_away": len(given_away)}
    found["left"] = len(multiprocessing.active_children())
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
