"""Products whose rows have the same bits for any number of rows: their time beside ``weft.ops.linear.linear``.

Usage: ``python -m benchmarks.kernels.invariant`` times what the operation chooses (``$OUT/invariant.json``). ``--tune``
also times candidates of kernels and tiles. It writes the fastest of each size to ``$OUT/invariant_linear_h200.json``.
Every candidate must have the bits of the first one. All is timed behind a norm, as in ``benchmarks/kernels/linear.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.linear import DTYPE, Bench, Size, _compile_offline
from benchmarks.kernels.measure import DEVICE, ON_GPU, write_json
from weft.ops.linear import invariant
from weft.ops.linear.invariant import Choice, Tile, order_of, run
from weft.ops.linear.skinny import linear_parts_triton, linear_silu_mul_triton, linear_triton
from weft.ops.triton import early_launch
from weft.ops.triton.launch import Kernel, launches_handled

SIZES = [
    Size("A qkv", 4096, 1024), Size("A o", 1024, 2048), Size("A gate_up+silu", 6144, 1024, True),
    Size("A down", 1024, 3072), Size("A lm_head", 151936, 1024), Size("B qkv", 9216, 2048), Size("B o", 2048, 4096),
    Size("B gdn in", 12352, 2048), Size("B router", 520, 2048), Size("B lm_head", 151936, 2048),
]  # fmt: skip
TOKENS: tuple[int, ...] = tuple(2**i for i in range(14))
PARTS = ("A o", "A down", "B o")
"""Products whose last sum the following norm may add."""
if not ON_GPU:
    SIZES, TOKENS = [Size("plain", 64, 256), Size("silu", 64, 256, True)], (1, 64)
MOST_SAMPLED = 256
"""Rows of the head's largest product."""

_FEW = [(64, 128, 4, 4), (64, 128, 4, 6), (64, 64, 4, 6), (64, 256, 4, 3), (32, 128, 4, 6), (16, 256, 2, 4)]
_TALL = [(128, 64, 8, 4), (128, 128, 8, 4), (128, 64, 4, 6), (256, 64, 8, 4), (256, 64, 8, 3)]
"""For weights of many rows: few programs read the inputs."""
_HELD = [(64, 128, 4), (32, 128, 4), (16, 128, 4)]
_MANY = [
    (128, 128, 64, 4, 4, 8), (128, 128, 64, 8, 4, 8), (128, 64, 64, 4, 4, 8), (128, 64, 128, 4, 4, 8),
    (64, 64, 128, 4, 5, 8), (64, 128, 128, 4, 4, 8), (256, 128, 64, 8, 3, 8), (128, 256, 64, 8, 3, 8),
]  # fmt: skip


def candidates(size: Size, tokens: int) -> Iterator[Choice]:
    """Kernels and tiles; outputs, tokens, inner elements, warps, stages."""
    order, double = order_of(size.rows, size.inner), 2 if size.silu_mul else 1
    if not ON_GPU:
        yield from (Choice("few", Tile(16, 16, 64, 4, 2)), Choice("many", Tile(32, 16, 64, 4, 2)))
        return
    if tokens <= (256 if order.splits == 1 else 2048):
        for most in sorted({max(16, min(limit, tokens)) for limit in (32, 64, 128)}):
            for rows, inner, warps, stages in [*_FEW, *(_TALL if size.rows >= 8192 or tokens > 32 else ())]:
                fits = stages * inner * (rows + most) * 2 <= 224 << 10
                if fits and order.span % inner == 0 and most >= tokens // 16:
                    yield Choice("few", Tile(rows, most, inner, warps, stages))
    if tokens <= 32:
        for rows, inner, warps in _HELD:
            if order.span * (rows + max(16, tokens)) * 2 <= 200 << 10:
                yield Choice("few", Tile(rows, max(16, tokens), inner, warps, 1, held=True))
    if tokens >= 128:
        for rows, most, inner, warps, stages, group in _MANY:
            if order.span % inner == 0 and (order.splits == 1 or rows * most <= 16384):
                yield Choice("many", Tile(rows * double, most, inner, warps, stages, group=group))
    if tokens >= 512 and order.splits == 1:
        yield Choice("hopper", Tile(256, 192, 64, 8, 4))


def _compile(job: tuple[Size, int, Choice]) -> None:
    size, tokens, choice = job
    early_launch._can_launch_early = lambda device: True

    def compile_only(kernel: Kernel, grid: Any, args: Any, options: dict[str, Any]) -> None:
        kernel.run(*args, grid=grid, warmup=True, **options)

    x, weight = torch.empty(tokens, size.inner, dtype=DTYPE), torch.empty(size.rows, size.inner, dtype=DTYPE)
    try:
        with launches_handled(compile_only):
            run(x, weight, None, choice, order_of(size.rows, size.inner), gated=size.silu_mul)
    except Exception as problem:
        print(f"{size.name} {tokens} {choice}: {type(problem).__name__} {str(problem)[:80]}")


def now(size: Size) -> Callable[[Tensor, Tensor], Any]:
    """Return the product that runs without the mode."""
    if size.silu_mul:
        return linear_silu_mul_triton
    return (lambda x, w: linear_parts_triton(x, w, None)) if size.name in PARTS else linear_triton


def tune(bench: Bench, tokens: int) -> dict[str, Any]:
    """The fastest candidate of a size, and all that were timed."""
    size, tried, first = bench.size, [], None
    order = order_of(size.rows, size.inner)
    x = torch.randn(tokens, size.inner, device=DEVICE).to(DTYPE)
    for choice in candidates(size, tokens):
        try:
            out = run(x, bench.weights[0], None, choice, order, gated=size.silu_mul)
            first = out if first is None else first
            assert not ON_GPU or torch.equal(out, first), "other bits"
            call = partial(run, bias=None, choice=choice, order=order, gated=size.silu_mul)
            tried.append((bench.us(x, call), choice))
        except Exception as problem:  # a tile may not fit
            print(f"{size.name} {tokens} {choice}: {type(problem).__name__} {str(problem)[:80]}")
    us, choice = min(tried, key=lambda entry: entry[0])
    return {"kernel": choice.kernel, "tile": list(choice.tile), "tuned_us": round(us, 2), "tried": sorted(tried)[:8]}


def write_table(rows: list[dict[str, Any]]) -> None:
    """The fastest choice of each size, one a line."""
    if (folder := os.environ.get("OUT")) is None:
        return
    columns = ("rows", "inner", "silu_mul", "tokens", "kernel", "tile", "tuned_us", "linear_us")
    lines = ",\n".join(json.dumps({key: row[key] for key in columns}) for row in rows)
    device = torch.cuda.get_device_name() if ON_GPU else "cpu"
    text = f'{{"device": {json.dumps(device)}, "torch": {json.dumps(torch.__version__)}, "rows": [\n{lines}\n]}}\n'
    (Path(folder) / "invariant_linear_h200.json").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--seconds", type=float, default=3600.0, help="start no size after this time")
    args = parser.parse_args()
    began = time.perf_counter()
    todo = [
        (size, tokens) for size in SIZES for tokens in args.tokens if "head" not in size.name or tokens <= MOST_SAMPLED
    ]
    if args.tune:
        jobs = [(size, tokens, choice) for size, tokens in todo for choice in candidates(size, tokens)]
        if ON_GPU:
            start = time.perf_counter()
            distinct = {
                (s.inner, s.silu_mul, s.rows % 16, order_of(s.rows, s.inner), 2 * t <= c.tile.tokens, c): (s, t, c)
                for s, t, c in jobs
                if c.kernel != "hopper"
            }
            with ProcessPoolExecutor(16, get_context("spawn"), initializer=_compile_offline) as pool:
                list(pool.map(_compile, distinct.values(), chunksize=2))
            print(f"compiled {len(distinct)} kernels in {time.perf_counter() - start:.0f} s", flush=True)
    rows, bench = [], None
    for size, tokens in todo:
        if time.perf_counter() - began > args.seconds:
            break
        bench = bench if bench is not None and bench.size == size else Bench(size)
        best = tune(bench, tokens) if args.tune else {}
        x = torch.randn(tokens, size.inner, device=DEVICE).to(DTYPE)
        plain = bench.us(x, now(size))
        own = partial(invariant.invariant_linear_triton, bias=None, gated=size.silu_mul)
        if size.name in PARTS:
            own = partial(invariant.invariant_linear_parts_triton)
        fixed = bench.us(x, own)
        shape = {"rows": size.rows, "inner": size.inner, "silu_mul": size.silu_mul}
        times = {"linear_us": round(plain, 2), "invariant_us": round(fixed, 2)}
        rows.append({"name": size.name, **shape, "tokens": tokens, **times, **best})
        figures = f"floor {bench.floor_us(tokens):8.2f} linear {plain:8.2f} invariant {fixed:8.2f}"
        tuned = " ".join(map(str, [*best.values()][:3]))
        print(f"{size.name:16} {tokens:5} {figures} {fixed / (plain or 1.0):5.2f}  {tuned}", flush=True)
    write_json("invariant.json", rows)
    if args.tune:
        write_table(rows)


if __name__ == "__main__":
    main()
