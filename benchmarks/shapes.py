"""Linear products of published models, beside the floor and the matrix library: ``python -m benchmarks.shapes``.

Job: time every product of 25 models at several tensor-parallel sizes and numbers of rows, in bfloat16 and FP8, and list
the worst. Owns: the models' sizes, which are those of their published configs. Does not know: how a kernel is chosen.

    python -m benchmarks.shapes [--models WORD …] [--tp 1 2 4 8] [--rows 1 8 32 …] [--formats bf16 token tensor block]
                                [--least-mb 8] [--part I N] [--seconds 300] [--worst 50] [--json FILE]
    python -m benchmarks.shapes … --compile     # runs everything once: several such processes fill the cache of kernels
    python -m benchmarks.shapes --read FILE …   # only lists the worst

A product is a weight ``[out, in]`` of one rank. Products come in a shuffled order of a fixed seed, so that those left
out for time are a random part. Weights rotate, so that none is in the cache when its turn comes. The floor is the
larger of bytes over the bandwidth and FLOPs over the arithmetic ceiling. ``library`` is the time of the matrix library
for the same product: cuBLASLt in bfloat16, ``torch._scaled_mm`` in FP8 without quantising the inputs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.fp8_weights import FP8_FLOP_PER_S, fp8_weight
from benchmarks.kernels.measure import COPY_BYTES_PER_S, DEVICE, LEAST_CALLS, MATRIX_FLOP_PER_S, ON_GPU, graph_ms
from weft.bench import report
from weft.ops.backend import Backend
from weft.ops.linear import fp8_few_rows, fp8_linear, fp8_linear_silu_mul, linear, linear_silu_mul

ROTATED_BYTES = 192 << 20 if ON_GPU else 0
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 2048, 8192)
FORMATS = ("bf16", "token", "tensor", "block")
"""Storage of weights: bfloat16, or FP8 with a scale for each token, for the whole input tensor, or for each block."""


@dataclass(frozen=True)
class Model:
    """Sizes of a published model.

    Attributes:
        hidden, vocab: of the residual stream and the output head.
        heads, kv_heads, head_dim: of softmax attention; ``gated``: query heads carry an output gate.
        mlp: width of the dense MLP, or of the shared expert; 0 if there is none.
        linear: key heads, value heads, key and value dimensions of Gated DeltaNet or KDA.
        mamba: inner width, groups, state size, heads of Mamba-2.
    """

    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    gated: bool = False
    linear: tuple[int, int, int, int] | None = None
    mamba: tuple[int, int, int, int] | None = None


MODELS = {
    "llama-3.1-8b": Model(4096, 128256, 32, 8, 128, 14336),
    "llama-3.1-70b": Model(8192, 128256, 64, 8, 128, 28672),
    "llama-3.1-405b": Model(16384, 128256, 128, 8, 128, 53248),
    "mistral-7b": Model(4096, 32768, 32, 8, 128, 14336),
    "mistral-small-24b": Model(5120, 131072, 32, 8, 128, 32768),
    "qwen3-0.6b": Model(1024, 151936, 16, 8, 128, 3072),
    "qwen3-1.7b": Model(2048, 151936, 16, 8, 128, 6144),
    "qwen3-4b": Model(2560, 151936, 32, 8, 128, 9728),
    "qwen3-8b": Model(4096, 151936, 32, 8, 128, 12288),
    "qwen3-14b": Model(5120, 151936, 40, 8, 128, 17408),
    "qwen3-32b": Model(5120, 151936, 64, 8, 128, 25600),
    "qwen3-30b-a3b": Model(2048, 151936, 32, 4, 128, 0),
    "qwen3-235b-a22b": Model(4096, 151936, 64, 4, 128, 0),
    "qwen3-next-80b-a3b": Model(2048, 151936, 16, 2, 256, 512, True, (16, 32, 128, 128)),
    "qwen3.5-9b": Model(4096, 248320, 16, 4, 256, 12288, True, (16, 32, 128, 128)),
    "qwen3.5-27b": Model(5120, 248320, 24, 4, 256, 17408, True, (16, 48, 128, 128)),
    "qwen3.5-35b-a3b": Model(2048, 248320, 16, 2, 256, 512, True, (16, 32, 128, 128)),
    "qwen3.5-122b-a10b": Model(3072, 248320, 32, 2, 256, 1024, True, (16, 64, 128, 128)),
    "qwen3.5-397b-a17b": Model(4096, 248320, 32, 2, 256, 1024, True, (16, 64, 128, 128)),
    "gpt-oss-20b": Model(2880, 201088, 64, 8, 64, 0),
    "nemotron-h-8b": Model(4096, 131072, 32, 8, 128, 21504, mamba=(8192, 8, 128, 128)),
    "nemotron-h-47b": Model(8192, 131072, 64, 8, 128, 30720, mamba=(16384, 8, 256, 256)),
    "granite-4-small": Model(4096, 100352, 32, 8, 128, 1536, mamba=(8192, 1, 128, 128)),
    "falcon-h1-34b": Model(5120, 261120, 20, 4, 128, 21504, mamba=(4096, 2, 256, 32)),
    "kimi-linear-48b-a3b": Model(2304, 163840, 32, 32, 128, 1024, linear=(32, 32, 128, 128)),
    "lfm2-8b-a1b": Model(2048, 65536, 32, 8, 64, 7168),
    "jamba-mini": Model(4096, 65536, 32, 8, 128, 14336),
}
"""Names and sizes of the published configs."""


@dataclass(frozen=True, order=True)
class Product:
    """A weight ``[out, inner]`` of one rank; ``gated``: SiLU of the first half of its outputs times the second."""

    out: int
    inner: int
    gated: bool = False


def products(model: Model, tp: int) -> Iterator[tuple[str, Product]]:
    """The linear products of one rank, with their names. Dimensions that ``tp`` does not divide are left out."""
    h, kv = model.hidden, max(1, model.kv_heads // tp)
    if model.heads % tp == 0:
        q = model.heads // tp * model.head_dim
        yield "qkv", Product(q * (2 if model.gated else 1) + 2 * kv * model.head_dim, h)
        yield "o", Product(h, q)
    if model.mlp and model.mlp % tp == 0:
        yield "gate_up", Product(2 * model.mlp // tp, h, True)
        yield "down", Product(h, model.mlp // tp)
    if model.linear and model.linear[1] % tp == 0 and model.linear[0] % tp == 0:
        hk, hv, dk, dv = model.linear
        yield "linear in", Product((2 * hk * dk + 2 * hv * dv) // tp, h)
        yield "linear out", Product(h, hv * dv // tp)
    if model.mamba and model.mamba[3] % tp == 0:
        width, groups, state, heads = model.mamba
        yield "mamba in", Product((2 * width + heads) // tp + 2 * max(1, groups // tp) * state, h)
        yield "mamba out", Product(h, width // tp)
    yield "head", Product(-(-model.vocab // tp), h)


def suite(words: list[str], sizes: list[int]) -> dict[Product, list[str]]:
    """Every product once, with the names of the models that have it."""
    found: dict[Product, list[str]] = {}
    for name, model in MODELS.items():
        if not words or any(word in name for word in words):
            for tp in sizes:
                for what, product in products(model, tp):
                    found.setdefault(product, []).append(f"{name} {what} TP={tp}")
    return found


def floor_us(product: Product, rows: int, fp8: bool) -> float:
    """Microseconds at the device's ceilings: weights read once, inputs read and outputs written once."""
    width = product.out // 2 if product.gated else product.out
    moved = product.out * product.inner * (1 if fp8 else 2) + 2 * rows * (product.inner + width)
    flops = 2 * rows * product.out * product.inner
    return max(moved / COPY_BYTES_PER_S, flops / (FP8_FLOP_PER_S if fp8 else MATRIX_FLOP_PER_S)) * 1e6


class Timed:
    """One weight in one format."""

    def __init__(self, product: Product, form: str, count: int) -> None:
        """``count``: copies of the weight, which calls take in turn."""
        self.product, self.form, self.fp8 = product, form, form != "bf16"
        block, shape = 128 if form == "block" else 0, (product.out, product.inner)
        static = torch.full((1,), 0.05, device=DEVICE) if form == "tensor" else None
        if self.fp8:
            self.weights: list[Any] = [fp8_weight(*shape, block) for _ in range(count)]
            call = fp8_linear_silu_mul if product.gated else fp8_linear
            self.ours = [
                partial(call, weight=w, weight_scale=s, input_scale=static, block=block) for w, s in self.weights
            ]
        else:
            self.weights = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(count)]
            self.ours = [partial(linear_silu_mul if product.gated else linear, weight=w) for w in self.weights]

    def calls(self, x: torch.Tensor) -> list[Any]:
        return [partial(each, x, backend=Backend.TRITON) for each in self.ours]

    def library(self, x: torch.Tensor) -> list[Any] | None:
        """The matrix library's calls; None where it has no such product."""
        if not self.fp8:
            return [partial(torch.mm, x, weight.t()) for weight in self.weights]
        if self.form != "token" or self.product.out % 16 or self.product.inner % 16:
            return None
        values = x.to(torch.float8_e4m3fn)
        scales = torch.ones(len(x), 1, device=DEVICE)
        return [
            partial(torch._scaled_mm, values, weight.t(), scales, scale.t(), out_dtype=torch.bfloat16)
            for weight, scale in self.weights
        ]

    def inputs(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, self.product.inner, device=DEVICE, dtype=torch.bfloat16)

    def measure(self, row_counts: list[int]) -> Iterator[dict[str, Any]]:
        """Times for every number of rows."""
        shape = {"out": self.product.out, "inner": self.product.inner, "gated": self.product.gated}
        for rows in row_counts:
            x, floor = self.inputs(rows), floor_us(self.product, rows, self.fp8)
            us = partial(graph_ms, repeats=7, least=max(len(self.weights), min(LEAST_CALLS, int(5000 / floor))))
            library = self.library(x)
            row = shape | {"format": self.form, "rows": rows, "us": round(us(self.calls(x)) * 1e3, 2)}
            yield row | {
                "floor_us": round(floor, 2), "library_us": round(us(library) * 1e3, 2) if library else None
            }  # fmt: skip


def worst(rows: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Rows with the smallest share of the floor, among products of at least 4 MB."""
    large = [row for row in rows if row["out"] * row["inner"] * (2 if row["format"] == "bf16" else 1) >= 4 << 20]
    return sorted(large, key=lambda row: row["floor_us"] / row["us"] if row["us"] else 0.0)[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=[], help="words of the models' names; all without")
    parser.add_argument("--tp", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS) if ON_GPU else [1])
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--least-mb", type=float, default=0.0, help="leave out smaller weights")
    parser.add_argument("--seconds", type=float, default=300.0, help="begin no product after this time")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="one product of N")
    parser.add_argument("--compile", action="store_true", help="run every product once and time none")
    parser.add_argument("--read", nargs="*", metavar="FILE", help="list the worst of these files")
    parser.add_argument("--worst", type=int, default=50)
    parser.add_argument("--rule", nargs="*", default=[], metavar="NAME=INT", help="constants of fp8_few_rows.py")
    parser.add_argument("--json")
    args = parser.parse_args()
    for name, _, value in (rule.partition("=") for rule in args.rule):
        assert isinstance(getattr(fp8_few_rows, name), int), name
        setattr(fp8_few_rows, name, int(value))
    if args.read:
        files = [json.loads(Path(name).read_text()) for name in args.read]
        print_worst(
            [row for file in files for row in file["rows"]], sum(file["left_out"] for file in files), args.worst
        )
        return
    target, end = report.open_json(args.json), time.monotonic() + args.seconds
    found, rows, left = suite(args.models, args.tp), [], 0
    order = sorted(found)
    random.Random(0).shuffle(order)
    place, parts = args.part
    for product, form in itertools.product(order[place::parts], args.formats):
        size = product.out * product.inner * (2 if form == "bf16" else 1)
        if size < args.least_mb * 1e6 or (form == "block" and (product.out % 128 or product.inner % 128)):
            continue
        if time.monotonic() > end:
            left += 1
        elif args.compile:
            timed = Timed(product, form, 1)
            for count in args.rows:
                timed.calls(timed.inputs(count))[0]()
        else:
            timed = Timed(product, form, max(2, ROTATED_BYTES // size))
            rows += [row | {"used_by": found[product]} for row in timed.measure(args.rows)]
            report.write_json(target, report.provenance(DEVICE) | {"left_out": left, "rows": rows})
    if not args.compile:
        report.write_json(target, report.provenance(DEVICE) | {"left_out": left, "rows": rows})
        print_worst(rows, left, args.worst)


def print_worst(rows: list[dict[str, Any]], left: int, count: int) -> None:
    """Print a table of the ``count`` worst."""
    cells = [
        [f"{r['out']} x {r['inner']}{' gated' if r['gated'] else ''}", r["format"], str(r["rows"]), f"{r['us']:.1f}",
         f"{r['floor_us']:.1f}", f"{r['floor_us'] / r['us']:.0%}" if r["us"] else "", str(r["library_us"] or ""),
         r["used_by"][0]]
        for r in worst(rows, count)
    ]  # fmt: skip
    columns = ("weight", "format", "rows", "us", "floor", "share", "library", "for example")
    report.table(f"{len(rows)} measured, {left} products left out for time; the worst:", columns, cells)


if __name__ == "__main__":
    main()
