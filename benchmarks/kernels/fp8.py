"""FP8 products on the GPU: every candidate checked against float64 and timed; the tuner of their tables.

Usage: ``python -m benchmarks.kernels.fp8`` checks what the operations choose, times it, and times the ceiling: the
matrix library's FP8 product of 8192-square matrices. ``--tune`` does so for all candidates and writes the fastest to
``$OUT/fp8_linear_h200.json`` and ``$OUT/fp8_moe_h200.json``, and with ``--install`` into the tables beside the kernels.
Products are timed behind a norm and with the quantisation of their inputs, as in a model. Without a GPU everything is
rehearsed on tiny shapes under the interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.fp8_experts import EXPERT_TOKENS, Experts, expert_candidates, measure_experts
from benchmarks.kernels.fp8_weights import DTYPE, FP8_FLOP_PER_S, fp8_weight, listed, poisoned
from benchmarks.kernels.linear import _compile_offline
from benchmarks.kernels.measure import COPY_BYTES_PER_S, DEVICE, ON_GPU, error, graph_ms, write_json
from weft.bench import report
from weft.ops.activation import silu_and_mul
from weft.ops.fp8 import E4M3, Fp8Matrix, dequantize_inputs, dequantize_weight, quantize_inputs_reference
from weft.ops.fp8.quantize import quantize_inputs_triton
from weft.ops.linear import fp8 as fp8_linear
from weft.ops.linear.fp8 import (
    KINDS,
    Config,
    Library,
    ManyRows,
    choose_config,
    fp8_product_triton,
    outputs,
    quantized_product,
)
from weft.ops.linear.fp8_few_rows import MAX_HOPPER_TOKENS, MAX_TOKENS, FewRows, HopperRows
from weft.ops.moe.blocks import Tiles
from weft.ops.moe.fp8_experts import Hopper
from weft.ops.norm.kernels import rms_norm_triton
from weft.ops.triton import early_launch
from weft.ops.triton.gluon import GLUON_IS_KNOWN
from weft.ops.triton.launch import Kernel, launches_handled

LIMIT = 5e-3 if ON_GPU else 1e-4
"""Largest relative error that passes; rounding to bfloat16 alone gives 1.7e-3."""
ROTATED_BYTES = 192 << 20


@dataclass(frozen=True, slots=True)
class Size:
    """A weight ``[rows, inner]``, with scales by block (128) or row (0), followed by SiLU-and-multiply or not."""

    name: str
    rows: int
    inner: int
    block: int
    silu_mul: bool = False


SIZES = [
    Size("E gdn in", 12288, 2048, 128),
    Size("E qkv", 9216, 2048, 128),
    Size("E o", 2048, 4096, 128),
    Size("E shared+silu", 1024, 2048, 128, True),
    Size("E shared", 1024, 2048, 128),
    Size("E shared down", 2048, 512, 128),
    Size("A qkv", 4096, 1024, 0),
    Size("A o", 1024, 2048, 0),
    Size("A gate_up+silu", 6144, 1024, 0, True),
    Size("A gate_up", 6144, 1024, 0),
    Size("A down", 1024, 3072, 0),
]
TOKENS = [1, 2, 4, 8, 16, 32, 128, 1024, 8192]
SQUARE = 8192
if not ON_GPU:
    SIZES = [Size("block", 256, 256, 128), Size("rows", 256, 256, 0, True)]
    TOKENS, SQUARE = [1], 128


def candidates(size: Size, tokens: int) -> list[Config]:
    if not ON_GPU:
        return [FewRows(True, 16, 4, 1, 1)] if tokens <= MAX_TOKENS else [ManyRows(64, 128, 4, 2)]
    if tokens > MAX_TOKENS:
        return [Library(), *(ManyRows(*s) for s in [(64, 128, 4, 4), (128, 128, 8, 4)] if s[0] <= tokens)]
    found: list[Config] = []
    steps, width = size.inner // 128, size.rows
    for rows, most in ((16, 8), (32, 2)):
        for splits in (s for s in (1, 2, 4, 8) if s <= most):
            programs = width // rows * splits
            if tokens <= 16 and splits <= steps and rows * size.inner // splits <= 32768 and 100 <= programs <= 1600:
                found.append(FewRows(True, rows, 4, 1, splits))
    for rows, stages in ((64, 4), (128, 3)):
        for splits in (1, 2, 4, 8):
            programs = width // rows * splits
            if splits <= steps and 64 <= programs <= 700:
                found.append(FewRows(False, rows, 4, stages, splits))
    return found + (_hopper_candidates(size, tokens) if tokens <= MAX_HOPPER_TOKENS and GLUON_IS_KNOWN else [])


def _hopper_candidates(size: Size, tokens: int) -> list[Config]:
    """Return shapes whose weights fit in registers, with limits that admit one, two or three times as many programs."""
    shapes = [(rows, warps) for rows in (16, 32) for warps in (4, 8, 16) if size.inner % (128 * warps) == 0]
    held = [(rows, warps) for rows, warps in shapes if rows * size.inner <= 8192 * warps]
    limits = [None] if tokens == 1 else [None, 80, 96, 128]
    return [HopperRows(*shape, limit) for shape in held for limit in limits]


class Product:
    """One size: weights in rotation, and the time of a call on them."""

    def __init__(self, size: Size, device: str = DEVICE) -> None:
        self.size = size
        copies = max(1, min(64, ROTATED_BYTES // (size.rows * size.inner))) if device == "cuda" else 1
        self.weights = [fp8_weight(size.rows, size.inner, size.block, device=device) for _ in range(copies)]
        self.norm = torch.ones(size.inner, dtype=DTYPE, device=device)

    def inputs(self, tokens: int, device: str = DEVICE) -> Tensor:
        return torch.randn(tokens, self.size.inner, device=device).to(DTYPE)

    def run(self, x: Tensor, config: Config | None, place: int = 0) -> Tensor:
        size, (weight, scale) = self.size, self.weights[place]
        out = outputs(x.shape[0], size.rows // 2 if size.silu_mul else size.rows, x)
        matrix = Fp8Matrix(weight, scale, None, size.block)
        fp8_product_triton(x, matrix, None, out, silu_mul=size.silu_mul, config=config)
        return out

    def want(self, x: Tensor) -> Tensor:
        size, (weight, scale) = self.size, self.weights[0]
        inputs = dequantize_inputs(*quantize_inputs_reference(x, None, block=size.block), block=size.block)
        y = inputs.double() @ dequantize_weight(weight, scale, block=size.block).double().T
        return silu_and_mul.reference(y) if size.silu_mul else y

    def worst_error(self, x: Tensor, want: Tensor, config: Config | None) -> float:
        """Over all tokens, and over some of them (the rest is padding), twice; infinite if bits change."""
        errors = []
        for count in sorted({x.shape[0], x.shape[0] // 2 + 1}):
            with poisoned():
                y, again = self.run(x[:count], config), self.run(x[:count], config)
            value = error(y, want[:count])
            errors.append(value if torch.equal(y, again) and value == value else float("inf"))
        return max(errors)

    def microseconds(self, x: Tensor, config: Config | None) -> float:
        def call(place: int) -> None:
            normed = rms_norm_triton(x, self.norm, 1e-6)
            assert isinstance(normed, Tensor)
            self.run(normed, config, place)

        calls = [lambda i=i: call(i % len(self.weights)) for i in range(32 if x.shape[0] <= 1024 else 4)]
        return graph_ms(calls, repeats=5) * 1e3

    def floor_us(self, tokens: int) -> float:
        size = self.size
        moved = size.rows * size.inner + tokens * 2 * (size.inner + size.rows)
        return max(moved / COPY_BYTES_PER_S, 2 * tokens * size.rows * size.inner / FP8_FLOP_PER_S) * 1e6


def measure_products(sizes: Sequence[Size], tune: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of the report, and rows of the table."""
    rows, table = [], []
    for size in sizes:
        product = Product(size)
        for tokens in TOKENS:
            if size.silu_mul and tokens > MAX_TOKENS:
                continue
            x = product.inputs(tokens)
            want = product.want(x)
            chosen = choose_config(product.weights[0][0], tokens, size.silu_mul, size.block)
            tried = []
            for config in dict.fromkeys([chosen, *(candidates(size, tokens) if tune else ())]):
                try:
                    wrong = product.worst_error(x, want, config)
                    tried.append((product.microseconds(x, config) if wrong < LIMIT else float("inf"), wrong, config))
                except Exception as problem:
                    print(f"{size.name} {tokens} {config}: {type(problem).__name__} {str(problem)[:100]}", flush=True)
            if not tried:
                continue
            us, wrong, config = min(tried, key=lambda entry: entry[0])
            kind = next(name for name, cls in KINDS.items() if type(config) is cls)
            matrix = {"rows": size.rows, "inner": size.inner, "silu_mul": size.silu_mul, "block": size.block}
            floor = round(product.floor_us(tokens), 2)
            figures = {"us": round(us, 2), "floor_us": floor, "error": wrong, "tried": listed(tried)}
            rows.append({"name": size.name, "tokens": tokens} | matrix | figures)
            table.append(matrix | {"tokens": tokens, "kind": kind, "config": list(config)})
            print(f"{size.name:15} {tokens:5} {us:8.2f} us floor {floor:8.2f} error {wrong:.1e} {config}", flush=True)
            failed = [entry for entry in tried if entry[1] >= LIMIT]
            if failed:
                print("  WRONG:", failed, flush=True)
    return rows, table


def measure_square() -> list[dict[str, Any]]:
    """The product of square matrices by every kernel, with scales by block and by row, and the library's ceiling."""
    rows = []
    for block in (128, 0):
        product = Product(Size("square", SQUARE, SQUARE, block))
        x = product.inputs(SQUARE)
        for config in candidates(product.size, SQUARE):
            try:
                rows.append(_square(f"block {block} {config}", square_call(product, x, config)))
            except Exception as problem:
                print(f"square {block} {config}: {type(problem).__name__} {str(problem)[:100]}", flush=True)
    if ON_GPU:
        ones = torch.ones((), device=DEVICE)
        a, b = (torch.randn(SQUARE, SQUARE, device=DEVICE).to(E4M3) for _ in range(2))
        fast = lambda: torch._scaled_mm(a, b.t(), ones, ones, out_dtype=DTYPE, use_fast_accum=True)  # noqa: E731
        rows.append(_square("ceiling: library, one scale, fast sums", fast))
    return rows


def square_call(product: Product, x: Tensor, config: Config) -> Callable[[], None]:
    """The product alone."""
    assert isinstance(config, ManyRows | Library)  # no candidate of a large product
    values, scales = quantize_inputs_triton(x, None, block=product.size.block)
    out = torch.empty(SQUARE, SQUARE, dtype=DTYPE, device=DEVICE)
    matrix = Fp8Matrix(*product.weights[0], None, product.size.block)
    return lambda: quantized_product(values, scales, matrix, None, out, config)


def _square(name: str, call: Callable[[], Any]) -> dict[str, Any]:
    ms = graph_ms([call], repeats=5)
    tflops = 2 * SQUARE**3 / ms / 1e9 if ms else 0.0
    print(f"{SQUARE}^3 {ms:8.3f} ms {tflops:7.1f} TFLOP/s {name}", flush=True)
    return {"square": SQUARE, "name": name, "ms": ms, "tflops": round(tflops, 1)}


# --- compiling ahead, in parallel -------------------------------------------------------------------------------------


def _compile(job: tuple[Size, int, Config] | tuple[int, Tiles | Hopper]) -> None:
    """Compile the kernels of one candidate. A kernel that fails here fails again, and visibly, at its launch."""
    early_launch._can_launch_early = lambda device: True

    def compile_only(kernel: Kernel, grid: Any, args: Any, options: dict[str, Any]) -> None:
        kernel.run(*args, grid=grid, warmup=True, **options)

    try:
        with launches_handled(compile_only):
            if len(job) == 3:
                size, tokens, config = job
                product = Product(size, "cpu")
                product.run(product.inputs(tokens, "cpu"), config)
            else:
                experts = Experts("cpu", 16)
                x, routings = experts.inputs(job[0], "cpu")
                experts.run(x, routings[0], job[1])
    except Exception as problem:
        print(f"{job}: {type(problem).__name__} {str(problem)[:80]}", flush=True)


def compile_all(only: str | None) -> None:
    start = time.perf_counter()
    jobs: dict[Any, Any] = {}
    for size in SIZES if only in (None, "products") else []:
        for tokens in TOKENS:
            for config in candidates(size, tokens):
                if not isinstance(config, Library) and not (size.silu_mul and tokens > MAX_TOKENS):
                    small = Size("", 512, size.inner, size.block, size.silu_mul)
                    jobs.setdefault((small, min(tokens, 128), config), (small, min(tokens, 128), config))
    for tokens in EXPERT_TOKENS if only in (None, "experts") else ():
        for choice in expert_candidates(tokens):
            jobs.setdefault(choice, (min(tokens, 16), choice))
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), _compile_offline) as pool:
        list(pool.map(_compile, jobs.values(), chunksize=1))
    print(f"compiled {len(jobs)} candidates in {time.perf_counter() - start:.0f} s", flush=True)


def write_table(name: str, rows: list[dict[str, Any]], install: bool) -> None:
    """Into ``$OUT``, or over the rows of the same sizes in the table beside the kernels."""
    beside = Path(fp8_linear.__file__).with_name(name)
    folder = os.environ.get("OUT")
    head: dict[str, Any] = report.provenance(DEVICE)
    if install:
        old = json.loads(beside.read_text())
        before = {key: value for key, value in old.items() if key not in ("rows", "earlier")}
        head |= {"earlier": [*old.get("earlier", []), before]}
        fresh = {_key(row) for row in rows}
        rows = [row for row in old["rows"] if _key(row) not in fresh] + rows
    text = json.dumps(head)[:-1] + ', "rows": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]}\n"
    for path in [beside] * install + ([Path(folder) / name] if folder else []):
        path.write_text(text)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(
        row.get(name) for name in ("rows", "inner", "silu_mul", "experts", "hidden", "width", "block", "tokens")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--sizes", default="", help="products whose names begin so")
    parser.add_argument("--tokens", type=int, nargs="*", help="rows of products, tokens of experts; default: all")
    parser.add_argument("--install", action="store_true", help="put what was tuned into the tables beside the kernels")
    parser.add_argument("--only", choices=("square", "experts", "products"), help="leave the others out")
    args = parser.parse_args()
    SIZES[:] = [size for size in SIZES if size.name.startswith(args.sizes)]
    for sizes in (TOKENS, EXPERT_TOKENS):
        sizes[:] = [tokens for tokens in sizes if args.tokens is None or tokens in args.tokens]
    torch.manual_seed(0)
    if args.tune and ON_GPU:
        compile_all(args.only)
    squares = measure_square() if args.only in (None, "square") else []
    experts, expert_table = measure_experts(args.tune) if args.only in (None, "experts") else ([], [])
    if args.tune and experts:
        write_table("fp8_moe_h200.json", expert_table, args.install)
    write_json("fp8_kernels.json", [*squares, *experts])
    products: list[dict[str, Any]] = []
    product_table: list[dict[str, Any]] = []
    for size in SIZES if args.only in (None, "products") else []:
        found = measure_products([size], args.tune)
        products += found[0]
        product_table += found[1]
        write_json("fp8_kernels.json", [*squares, *experts, *products])
        if args.tune:
            write_table("fp8_linear_h200.json", product_table, False)
    if args.tune and args.install and product_table:
        write_table("fp8_linear_h200.json", product_table, True)


if __name__ == "__main__":
    main()
