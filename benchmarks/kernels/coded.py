"""Coded (INT4, MXFP4) products on the GPU: time beside bf16's matrix library and the floor, and the tuner of tables.

Usage: ``python -m benchmarks.kernels.coded`` times what the operations choose. ``--tune`` checks candidates against
float64, times those that pass, and writes the fastest of each size into ``$OUT/coded_linear_h200.json`` and
``$OUT/coded_moe_h200.json``, to be copied beside the kernels. Results are written as soon as they exist; ``--seconds``
ends the run. Without a GPU everything is rehearsed on tiny shapes under the interpreter.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.linear import DTYPE, ROTATED_BYTES, Size, _compile_offline
from benchmarks.kernels.measure import COPY_BYTES_PER_S, DEVICE, MATRIX_FLOP_PER_S, ON_GPU, error, graph_ms, write_json
from weft.ops.codes import CodedMatrix, Packing, dequantize_codes
from weft.ops.linear import coded
from weft.ops.linear.coded import (
    CodedTile,
    Widened,
    choose_config,
    coded_linear_silu_mul_triton,
    coded_linear_triton,
)
from weft.ops.moe import coded_experts
from weft.ops.moe.blocks import UNGROUPED_TOKENS, Tile, Tiles
from weft.ops.moe.coded_experts import choose_tiles, coded_fused_moe_triton
from weft.ops.norm.kernels import rms_norm_triton
from weft.ops.triton import early_launch
from weft.ops.triton.launch import Kernel, launches_handled
from weft.ops.triton.sizes import MULTIPROCESSORS, next_power_of_2

LIMIT = 6e-3 if ON_GPU else 1e-5
"""Largest relative error that passes: weights and results are rounded to bfloat16."""
FORMS = {
    "int4": (4, False, 128),
    "mxfp4": (4, True, 32),
    "nvfp4": (4, True, 16),
    "int8": (8, False, 128),
    "mxfp8": (8, True, 32),
}


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts of ``width``, and how many a token has."""

    name: str
    num: int
    hidden: int
    width: int
    top_k: int


SIZES = [
    Size("G gate_up+silu", 34816, 5120, True),
    Size("G down", 5120, 17408),
    Size("G gdn in", 16384, 5120),
    Size("G o", 5120, 6144),
    Size("G qkv", 14336, 5120),
    Size("F gdn in", 12288, 2048),
    Size("F o", 2048, 4096),
    Size("F qkv", 9216, 2048),
]  # fmt: skip
"""G is the dense hybrid of 27B, F Qwen3-Next-80B."""
EXPERTS = [Experts("F experts", 513, 2048, 512, 11)]
"""The shared expert is one of them up to 256 rows."""
TOKENS: tuple[int, ...] = (1, 8, 32, 64)
if not ON_GPU:
    SIZES, EXPERTS = [Size("plain", 66, 128), Size("silu", 64, 192, True)], [Experts("few", 5, 128, 64, 2)]
    TOKENS = (1, 16)


def matrix_of(rows: int, inner: int, form: str, *lead: int, device: str = DEVICE) -> CodedMatrix:
    """A random matrix; every row and group has another scale."""
    bits, is_float, group = FORMS[form]
    group = group if inner % group == 0 else 32
    shape = *lead, *Packing.of(bits, group).words_shape(rows, inner)
    words = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=device)
    if is_float and bits == 8:
        words &= ~0x01010101  # no code is NaN
    scales = (torch.rand(*lead, inner // group, rows, device=device) + 0.5) * inner**-0.5 / 5
    row_scale = torch.full((*lead, rows), inner**-0.5 / 3, device=device) if group == 16 else None
    if is_float:
        scales = torch.randint(*((48, 64) if group == 16 else (118, 122)), scales.shape, device=device)
    dtype = torch.uint8 if is_float else DTYPE
    return CodedMatrix(words, scales.to(dtype), None, row_scale, bits, is_float, group, inner)


def experts_of(what: Experts, form: str) -> tuple[CodedMatrix, CodedMatrix]:
    """Random matrices of all experts: gate and up, and down."""
    up = matrix_of(2 * what.width, what.hidden, form, what.num)
    return up, matrix_of(what.hidden, what.width, form, what.num)


LOOPS = {
    8: [(128, 4, 3), (128, 4, 4), (64, 2, 4)],
    16: [(128, 4, 3), (128, 4, 4), (64, 4, 4)],
    32: [(64, 4, 4), (128, 4, 4), (128, 8, 4)],
    64: [(64, 4, 3), (128, 4, 3), (128, 8, 3)],
    128: [(128, 8, 3), (64, 4, 3), (128, 8, 4)],
}
"""Weight rows, warps and stages to try, by lanes of tokens."""


def candidates(size: Size, tokens: int) -> Iterator[CodedTile | Widened]:
    """Yield the tiles to time for a size: with four and eight programs of each multiprocessor."""
    if not ON_GPU:
        yield from (CodedTile(64, max(8, tokens), 4, 2), Widened())
        return
    if tokens > 64:
        yield Widened()
    lanes = min(128, max(8, next_power_of_2(tokens)))
    for rows, warps, stages in LOOPS[lanes]:
        wanted = {max(1, round(each * MULTIPROCESSORS / -(-size.rows // rows))) for each in (4, 8)}
        fitting = {min(splits, 16, size.inner // 384) for splits in wanted} if tokens <= lanes else {1}
        for splits in sorted({max(1, splits) for splits in fitting}):
            yield CodedTile(rows, lanes, warps, stages, splits)


def expert_candidates(experts: Experts, tokens: int) -> Iterator[Tiles]:
    if not ON_GPU:
        yield Tiles(Tile(16, 64, 0, 4, 2), Tile(16, 64, 0, 4, 2))
        return
    average = tokens * experts.top_k / experts.num
    rows = (8, 16) if average <= 4 else (16, 32) if average <= 16 else (32, 64, 128)
    loops = [(64, 2, 4), (64, 4, 4), (128, 4, 3)]
    for most, (columns, warps, stages) in itertools.product(rows, loops):
        yield Tiles(Tile(most, columns, 0, warps, stages), Tile(most, columns, 0, warps, stages))


def run_dense(x: Tensor, matrix: CodedMatrix, size: Size, config: Any) -> Tensor:
    run = coded_linear_silu_mul_triton if size.silu_mul else coded_linear_triton
    return run(x, matrix, config=config)


def _compile(job: tuple[Any, int, Any, str]) -> None:
    """Compile a candidate into Triton's cache; what does not compile fails again, and visibly, when it is launched."""
    what, tokens, config, form = job
    early_launch._can_launch_early = lambda device: True

    def compile_only(kernel: Kernel, grid: Any, args: Any, options: dict[str, Any]) -> None:
        kernel.run(*args, grid=grid, warmup=True, **options)

    try:
        with launches_handled(compile_only):
            if isinstance(what, Size):
                x = torch.empty(tokens, what.inner, dtype=DTYPE)
                run_dense(x, _shape_of(what.rows, what.inner, form), what, config)
            else:
                x = torch.empty(tokens, what.hidden, dtype=DTYPE)
                up, down = _shape_of(2 * what.width, what.hidden, form, 2), _shape_of(what.hidden, what.width, form, 2)
                ids = torch.zeros(tokens, what.top_k, dtype=torch.int32)
                coded_fused_moe_triton(x, up, down, torch.ones(tokens, what.top_k), ids, tiles=config)
    except Exception as problem:
        print(f"{what.name} {tokens} {config}: {type(problem).__name__} {str(problem)[:80]}")


def _shape_of(rows: int, inner: int, form: str, *lead: int) -> CodedMatrix:
    """A matrix without values."""
    bits, is_float, group = FORMS[form]
    words = torch.empty(*lead, *Packing.of(bits, group).words_shape(rows, inner), dtype=torch.int32)
    scales = torch.empty(*lead, inner // group, rows, dtype=torch.uint8 if is_float else DTYPE)
    row_scale = torch.empty(*lead, rows) if group == 16 else None
    return CodedMatrix(words, scales, None, row_scale, bits, is_float, group, inner)


@contextmanager
def poisoned() -> Iterator[None]:
    """``torch.empty`` returns NaN."""
    empty = torch.empty

    def filled(*size: Any, **options: Any) -> Tensor:
        made = empty(*size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    with mock.patch.object(torch, "empty", filled):
        yield


class Bench:
    """Weights in rotation, and the time of a call on them behind a norm, as in a model."""

    def __init__(self, make: Callable[[], Any], num_bytes: float) -> None:
        copies = max(1, -(-ROTATED_BYTES // int(num_bytes))) if ON_GPU else 1
        self.weights = [make() for _ in range(copies)]
        self.num_calls = max(copies, min(96, int(200e-6 / (num_bytes / COPY_BYTES_PER_S)))) if ON_GPU else 1

    def us(self, x: Tensor, call: Callable[[Tensor, Any], Any]) -> float:
        scale = torch.ones_like(x[0])
        weights = itertools.islice(itertools.cycle(self.weights), self.num_calls)
        calls = [partial(self._call, call, x, scale, w) for w in weights]
        return graph_ms(calls, repeats=5) * 1e3

    @staticmethod
    def _call(call: Callable[[Tensor, Any], Any], x: Tensor, scale: Tensor, weight: Any) -> None:
        normed = rms_norm_triton(x, scale, 1e-6)
        assert isinstance(normed, Tensor)
        call(normed, weight)

    def norm_us(self, x: Tensor) -> float:
        return self.us(x, lambda x, w: x)


def try_all(
    row: dict[str, Any], configs: list[Any], run: Callable[[Any], Tensor], time_of: Callable[[Any], float], want: Tensor
) -> None:
    """Check and time configurations; the fastest comes into ``row``."""
    tried = []
    for config in configs:
        try:
            with poisoned():
                worst = error(run(config), want)
            if not worst <= LIMIT:
                row["wrong"].append((config, worst))
                print(f"{row['name']} {row['tokens']} {config}: WRONG, error {worst:.1e}", flush=True)
                continue
            tried.append((round(time_of(config), 2), worst, config))
        except Exception as problem:  # a tile may not fit in shared memory
            print(f"{row['name']} {row['tokens']} {config}: {type(problem).__name__} {str(problem)[:80]}", flush=True)
    tried.sort(key=lambda entry: entry[0])
    row["tried"] = [(us, config) for us, _, config in tried]
    if tried:
        row["us"], row["error"], row["config"] = tried[0]


def dense_row(size: Size, tokens: int, form: str, bench: Bench, tune: bool) -> dict[str, Any]:
    matrix = bench.weights[0]
    x = torch.randn(tokens, size.inner, device=DEVICE).to(DTYPE)
    weight = dequantize_codes(matrix).to(DTYPE)
    want = (
        x.double() @ dequantize_codes(matrix).double().T if tokens <= 64 else (x.float() @ dequantize_codes(matrix).T)
    )
    if size.silu_mul:
        want = F.silu(want[:, : size.rows // 2]) * want[:, size.rows // 2 :]
    num_bytes = sum(t.numel() * t.element_size() for t in (matrix.words, matrix.scales))
    width = size.rows // 2 if size.silu_mul else size.rows
    moved = num_bytes + tokens * (size.inner + width) * DTYPE.itemsize
    row: dict[str, Any] = {
        "name": size.name, "form": form, "rows": size.rows, "inner": size.inner, "silu_mul": size.silu_mul,
        "tokens": tokens, "wrong": [], "mb": round(num_bytes / 1e6, 1),
        "floor_us": max(moved / COPY_BYTES_PER_S, 2 * tokens * size.rows * size.inner / MATRIX_FLOP_PER_S) * 1e6,
        "norm_us": bench.norm_us(x), "library_us": bench.us(x, lambda x, w: F.linear(x, weight)),
    }  # fmt: skip
    configs = list(candidates(size, tokens)) if tune else [choose_config(matrix, tokens, size.silu_mul)]
    timed = lambda config: bench.us(x, lambda x, w: run_dense(x, w, size, config))  # noqa: E731
    try_all(row, configs, lambda config: run_dense(x, matrix, size, config), timed, want)
    return row


def moe_row(experts: Experts, tokens: int, form: str, bench: Bench, tune: bool) -> dict[str, Any]:
    up, down = bench.weights[0]
    x = torch.randn(tokens, experts.hidden, device=DEVICE).to(DTYPE)
    ids = torch.rand(tokens, experts.num, device=DEVICE).topk(experts.top_k).indices.int()
    weights = torch.softmax(torch.randn(tokens, experts.top_k, device=DEVICE), -1)
    want = torch.zeros(tokens, experts.hidden, device=DEVICE, dtype=torch.float64)
    for expert in ids.unique().tolist():
        token, place = (ids == expert).nonzero(as_tuple=True)
        hidden = x[token].double() @ dequantize_codes(up.expert(expert)).double().T
        hidden = F.silu(hidden[:, : experts.width]) * hidden[:, experts.width :]
        result = hidden @ dequantize_codes(down.expert(expert)).double().T
        want.index_add_(0, token, result * weights[token, place, None].double())
    hit = len(ids.unique())
    num_bytes = sum(t[0].numel() * t.element_size() for m in (up, down) for t in (m.words, m.scales)) * hit
    flops = 6 * tokens * experts.top_k * experts.hidden * experts.width
    row: dict[str, Any] = {
        "name": experts.name, "form": form, "experts": experts.num, "hidden": experts.hidden, "width": experts.width,
        "tokens": tokens, "wrong": [], "mb": round(num_bytes / 1e6, 1), "norm_us": bench.norm_us(x),
        "floor_us": max(num_bytes / COPY_BYTES_PER_S, flops / MATRIX_FLOP_PER_S) * 1e6,
    }  # fmt: skip
    configs = list(expert_candidates(experts, tokens)) if tune else [choose_tiles(down, tokens, experts.top_k)]
    run = lambda config, x=x, w=(up, down): coded_fused_moe_triton(x, *w, weights, ids, tiles=config)  # noqa: E731
    try_all(row, configs, run, lambda config: bench.us(x, lambda x, w: run(config, x, w)), want)
    return row


def show(row: dict[str, Any]) -> None:
    us = row.get("us", float("nan"))
    alone = us - row["norm_us"]
    print(
        f"{row['name']:15} {row['form']:6} {row['tokens']:5} {row['mb']:7.1f} MB {us:9.2f} us, floor "
        f"{row['floor_us']:8.2f}, share {row['floor_us'] / us if us else 0:4.2f} (without the norm "
        f"{row['floor_us'] / alone if alone else 0:4.2f}), bf16 {row.get('library_us', 0):9.2f}, {row.get('config')}",
        flush=True,
    )


def write_tables(rows: list[dict[str, Any]], tune: bool) -> None:
    write_json("coded.json", rows)
    folder = os.environ.get("OUT")
    if folder is None or not tune:
        return
    rows = [row for row in rows if "config" in row and row["form"] == "int4"]
    dense = [
        {key: row[key] for key in ("rows", "inner", "silu_mul", "tokens", "us")} | {"tile": list(row["config"])}
        for row in rows if "experts" not in row
    ]  # fmt: skip
    moe = [
        {key: row[key] for key in ("experts", "hidden", "width", "tokens", "us")}
        | {"up": list(row["config"].up), "down": list(row["config"].down)}
        for row in rows if "experts" in row
    ]  # fmt: skip
    for name, found in ((coded.TABLE_PATH.name, dense), (coded_experts.TABLE_PATH.name, moe)):
        head = f'{{"device": {json.dumps(torch.cuda.get_device_name() if ON_GPU else "cpu")}, "rows": [\n'
        (Path(folder) / name).write_text(head + ",\n".join(json.dumps(row) for row in found) + "\n]}\n")


def jobs_of(args: argparse.Namespace) -> list[tuple[Any, int]]:
    """Experts first, then dense sizes; few tokens before many."""
    every: list[Any] = [*EXPERTS, *SIZES]
    sizes = [s for s in every if args.only is None or any(name in s.name for name in args.only)]
    found = [(what, tokens) for what in sizes for tokens in args.tokens]
    return found + [(what, tokens) for what in sizes if isinstance(what, Size) for tokens in args.many]


def run(args: argparse.Namespace, pool: ProcessPoolExecutor | None) -> None:
    end, start = time.perf_counter() + args.seconds, time.perf_counter()
    if pool is not None:
        jobs: dict[Any, tuple[Any, int, Any, str]] = {}
        for what, tokens in jobs_of(args):
            options = candidates(what, tokens) if isinstance(what, Size) else expert_candidates(what, tokens)
            single = tokens <= UNGROUPED_TOKENS
            jobs |= {(what, single, config): (what, tokens, config, args.form) for config in options}
        list(pool.map(_compile, jobs.values(), chunksize=1))
        print(f"compiled {len(jobs)} candidates in {time.perf_counter() - start:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    for what, group in itertools.groupby(jobs_of(args), key=lambda job: job[0]):
        is_dense = isinstance(what, Size)
        if is_dense:
            make: Callable[[], Any] = partial(matrix_of, what.rows, what.inner, args.form)
            bench = Bench(make, what.rows * what.inner / 2)
        else:
            assert isinstance(what, Experts)
            bench = Bench(partial(experts_of, what, args.form), what.num * what.hidden * what.width * 1.5)
        for _, tokens in group:
            if time.perf_counter() > end:
                print("out of time", flush=True)
                return
            rows.append((dense_row if is_dense else moe_row)(what, tokens, args.form, bench, args.tune))
            show(rows[-1])
            write_tables(rows, args.tune)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="try all candidates and write the tables")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only sizes with these parts of names")
    parser.add_argument("--form", default="int4", choices=FORMS)
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--many", type=int, nargs="*", default=[], help="numbers of tokens of dense layers alone")
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing new after that")
    args = parser.parse_args()
    if ON_GPU and args.tune:
        # The workers are forked before this process touches the GPU, and never touch it.
        workers = len(os.sched_getaffinity(0))
        with ProcessPoolExecutor(workers, mp_context=get_context("fork"), initializer=_compile_offline) as pool:
            list(pool.map(abs, range(4 * workers)))
            run(args, pool)
    else:
        run(args, None)


if __name__ == "__main__":
    main()
