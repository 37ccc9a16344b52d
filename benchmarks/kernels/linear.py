"""Linear layers of few rows on the GPU: time beside the matrix library's and the floor, and the tuner of their table.

Usage: ``python -m benchmarks.kernels.linear`` times what the operation chooses (``$OUT/linear.json``). ``--tune`` first
checks every candidate against float64 (outputs poisoned, with and without padded tokens, twice), and times those that
pass. It writes the fastest of each size to ``$OUT/skinny_linear_h200.json``, to be copied beside
``weft/ops/linear/skinny.py``. Rows of sizes that were not tuned are kept. Every time includes a norm before the
product, as in a model: a launch may start early, so the time of one alone says little. Without a GPU everything is
rehearsed on tiny shapes under the interpreter.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
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

from benchmarks.kernels.measure import COPY_BYTES_PER_S, DEVICE, MATRIX_FLOP_PER_S, ON_GPU, error, graph_ms, write_json
from weft.ops.activation.kernels import silu_and_mul_triton
from weft.ops.linear import skinny_choice
from weft.ops.linear.skinny import skinny_linear_triton
from weft.ops.linear.skinny_choice import Config, choose_config
from weft.ops.norm.kernels import rms_norm_triton
from weft.ops.triton import early_launch
from weft.ops.triton.launch import Kernel, launches_handled

DTYPE = torch.bfloat16 if ON_GPU else torch.float32
LIMIT = 5e-3 if ON_GPU else 1e-5
"""Largest relative error that passes; rounding to bfloat16 alone gives 1.7e-3."""
BLAS_MARGIN = 0.98
"""The kernel is chosen if it takes less than this share of the matrix library's time."""
ROTATED_BYTES = 192 << 20
"""Weights in rotation: several times the L2 cache, since in a model no weight is there when its turn comes."""


@dataclass(frozen=True, slots=True)
class Size:
    """A weight ``[rows, inner]``, followed by SiLU-and-multiply or not."""

    name: str
    rows: int
    inner: int
    silu_mul: bool = False


SIZES = [
    Size("A qkv", 4096, 1024),
    Size("A o", 1024, 2048),
    Size("A gate_up", 6144, 1024),
    Size("A gate_up+silu", 6144, 1024, True),
    Size("A down", 1024, 3072),
    Size("A lm_head", 151936, 1024),
    Size("B qkv", 9216, 2048),
    Size("B o", 2048, 4096),
    Size("B gdn in", 12352, 2048),
    Size("B router", 520, 2048),
    Size("B shared+silu", 1024, 2048, True),
    Size("B shared down", 2048, 512),
    Size("B lm_head", 151936, 2048),
    Size("B/2 gdn in", 6176, 2048),
    Size("B/2 o", 2048, 2048),
    Size("B/2 shared+silu", 512, 2048, True),
    Size("B/2 shared down", 2048, 256),
    Size("B/2 qkv", 4608, 2048),
    Size("B/2 lm_head", 75968, 2048),
    Size("B/4 gdn in", 3088, 2048),
    Size("B/4 o", 2048, 1024),
    Size("B/4 shared+silu", 256, 2048, True),
    Size("B/4 shared down", 2048, 128),
    Size("B/4 qkv", 2560, 2048),
    Size("B/4 lm_head", 37984, 2048),
]  # fmt: skip
"""A is Qwen3-0.6B, B Qwen3-Next on one GPU, B/2 and B/4 one of two and of four ranks."""
TOKENS: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
if not ON_GPU:
    SIZES = [Size("plain", 66, 128), Size("silu", 64, 192, True)]
    TOKENS = (1, 8, 16, 128)


_DOTS = [(16, 256, 2, 4), (32, 128, 4, 5), (64, 64, 4, 6), (64, 128, 4, 4)]


def candidates(size: Size, tokens: int) -> list[Config]:
    """Return configurations that may be fastest for a size, with ``splits`` if blocks of rows are too few for a GPU."""
    if not ON_GPU and tokens > 64:
        return [Config("dot", 16, 64, 4, 2, 1, 64), Config("held", 32, 64, 4, 1, 2, 64)]
    if not ON_GPU:
        few = [Config("sum", 8, 64, 4), Config("sum", 8, 64, 4, splits=2)]
        return [Config("dot", 16, 64, 4, 2), *(few if tokens <= 8 else ())]
    blocks = list(_blocks_of_tokens(size, tokens)) if tokens >= 4 else []
    if tokens > 64:
        return blocks
    found = blocks + [Config("dot", *shape) for shape in _DOTS if tokens > 1]
    lengths = (512, 1024, 2048) if size.inner >= 512 else (size.inner,)
    for rows, inner, warps in itertools.product((2, 4, 8, 16), lengths, (2, 4, 8)):
        fits = rows * size.inner <= 128 * 32 * warps and rows * tokens <= 32
        if tokens <= 4 and fits and rows * inner >= 256 * warps:
            found.append(Config("sum", rows, inner, warps))
    for rows, inner, warps, splits in itertools.product((16, 32, 64), (128, 256), (4, 8), (1, 2, 4, 8)):
        span, programs = size.inner // splits, -(-size.rows // rows) * splits
        fits = span * (rows + tokens) <= 96 << 10 and span * max(rows, tokens) <= 256 * 32 * warps
        if tokens > 1 and fits and span >= inner and 64 <= programs <= 700 and (rows > 16 or warps == 4):
            found.append(Config("held", rows, inner, warps, splits=splits))
    for rows, warps, splits in itertools.product((16, 32, 64), (4, 8), (1, 2)):
        span, programs = size.inner // splits, -(-size.rows // rows) * splits
        inner = min(2048, 1 << (span & -span).bit_length() - 1)
        fits = span * (rows + tokens) * 2 <= 200 << 10
        if 1 < tokens <= 32 and fits and inner >= 64 * warps and 64 <= programs <= 400:
            found.append(Config("warps", rows, inner, warps, splits=splits))
    if size.silu_mul:
        found = [c for c in found if c.rows > 1]
    return [c for c in found if c.inner * c.splits <= size.inner]


def _blocks_of_tokens(size: Size, tokens: int) -> Iterator[Config]:
    """Several programs for a block of rows where one cannot take all tokens, or would leave multiprocessors idle: tiles
    that fit in shared memory, and programs for one or two waves."""
    tiles = [(64, 32), (64, 64), (64, 128), (128, 64), (128, 128)] if tokens > 16 else [(32, tokens), (64, tokens)]
    loops = [(64, 6), (128, 4), (128, 6), (256, 3)]
    for (rows, most), (inner, stages), splits in itertools.product(tiles, loops, (1, 2, 4, 8)):
        programs = -(-size.rows // rows) * (tokens // most) * splits
        fits = stages * inner * (rows + most) * 2 <= 224 << 10 and size.inner // splits >= 2 * inner
        if fits and tokens // 4 <= most <= tokens and programs >= 90 and (programs <= 270 or splits == 1):
            yield Config("dot", rows, inner, 8 if rows * most > 8192 else 4, stages, splits, most)


class _OfflineDriver:
    """Stands for the GPU in processes that only compile for it."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def _compile_offline() -> None:
    from triton.runtime import driver

    driver.set_active(_OfflineDriver())


def _compile(job: tuple[Size, int, Config]) -> None:
    """Compile one kernel into Triton's cache; what does not compile fails again, and visibly, when it is launched."""
    size, tokens, config = job
    early_launch._can_launch_early = lambda device: True

    def compile_only(kernel: Kernel, grid: Any, args: Any, options: dict[str, Any]) -> None:
        kernel.run(*args, grid=grid, warmup=True, **options)

    x, weight = torch.empty(tokens, size.inner, dtype=DTYPE), torch.empty(size.rows, size.inner, dtype=DTYPE)
    try:
        with launches_handled(compile_only):
            skinny_linear_triton(x, weight, None, config, silu_mul=size.silu_mul)
    except Exception as problem:
        print(f"{size.name} {tokens} {tuple(config)}: {type(problem).__name__} {str(problem)[:80]}")


def compile_all(pool: ProcessPoolExecutor | None, jobs: Iterable[tuple[Size, int, Config]]) -> None:
    """Compile in parallel; sizes that differ in their rows alone share kernels."""
    if pool is None:
        return
    start = time.perf_counter()
    distinct = {(s.inner, s.silu_mul, s.rows % 16, t, c): (s, t, c) for s, t, c in jobs}
    list(pool.map(_compile, distinct.values(), chunksize=2))
    print(f"compiled {len(distinct)} kernels in {time.perf_counter() - start:.0f} s", flush=True)


@contextmanager
def poisoned() -> Iterator[None]:
    """``torch.empty`` returns NaN."""
    empty = torch.empty
    with mock.patch.object(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(float("nan"))):
        yield


def worst_error(x: Tensor, weight: Tensor, want: Tensor, config: Config, silu_mul: bool) -> float:
    """Relative error over all tokens, over half of them and one more (the rest is padding); infinite if bits change."""
    errors = []
    for count in sorted({x.shape[0], x.shape[0] // 2 + 1}):
        with poisoned():
            y = skinny_linear_triton(x[:count], weight, None, config, silu_mul=silu_mul)
            again = skinny_linear_triton(x[:count], weight, None, config, silu_mul=silu_mul)
        same = torch.equal(y, again)
        value = error(y, want[:count])
        errors.append(value if same and value == value else float("inf"))
    return max(errors)


def library(x: Tensor, weight: Tensor, silu_mul: bool) -> Tensor:
    """The same by the matrix library."""
    y = F.linear(x, weight)
    return silu_and_mul_triton(y) if silu_mul else y


class Bench:
    """One size: weights in rotation, and the time of a call on them."""

    def __init__(self, size: Size) -> None:
        self.size = size
        weight_bytes = size.rows * size.inner * DTYPE.itemsize
        copies = max(1, -(-ROTATED_BYTES // weight_bytes)) if ON_GPU else 1
        shape = (copies, size.rows, size.inner)
        self.weights = torch.empty(shape, device=DEVICE, dtype=DTYPE).normal_(std=size.inner**-0.5).unbind()
        floor = weight_bytes / COPY_BYTES_PER_S
        self.num_calls = max(copies, min(128, int(300e-6 / floor))) if ON_GPU else 1

    def floor_us(self, tokens: int) -> float:
        size = self.size
        width = size.rows // 2 if size.silu_mul else size.rows
        moved = (size.rows * size.inner + tokens * (size.inner + width)) * DTYPE.itemsize
        return max(moved / COPY_BYTES_PER_S, 2 * tokens * size.rows * size.inner / MATRIX_FLOP_PER_S) * 1e6

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor]:
        """``x`` and the first weight's product in float64."""
        x = torch.randn(tokens, self.size.inner, device=DEVICE).to(DTYPE)
        y = x.double() @ self.weights[0].double().T
        if self.size.silu_mul:
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        return x, y

    def us(self, x: Tensor, call: Callable[[Tensor, Tensor], Any]) -> float:
        """Microseconds of a norm of ``x`` and ``call(norm, weight)``."""
        weights = itertools.islice(itertools.cycle(self.weights), self.num_calls)
        scale = torch.ones_like(x[0])

        def behind_norm(w: Tensor) -> None:
            call(rms_norm_triton(x, scale, 1e-6), w)  # type: ignore[arg-type]

        return graph_ms([lambda w=w: behind_norm(w) for w in weights], repeats=5) * 1e3  # type: ignore[misc]

    def tune(self, tokens: int) -> dict[str, Any]:
        """Every candidate, checked, then timed."""
        size = self.size
        x, want = self.inputs(tokens)
        row = self._row(tokens, self.us(x, lambda x, w: library(x, w, size.silu_mul)))
        tried = []
        for config in candidates(size, tokens):
            try:
                worst = worst_error(x, self.weights[0], want, config, size.silu_mul)
                us = self.us(x, partial(skinny_linear_triton, bias=None, config=config, silu_mul=size.silu_mul))
            except Exception as problem:  # a tile may not fit in shared memory
                print(f"{size.name} {tokens} {tuple(config)}: {type(problem).__name__} {str(problem)[:80]}")
                continue
            if worst > LIMIT:
                row["wrong"].append(config)
                print(f"{size.name} {tokens} {tuple(config)}: WRONG, error {worst:.1e}")
                continue
            tried.append((us, worst, config))
        for us, worst, config in sorted(tried)[:1]:
            row |= {"kernel_us": us, "error": worst, "best": config}
            if us < BLAS_MARGIN * row["library_us"] or not ON_GPU:
                row["config"] = config
        row["tried"] = [(round(us, 2), config) for us, _, config in sorted(tried)]
        return row

    def chosen(self, tokens: int) -> dict[str, Any]:
        """Measure the configuration that the operation would choose, and the library."""
        size = self.size
        x, want = self.inputs(tokens)
        row = self._row(tokens, self.us(x, lambda x, w: library(x, w, size.silu_mul)))
        config = choose_config(x, self.weights[0], size.silu_mul)
        if config is not None:
            us = self.us(x, lambda x, w: skinny_linear_triton(x, w, None, config, silu_mul=size.silu_mul))
            worst = worst_error(x, self.weights[0], want, config, size.silu_mul)
            row |= {"kernel_us": us, "error": worst, "config": config, "best": config}
        return row

    def _row(self, tokens: int, library_us: float) -> dict[str, Any]:
        size = self.size
        return {
            "name": size.name, "rows": size.rows, "inner": size.inner, "silu_mul": size.silu_mul, "tokens": tokens,
            "config": None, "best": None, "library_us": library_us, "kernel_us": float("nan"),
            "floor_us": self.floor_us(tokens), "error": 0.0, "wrong": [],
        }  # fmt: skip


def show(row: dict[str, Any]) -> None:
    best = "" if row["best"] is None else " ".join(str(value) for value in row["best"])
    verdict = "kernel" if row["config"] is not None else "library"
    print(
        f"{row['name']:16} {row['rows']:7} {row['inner']:5} {row['tokens']:4} {row['library_us']:9.2f} "
        f"{row['kernel_us']:9.2f} {row['floor_us']:8.2f} {row['floor_us'] / (row['kernel_us'] or 1.0):6.2f} "
        f"{row['error']:9.1e}  {verdict:8} {best}"
        + (f"  ({len(row['wrong'])} WRONG)" if row["wrong"] else ""),
        flush=True,
    )  # fmt: skip


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("rows", "inner", "silu_mul", "tokens"))


def write_table(rows: list[dict[str, Any]]) -> None:
    """Write the table of the operation, one row per line, with its present rows of other sizes. All measurements are
    written to a file of their own."""
    folder = os.environ.get("OUT")
    if folder is None:
        print("no table written: set OUT to a folder")
        return
    device = torch.cuda.get_device_name() if ON_GPU else "cpu"
    columns = ("rows", "inner", "silu_mul", "tokens", "config", "library_us", "kernel_us")
    kept = json.loads(skinny_choice.TABLE_PATH.read_text())["rows"]
    kept = [row for row in kept if row.get("leaves_sums") or _key(row) not in set(map(_key, rows))]
    lines = [json.dumps(row) for row in kept]
    for row in rows:
        entry = {key: round(row[key], 2) if key.endswith("_us") else row[key] for key in columns}
        lines.append(json.dumps(entry).replace("NaN", "null"))
    head = f'{{"device": {json.dumps(device)}, "torch": {json.dumps(torch.__version__)}, "rows": [\n'
    (Path(folder) / "skinny_linear_h200.json").write_text(head + ",\n".join(lines) + "\n]}\n")
    write_json("linear_details.json", rows)


def run(args: argparse.Namespace, pool: ProcessPoolExecutor | None) -> None:
    sizes = [size for size in SIZES if args.only is None or size.name in args.only]
    if args.tune:
        compile_all(pool, ((size, t, c) for size in sizes for t in args.tokens for c in candidates(size, t)))
    print(
        f"{'size':16} {'rows':>7} {'inner':>5} {'T':>4} {'library':>9} {'kernel':>9} {'floor':>8} {'share':>6} "
        f"{'error':>9}  us"
    )
    gc.collect()
    gc.freeze()  # a capture may collect garbage; nothing that exists now needs to be looked at each time
    rows = []
    for size in sizes:
        bench = Bench(size)
        for tokens in args.tokens:
            rows.append(bench.tune(tokens) if args.tune else bench.chosen(tokens))
            show(rows[-1])
    if args.tune:
        write_table(rows)
    else:
        write_json("linear.json", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="try all candidates and write the table")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only sizes of these names")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="only these numbers of tokens")
    args = parser.parse_args()
    start = time.perf_counter()
    if ON_GPU and args.tune:
        # The workers are forked before this process touches the GPU, and never touch it.
        workers = len(os.sched_getaffinity(0))
        with ProcessPoolExecutor(workers, mp_context=get_context("fork"), initializer=_compile_offline) as pool:
            list(pool.map(abs, range(4 * workers)))
            torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
            run(args, pool)
    else:
        run(args, None)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
