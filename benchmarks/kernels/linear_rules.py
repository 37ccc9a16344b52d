"""bfloat16 products of few rows by configuration, of weights that no table has: the basis of ``heuristic_config``.

Usage: ``python -m benchmarks.kernels.linear_rules [--seconds 100]`` on a GPU writes ``$OUT/linear-rules-h200.json``,
and with ``--narrow`` ``$OUT/linear-rules-narrow-h200.json``: weights of few rows, such as routers and the projections
inside a Mamba layer. A file has the time of the rule's choice, of the candidates, and of the matrix library for each
weight and number of tokens. Kernels are compiled first, in several processes. Without a GPU nothing is measured.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.measure import COPY_BYTES_PER_S, DEVICE, ON_GPU, time_us, write_json
from weft.ops.backend import Backend
from weft.ops.linear import linear, linear_silu_mul
from weft.ops.linear.skinny import skinny_linear_triton
from weft.ops.linear.skinny_choice import Config
from weft.ops.triton.sizes import MULTIPROCESSORS

WEIGHTS = {
    "27b.gate_up": (34816, 5120, True),
    "27b.down": (5120, 17408, False),
    "27b.qkv": (14336, 5120, False),
    "8b.down": (4096, 14336, False),
    "8b.qkv": (6144, 4096, False),
    "8b.out": (4096, 4096, False),
    "4b.gate_up": (19456, 2560, True),
    "4b.out": (2560, 4096, False),
    "30b-a3b.qkv": (5120, 2048, False),
}
"""Weights that the rule is learnt from: output rows, inner size, and whether SiLU and a product follow."""
HELD_OUT = {
    "70b/8.gate_up": (7168, 8192, True),
    "14b.qkv": (7168, 5120, False),
    "gpt-oss.out": (2880, 4096, False),
    "9b.down/2": (4096, 6144, False),
    "falcon.down": (5120, 21504, False),
}
"""Weights that the rule is checked on."""
NARROW = {
    "jamba-mini.x_proj": (288, 8192, False),
    "jamba-large.x_proj": (544, 16384, False),
    "deepseek-v3.router": (256, 7168, False),
    "qwen3-235b.router": (128, 4096, False),
    "70b/8.qkv": (1280, 8192, False),
    "jamba-mini/2.x_proj": (288, 4096, False),
    "qwen3-30b.router": (128, 2048, False),
    "qwen3.5-35b.router": (264, 2048, False),
    "lfm2.router": (32, 2048, False),
}
NARROW_HELD_OUT = {
    "glm-4.5.router": (160, 5120, False),
    "kimi-k2.kv_a": (576, 7168, False),
    "405b/8.qkv": (2304, 16384, False),
    "gpt-oss.router": (32, 2880, False),
    "qwen3.5-122b.router": (264, 3072, False),
    "granite-tiny.router": (64, 1536, False),
    "kimi-linear.router": (256, 2304, False),
}
SETS = {"": WEIGHTS | HELD_OUT, "narrow-": NARROW | NARROW_HELD_OUT}
ALL = SETS[""] | SETS["narrow-"]
TOKENS = (1, 4, 8, 32, 64)
LOOPS = ((64, 128, 4), (64, 128, 6), (64, 64, 6), (32, 128, 5), (128, 128, 3), (16, 256, 4))
"""Output rows of a program, inner elements of a step, and stages of the pipeline."""
ROTATED_BYTES = 160 << 20


def candidates(rows: int, inner: int, gated: bool, tokens: int) -> list[Config]:
    """Pipelines of several heights whose programs fill the GPU once or twice, and sums by multiply and add."""
    found: dict[Config, None] = {}
    if tokens <= 4:
        for height, step, warps in ((2, 2048, 8), (4, 2048, 8), (4, 1024, 4), (8, 1024, 4), (16, 2048, 8)):
            registers = height * min(step, inner) * (tokens + 2) // (32 * warps)
            splits = -(-inner * height * 2 // (65536 * warps // 4))
            if registers <= 400 and (splits == 1 or rows // height <= 4096):
                found[Config("sum", height, step, warps, splits=splits)] = None
    if tokens >= 2:
        lanes = max(16, tokens)
        for height, step, stages in LOOPS:
            blocks, warps = -(-rows // height), 2 if height == 16 else 4
            if (height == 16 and tokens > 8) or stages * step * (height + lanes) * 2 > 220 << 10:
                continue
            by_programs = {1 << max(0, round(n * MULTIPROCESSORS / blocks).bit_length() - 1) for n in (1, 2, 4)}
            for splits in sorted(by_programs | ({4, 8, 16} if blocks < MULTIPROCESSORS // 2 else set())):
                if splits == 1 or (inner // splits >= 4 * step and blocks <= 4096):
                    found[Config("dot", height, step, warps, stages, splits)] = None
    return list(found)


Case = tuple[str, int, Config]


def cases(names: Iterable[str]) -> Iterator[Case]:
    for name, tokens in itertools.product(names, TOKENS):
        yield from ((name, tokens, config) for config in candidates(*ALL[name], tokens))


def prepare(name: str, tokens: int, count: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Inputs, and ``count`` weights."""
    rows, inner, _ = ALL[name]
    weights = [torch.empty(rows, inner, device=DEVICE).normal_(std=inner**-0.5).bfloat16() for _ in range(count)]
    return torch.randn(tokens, inner, device=DEVICE).bfloat16(), weights


def compile_case(case: Case) -> str | None:
    """Compile one kernel; the reason if it does not fit."""
    name, tokens, config = case
    x, (weight,) = prepare(name, tokens, 1)
    try:
        skinny_linear_triton(x, weight, None, config, silu_mul=ALL[name][2])
    except Exception as problem:  # shared memory, most likely
        return f"{case}: {type(problem).__name__}"
    torch.cuda.synchronize()
    return None


def measure(name: str, tokens: int, failed: set[str]) -> dict[str, Any]:
    """Microseconds of one weight for one number of tokens."""
    rows, inner, gated = ALL[name]
    x, weights = prepare(name, tokens, max(2, ROTATED_BYTES // (rows * inner * 2)))
    operation = linear_silu_mul if gated else linear
    want = operation(x.double(), weights[0].double(), backend=Backend.TORCH)
    found = []
    for config in candidates(rows, inner, gated, tokens):
        if any(text.startswith(f"{(name, tokens, config)}:") for text in failed):
            continue
        calls = [partial(skinny_linear_triton, x, weight, None, config, silu_mul=gated) for weight in weights]
        error = ((calls[0]().double() - want).norm() / want.norm()).item()
        found.append((round(time_us(calls), 2) if error < 5e-3 else float("inf"), str(list(config))))
    rule = [partial(operation, x, weight, backend=Backend.TRITON) for weight in weights]
    return {
        "weight": name, "held_out": name in HELD_OUT | NARROW_HELD_OUT, "out": rows, "inner": inner, "gated": gated,
        "tokens": tokens,
        "floor_us": round(rows * inner * 2 / COPY_BYTES_PER_S * 1e6, 2), "rule_us": round(time_us(rule), 2),
        "library_us": round(time_us([partial(torch.mm, x, weight.t()) for weight in weights]), 2),
        "found": sorted(found),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--narrow", action="store_true", help="weights of few rows")
    parser.add_argument("--names", nargs="+", choices=list(ALL), help="only these weights")
    parser.add_argument("--seconds", type=float, default=100.0, help="begin no measurement after this time")
    args = parser.parse_args()
    kind = "narrow-" if args.narrow else ""
    names = args.names or list(SETS[kind])
    if not ON_GPU:
        print(f"{len(list(cases(names)))} kernels on a GPU; there is none here")
        return
    workers, spawn = min(24, os.cpu_count() or 1), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn) as processes:
        failed = {text for text in processes.map(compile_case, cases(names)) if text}
    end, rows = time.monotonic() + args.seconds, []
    for tokens, name in itertools.product((8, 32, 1, 64, 4), names):
        if time.monotonic() < end:
            rows.append(found := measure(name, tokens, failed))
            print(
                f"{name:14} {tokens:3} floor {found['floor_us']:7.2f} rule {found['rule_us']:7.2f} library "
                f"{found['library_us']:7.2f} best {found['found'][0]}", flush=True,
            )  # fmt: skip
            write_json(f"linear-rules-{kind}h200.json", rows)


if __name__ == "__main__":
    main()
