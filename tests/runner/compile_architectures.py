"""Compiles a model's kernels for NVIDIA architectures that are not there, and prints the shared memory of each kernel.

    python -m tests.runner.compile_architectures FOLDER SETTINGS CAPABILITY[:MOST] ... [--assemble]

A program of its own, because kernels are interpreted in the tests' process. The kernels are those of a start on a GPU
without Gluon and without tables. ``SETTINGS`` are the engine's, as JSON. ``86:3``: compile at most three variants of a
kernel for capability 8.6. Compilation ends at LLVM's IR before its optimisation, where shared memory is known, unless
``--assemble`` is given. It prints JSON: a kernel's module and name, capability, and its bytes of shared memory or the
error.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import llvm
from triton.compiler.compiler import make_backend
from triton.runtime.driver import driver

from tests.runner.compile_only import LIMITS, AbsentGpu, AbsentRanks, walked
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


def main(folder: str, settings: str, capabilities: list[tuple[int, float]], assemble: bool) -> None:
    found: list[dict[str, Any]] = []
    variants: Counter[str] = Counter()
    if not assemble:
        llvm.optimize_module = lambda *_: None

    def compile_for_all(src: Any, **options: Any) -> Any:
        name = f"{src.fn.__module__.removeprefix('weft.ops.')}.{src.fn.__name__}"
        variants[name] += 1
        for capability in (capability for capability, most in capabilities if variants[name] <= most):
            row = {"kernel": name, "capability": capability, "constants": str(src.constants)[:200]}
            try:
                row["shared"] = shared_bytes(src, capability, options.get("options") or {}, assemble=assemble)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {str(error)[-300:]}"
            found.append(row)
        return object()  # nobody launches it

    driver.set_active(AbsentGpu())
    launch._compiler = compile_for_all
    given = json.loads(settings)
    backend = Backend.INVARIANT_TRITON if given.get("deterministic") else Backend.TRITON
    model_runner.resolve_backend = lambda *_, **__: backend
    model_runner.compiled_meanwhile = walked
    model_runner.ModelRunner._capture_graphs = lambda self: None  # type: ignore[method-assign]
    config = resolve(
        model=folder, device="cpu", dtype="bfloat16", cpu_cache_gib=0.1, cuda_graph_mode="FULL", enable_overlap=True,
        load_format="dummy", piecewise_cuda_graph_max_tokens=LIMITS["max_num_batched_tokens"], **LIMITS, **given,
    )  # fmt: skip
    group = AbsentRanks(config.tensor_parallel_size)
    runner = model_runner.ModelRunner(config, tp=group if group.size > 1 else None)
    if runner.media is not None:
        with warmup._no_launches(), torch.inference_mode():
            runner.media.run_smallest()
    print(json.dumps(found))


def with_most(word: str) -> tuple[int, float]:
    """``86:3``: a capability, and how many variants of a kernel are compiled for it at most."""
    capability, _, most = word.partition(":")
    return int(capability), float(most or "inf")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("settings")
    parser.add_argument("capabilities", type=with_most, nargs="+")
    parser.add_argument("--assemble", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main(**vars(parsed()))
