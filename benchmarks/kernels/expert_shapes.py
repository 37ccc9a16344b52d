"""Experts of published models on the GPU, beside the floor: ``python -m benchmarks.kernels.expert_shapes``.

Job: the time of the experts of models that no tile was tuned for, by number of tokens. ``--format`` names their
weights: ``bf16``; ``fp8`` with a scale for each row, as ``--quantization fp8`` makes them; ``block`` with a scale for
each block of 128 x 128, as most published FP8 checkpoints have. Owns: the sizes, which are those of published configs.
For FP8 the kernel for Hopper of many pairs is timed beside the tiles that the rule has without it.
``--tiles`` also times other tiles. With each number of rows, the tiles of one product are timed beside the first tile
of the other product, and then the best two together. ``--compile`` runs every kernel once, so that several processes
fill the cache of kernels before one of them measures.
``--bias`` makes routing uneven: each expert has a bias of that standard deviation, where the logits' own is 1.
``$OUT/expert-shapes-FORMAT-h200.json`` holds the times. Without a GPU tiny experts are rehearsed under the interpreter.
"""

from __future__ import annotations

import argparse
import itertools
import time
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.fp8_weights import FP8_FLOP_PER_S, fp8_weight
from benchmarks.kernels.measure import COPY_BYTES_PER_S, DEVICE, MATRIX_FLOP_PER_S, ON_GPU, graph_ms, write_json
from weft.ops.fp8 import Fp8Matrix
from weft.ops.moe import NO_EXTRAS
from weft.ops.moe.blocks import UNGROUPED_TOKENS, Tile, Tiles
from weft.ops.moe.experts import fused_moe_triton, moe_tiles
from weft.ops.moe.fp8_experts import Hopper, choose_config, choose_tiles, fp8_fused_moe_triton
from weft.ops.moe.router import topk_router_triton

EXPERTS = {
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "qwen3-30b-a3b TP=2": (128, 8, 2048, 384),
    "qwen3-235b-a22b TP=4": (128, 8, 4096, 384),
    "qwen3.5-35b-a3b": (256, 8, 2048, 512),
    "qwen3.5-122b-a10b TP=2": (256, 8, 3072, 512),
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "granite-4-small": (72, 10, 4096, 768),
    "kimi-linear-48b-a3b": (256, 8, 2304, 1024),
    "lfm2-8b-a1b": (32, 4, 2048, 1792),
    "jamba-mini": (16, 2, 4096, 14336),
    "granite-4.0-h-tiny": (64, 6, 1536, 512),
    "qwen3-next-80b-a3b": (512, 10, 2048, 512),
    "qwen3.5-397b-a17b TP=4": (512, 10, 4096, 256),
    "deepseek-v3 TP=8": (256, 8, 7168, 256),
    "glm-4.5-air": (128, 8, 4096, 1408),
    "mixtral-8x7b TP=2": (8, 2, 4096, 7168),
}
"""Experts of a layer, experts of a token, hidden size, width of an expert on one rank."""
TOKENS: tuple[int, ...] = (1, 8, 32, 128, 512, 2048, 8192)
Parts = tuple[tuple[int, ...], ...]
"""``Tile`` without its rows."""
SWEPT: dict[str, dict[int, tuple[Parts, Parts]]] = {
    "bf16": {
        16: (
            ((32, 128, 4, 4), (32, 256, 4, 3), (64, 128, 4, 4), (64, 128, 4, 3), (32, 256, 8, 4)),
            ((64, 128, 4, 4), (64, 128, 4, 3), (128, 128, 4, 2), (64, 256, 4, 2)),
        ),
        32: (((64, 128, 4, 3), (64, 64, 4, 4), (128, 64, 8, 3)), ((128, 128, 4, 3), (128, 64, 4, 4), (256, 64, 8, 3))),
        64: (((64, 64, 4, 4), (128, 64, 8, 3), (128, 64, 8, 4)), ((128, 64, 4, 3), (256, 64, 8, 3), (128, 64, 4, 4))),
        128: (
            ((128, 64, 8, 4), (128, 64, 8, 3), (64, 64, 4, 4)),
            ((256, 64, 8, 4), (256, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 4)),
        ),
    },
    "fp8": {
        16: (
            ((32, 128, 4, 4), (32, 128, 4, 6), (64, 128, 4, 4), (128, 128, 4, 4)),
            ((64, 128, 4, 4), (128, 128, 4, 3), (128, 128, 4, 4, 4)),
        ),
        32: (
            ((64, 128, 4, 4), (128, 128, 4, 3), (128, 128, 8, 4)),
            ((128, 128, 4, 4), (128, 128, 4, 4, 4), (128, 128, 4, 4, 8)),
        ),
        64: (
            ((128, 128, 8, 3), (128, 128, 8, 4), (64, 128, 4, 4)),
            ((128, 128, 4, 4), (128, 128, 4, 4, 8), (128, 128, 8, 4, 4)),
        ),
        128: (
            ((128, 128, 8, 4), (128, 128, 8, 3), (64, 128, 4, 4), (64, 128, 8, 4)),
            ((128, 128, 8, 4), (128, 128, 4, 3), (128, 128, 8, 4, 4), (128, 128, 4, 4, 8)),
        ),
    },
}
"""Tiles of both products to try, by rows."""
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
if not ON_GPU:
    EXPERTS, TOKENS = {"tiny": (8, 2, 128, 128)}, (1, 8)
    SWEPT = {
        "bf16": {16: (((32, 32, 4, 2), (16, 32, 4, 2)), ((16, 16, 4, 2),))},
        "fp8": {16: (((32, 128, 4, 2), (128, 128, 4, 2)), ((64, 128, 4, 2), (64, 128, 4, 2, 2)))},
    }


class Layer:
    """One layer's experts in one format."""

    def __init__(self, name: str, form: str, bias: float) -> None:
        self.name, self.form, self.bias = name, form, bias
        self.experts, self.top_k, self.hidden, self.width = EXPERTS[name]
        sizes = (2 * self.width, self.hidden), (self.hidden, self.width)
        self.block = 128 if form == "block" else 0
        if form != "bf16":
            self.matrices: list[Any] = [
                Fp8Matrix(*fp8_weight(*size, self.block, self.experts), None, self.block) for size in sizes
            ]
        else:
            shapes = [(self.experts, *size) for size in sizes]
            self.matrices = [torch.empty(s, device=DEVICE, dtype=DTYPE).normal_(std=s[2] ** -0.5) for s in shapes]

    def chosen(self, num_tokens: int) -> Any:
        if self.form != "bf16":
            return choose_config(self.matrices[1].weight, num_tokens, self.top_k, self.block, DTYPE)
        return moe_tiles(num_tokens * self.top_k, self.experts, DTYPE.itemsize, self.width)

    def beside(self, num_tokens: int) -> dict[str, Any]:
        """Both kernels of many pairs, where there are two."""
        if choose_config(self.matrices[1].weight, 1 << 20, self.top_k, self.block, DTYPE) is not Hopper.BLOCKS:
            return {}
        tiles = choose_tiles(self.matrices[1].weight, num_tokens, self.top_k, self.block)
        return {"tiles_us": tiles, "hopper_us": Hopper.BLOCKS}

    def others(self, num_tokens: int) -> list[Tiles]:
        """Tiles whose rows are about as many as an expert has pairs."""
        average, found = num_tokens * self.top_k / self.experts, []
        for rows, (ups, downs) in SWEPT["bf16" if self.form == "bf16" else "fp8"].items():
            if num_tokens > UNGROUPED_TOKENS and average / 8 <= rows <= max(16, 4 * average):
                tiles = [Tiles(Tile(rows, *up), Tile(rows, *downs[0])) for up in ups]
                found += tiles + [Tiles(tiles[0].up, Tile(rows, *down)) for down in downs[1:]]
        return found

    def run(self, inputs: tuple[torch.Tensor, ...], tiles: Any) -> torch.Tensor:
        x, weights, ids = inputs
        plain: dict[str, Any] = {"extras": NO_EXTRAS, "shared": None, "shared_gate": None}
        if self.form != "bf16":
            return fp8_fused_moe_triton(x, *self.matrices, weights, ids, **plain, config=tiles)
        return fused_moe_triton(x, *self.matrices, weights, ids, **plain, tiles=tiles)

    def inputs(self, num_tokens: int) -> list[tuple[torch.Tensor, ...]]:
        found: list[tuple[torch.Tensor, ...]] = []
        for _ in range(6 if num_tokens <= 32 and ON_GPU else 2):
            logits = torch.randn(num_tokens, self.experts, device=DEVICE)
            logits += self.bias * torch.randn(self.experts, device=DEVICE)
            weights, ids = topk_router_triton(logits, self.top_k, renormalize=True, num_tokens=num_tokens)
            found.append((torch.randn(num_tokens, self.hidden, device=DEVICE).to(DTYPE), weights, ids))
        return found

    def floor_us(self, inputs: list[tuple[torch.Tensor, ...]]) -> float:
        """Microseconds of the weights that these tokens need, or of their arithmetic."""
        used = sum(len(ids.unique()) for *_, ids in inputs) / len(inputs)
        size, peak = (1, FP8_FLOP_PER_S) if self.form != "bf16" else (DTYPE.itemsize, MATRIX_FLOP_PER_S)
        products = 6 * self.hidden * self.width
        return max(used * products / 2 * size / COPY_BYTES_PER_S, inputs[0][2].numel() * products / peak) * 1e6


def measure(layer: Layer, num_tokens: int, *, sweep: bool) -> dict[str, Any]:
    """Microseconds of one layer's experts, and the floor of what these tokens need."""
    inputs = layer.inputs(num_tokens)

    def us(tiles: Any) -> float:
        return round(graph_ms([partial(layer.run, each, tiles) for each in inputs], repeats=7) * 1e3, 1)

    floor, chosen = layer.floor_us(inputs), layer.chosen(num_tokens)
    row: dict[str, Any] = {"experts": layer.name, "format": layer.form, "tokens": num_tokens, "tiles": chosen}
    row |= {"bias": layer.bias} if layer.bias else {}
    row |= {"floor_us": round(floor, 1), "us": us(chosen)}
    if layer.form != "bf16" and num_tokens > UNGROUPED_TOKENS:
        row |= {name: us(config) for name, config in layer.beside(num_tokens).items()}
    if sweep:
        timed = [(us(tiles), tiles) for tiles in layer.others(num_tokens)]
        for rows in {tiles.up.rows for _, tiles in timed}:
            of_rows = [(time, tiles) for time, tiles in timed if tiles.up.rows == rows]
            first = of_rows[0][1]
            ups = min((time, tiles.up) for time, tiles in of_rows if tiles.down == first.down)
            downs = min((time, tiles.down) for time, tiles in of_rows if tiles.up == first.up)
            best = Tiles(ups[1], downs[1])
            timed += [] if any(tiles == best for _, tiles in of_rows) else [(us(best), best)]
        row["found"] = sorted((time, [list(tiles.up), list(tiles.down)]) for time, tiles in timed)
    return row


def compile_all(layer: Layer, tokens: list[int], part: int, parts: int, *, sweep: bool) -> None:
    """Run a part of the configurations once."""
    every = [(n, tiles) for n in tokens for tiles in [layer.chosen(n), *(layer.others(n) if sweep else [])]]
    for num_tokens, tiles in every[part::parts]:
        layer.run(layer.inputs(num_tokens)[0], tiles)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", choices=["bf16", "fp8", "block"], default="bf16")
    parser.add_argument("--experts", nargs="+", choices=list(EXPERTS), default=list(EXPERTS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--bias", type=float, default=0.0, help="spread of the experts' biases: uneven routing")
    parser.add_argument("--tiles", action="store_true", help="time other tiles too")
    parser.add_argument("--compile", nargs=2, type=int, metavar=("I", "N"), help="only run part I of N of the kernels")
    parser.add_argument("--seconds", type=float, default=120.0, help="begin no measurement after this time")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    end = time.monotonic() + args.seconds
    for name in args.experts:
        layer = Layer(name, args.format, args.bias)
        if args.compile:
            compile_all(layer, args.tokens, *args.compile, sweep=args.tiles)
            continue
        for num_tokens in itertools.takewhile(lambda _: time.monotonic() < end, args.tokens):
            rows.append(row := measure(layer, num_tokens, sweep=args.tiles))
            share = row["floor_us"] / row["us"] if row["us"] else 0.0
            beside = [row.get("tiles_us"), row.get("hopper_us"), *row.get("found", [])[:2]]
            print(f"{name:24} {num_tokens:5} {row['us']:9.1f} us, {share:.0%} of the floor", *beside, flush=True)
            write_json(f"expert-shapes-{args.format}{'-uneven' if args.bias else ''}-h200.json", rows)


if __name__ == "__main__":
    main()
