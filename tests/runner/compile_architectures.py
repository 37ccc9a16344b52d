"""Compiles a model's kernels for NVIDIA architectures that are not there, and says what each needs of shared memory.

    python -m tests.runner.compile_architectures FOLDER QUANTIZATION CAPABILITY ...

A program of its own, because kernels are interpreted in the tests' process. The kernels are those of a start on a GPU
without Gluon and without tables. Compilation ends at LLVM's IR, where shared memory is known, unless the last argument
is ``--assemble``. It prints JSON: kernel, capability, and its bytes of shared memory or the error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.driver import driver

from tests.runner.compile_only import LIMITS, AbsentGpu
from weft.config import resolve
from weft.ops.backend import Backend
from weft.ops.triton import launch
from weft.runner import model_runner, warmup


def shared_bytes(src: Any, capability: int, options: dict[str, Any], *, assemble: bool) -> int:
    """Compile a kernel for a capability (86 is 8.6) and return its shared memory."""
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    parsed = backend.parse_options({k: v for k, v in options.items() if k in ("num_warps", "num_stages", "maxnreg")})
    if assemble:
        return int(triton.compile(src, target=target, options=parsed.__dict__).metadata.shared)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, parsed, src.language)
    module = src.make_ir(target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context)
    metadata: dict[str, Any] = {"target": target, **parsed.__dict__}
    for name in ("ttir", "ttgir", "llir"):
        module = stages[name](module, metadata)
    return int(metadata["shared"])


def main(folder: str, quantization: str, *rest: str) -> None:
    capabilities = [int(word) for word in rest if word != "--assemble"]
    found: list[dict[str, Any]] = []

    def compile_for_all(src: Any, **options: Any) -> Any:
        name = src.fn.__name__
        for capability in capabilities:
            row = {"kernel": name, "capability": capability, "constants": str(src.constants)[:200]}
            try:
                given = options.get("options") or {}
                row["shared"] = shared_bytes(src, capability, given, assemble="--assemble" in rest)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {str(error)[-300:]}"
            found.append(row)
        return object()  # nobody launches it

    @contextmanager
    def walked(walk: Callable[[], None], device: torch.device) -> Iterator[None]:
        with warmup._no_launches():
            walk()
        yield

    driver.set_active(AbsentGpu())
    launch._compiler = compile_for_all
    model_runner.resolve_backend = lambda *_, **__: Backend.TRITON  # type: ignore[assignment]
    model_runner.compiled_meanwhile = walked
    model_runner.ModelRunner._capture_graphs = lambda self: None  # type: ignore[method-assign]
    config = resolve(
        model=folder, device="cpu", dtype="bfloat16", cpu_cache_gib=0.1, cuda_graph_mode="FULL", enable_overlap=True,
        quantization=None if quantization == "none" else quantization, load_format="dummy",
        piecewise_cuda_graph_max_tokens=LIMITS["max_num_batched_tokens"], **LIMITS,
    )  # fmt: skip
    model_runner.ModelRunner(config)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
