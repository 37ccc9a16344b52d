"""INT4 products of few rows on Hopper: kernels in Gluon, the kernel before, and a plain read of the same bytes.

Usage: ``python -m benchmarks.kernels.coded_few_rows``. Each candidate is checked against float64 and timed behind a
norm. Candidates are compiled first, in other processes. The results are written as soon as they exist (``$OUT``).
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.kernels.coded import (
    EXPERTS,
    LIMIT,
    SIZES,
    Bench,
    _shape_of,
    experts_of,
    matrix_of,
    moe_row,
    poisoned,
    run_dense,
)
from benchmarks.kernels.linear import DTYPE, Size, _compile_offline
from benchmarks.kernels.measure import COPY_BYTES_PER_S, DEVICE, error, write_json
from weft.ops.codes import CodedMatrix, dequantize_codes
from weft.ops.linear.coded import load_table, tile_by_rule
from weft.ops.linear.coded_few_rows_hopper import few_rows_hopper_product
from weft.ops.linear.few_rows import CodedRows
from weft.ops.moe import coded_pairs_hopper as pairs
from weft.ops.triton import early_launch
from weft.ops.triton.early_launch import early_launch as early
from weft.ops.triton.early_launch import enter
from weft.ops.triton.launch import Kernel, jit, launches_handled

TOKENS = (1, 8)
NAMES = ("F gdn in", "F o", "F qkv", "G gate_up+silu", "G down")
"""In the order of what is learned from each."""


@jit
def _read_kernel(words, out, count, STEPS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Read ``STEPS`` blocks of words. A write that never happens keeps the compiler from dropping the reads."""
    enter(EARLY)
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for step in tl.static_range(STEPS):
        at = (tl.program_id(0) * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        total |= tl.load(words + at, mask=at < count, other=0)
    found = tl.sum(total, 0)
    if found == 1:
        tl.store(out, found)


def read_words(x: Tensor, matrix: CodedMatrix, steps: int, block: int) -> None:
    words, count = matrix.words, matrix.words.numel()
    _read_kernel[(triton.cdiv(count, steps * block),)](
        words, words, count, STEPS=steps, BLOCK=block, num_warps=8, **early(words.device)
    )


def candidates(size: Size) -> Iterator[CodedRows]:
    splits = 2 if size.inner // 128 > 16 and size.rows <= 8192 else 1
    for rows, warps, held in ((32, 4, 3), (16, 4, 3), (16, 4, 4), (32, 8, 2), (16, 8, 2), (16, 16, 1)):
        yield CodedRows(rows, warps, held, splits)


EXPERT_SHAPES = [
    (CodedRows(32, 4, 3), CodedRows(32, 1, 2)), (CodedRows(16, 4, 4), CodedRows(32, 2, 2)),
    (CodedRows(32, 4, 4), CodedRows(32, 4, 1)), (CodedRows(32, 2, 4), CodedRows(64, 2, 2)),
]  # fmt: skip
"""Shapes to try, of the up product and of the down product."""


CHOSEN = mock.patch("benchmarks.kernels.coded.choose_tiles", lambda *given: None)
"""Tiles that are not given let the operation choose the kernel."""


def expert_rows(end: float) -> Iterator[dict[str, Any]]:
    """The experts of F: the kernel before, then each pair of shapes, checked against float64."""
    experts = EXPERTS[0]
    bench = Bench(lambda: experts_of(experts, "int4"), experts.num * experts.hidden * experts.width * 1.5)
    for tokens in (1, 3):
        with CHOSEN, mock.patch.object(pairs, "takes_pairs", lambda *matrices: False):
            row = moe_row(experts, tokens, "int4", bench, False)
        row["before_us"], row["tried"] = row.pop("us", float("nan")), []
        for up, down in EXPERT_SHAPES:
            if time.perf_counter() > end:
                break
            with CHOSEN, mock.patch.object(pairs, "UP", up), mock.patch.object(pairs, "DOWN", down):
                found = moe_row(experts, tokens, "int4", bench, False)
            row["wrong"] += found["wrong"]
            row["tried"] += [(found["us"], (up, down))] if "us" in found else []
        row["tried"].sort(key=lambda entry: entry[0])
        yield row


def run(x: Tensor, matrix: CodedMatrix, size: Size, config: CodedRows) -> Tensor:
    width = size.rows // 2 if size.silu_mul else size.rows
    if config.splits > 1:
        out = torch.empty(config.splits, x.shape[0], width, dtype=torch.float32, device=x.device)
    else:
        out = torch.empty(x.shape[0], width, dtype=x.dtype, device=x.device)
    few_rows_hopper_product(x, matrix, None, out, config, silu_mul=size.silu_mul)
    return out


def _compile(job: tuple[Size, CodedRows]) -> None:
    size, config = job
    early_launch._can_launch_early = lambda device: True

    def compile_only(kernel: Kernel, grid: Any, args: Any, options: dict[str, Any]) -> None:
        kernel.run(*args, grid=grid, warmup=True, **options)

    try:
        with launches_handled(compile_only):
            run(torch.empty(1, size.inner, dtype=DTYPE), _shape_of(size.rows, size.inner, "int4"), size, config)
    except Exception as problem:
        print(f"{size.name} {config}: {type(problem).__name__} {str(problem)[:80]}", flush=True)


def rows_of(size: Size, end: float) -> Iterator[dict[str, Any]]:
    bench = Bench(lambda: matrix_of(size.rows, size.inner, "int4"), size.rows * size.inner / 2)
    matrix = bench.weights[0]
    num_bytes = matrix.words.numel() * 4 + matrix.scales.numel() * 2
    if time.perf_counter() > end:
        return
    for tokens in TOKENS:
        x = torch.randn(tokens, size.inner, device=DEVICE).to(DTYPE)
        want = x.double() @ dequantize_codes(matrix).double().T
        if size.silu_mul:
            want = F.silu(want[:, : size.rows // 2]) * want[:, size.rows // 2 :]
        row: dict[str, Any] = {"name": size.name, "rows": size.rows, "inner": size.inner, "tokens": tokens}
        row |= {"floor_us": num_bytes / COPY_BYTES_PER_S * 1e6, "norm_us": bench.norm_us(x), "wrong": [], "tried": []}
        reads = {
            f"{steps} x {block}": bench.us(x, partial(read_words, steps=steps, block=block))
            for steps, block in ((2, 4096),)
        }
        row["read_us"], row["reads"] = min(reads.values()), reads
        before = load_table().get((size.rows, size.inner, size.silu_mul), {}).get(8) or tile_by_rule(
            size.rows, size.inner, tokens
        )
        row["before_us"] = bench.us(x, partial(run_dense, size=size, config=before))
        for config in candidates(size):
            if time.perf_counter() > end:
                break
            try:
                with poisoned():
                    got = run(x, matrix, size, config)
                worst = error(got.double().sum(0) if config.splits > 1 else got, want)
                if not worst <= LIMIT:
                    row["wrong"].append((config, worst))
                    continue
                row["tried"].append((round(bench.us(x, partial(run, size=size, config=config)), 2), config))
            except Exception as problem:
                row["wrong"].append((config, f"{type(problem).__name__} {str(problem)[:80]}"))
        row["tried"].sort(key=lambda entry: entry[0])
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    end, rows = time.perf_counter() + args.seconds, []
    sizes = [size for name in NAMES for size in SIZES if size.name == name]
    with ProcessPoolExecutor(
        len(os.sched_getaffinity(0)), mp_context=get_context("fork"), initializer=_compile_offline
    ) as pool:
        list(pool.map(_compile, [(size, config) for size in sizes for config in candidates(size)]))
        print(f"compiled by {end - time.perf_counter():.0f} s before the end", flush=True)
        for row in chain(expert_rows(end), *(rows_of(size, end) for size in sizes)):
            rows.append(row)
            numbers = {key: round(row[key], 2) for key in ("floor_us", "norm_us", "read_us", "before_us") if key in row}
            print(row["name"], row["tokens"], numbers, row["wrong"][:2], flush=True)
            for found in row["tried"][:5]:
                print("   ", found, flush=True)
            write_json("coded-few-rows.json", rows)


if __name__ == "__main__":
    main()
