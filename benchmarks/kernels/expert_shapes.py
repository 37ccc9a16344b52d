"""Experts of published models on the GPU, beside the floor: ``python -m benchmarks.kernels.expert_shapes``.

Job: the time of ``fused_moe`` for the experts of models that no tile was tuned for, in bfloat16, by number of tokens.
Owns: the sizes, which are those of published configs. With ``--tiles`` it also times other tiles of few tokens.
``$OUT/expert-shapes-h200.json`` holds the times. Without a GPU tiny experts are rehearsed under the interpreter.
"""

from __future__ import annotations

import argparse
import itertools
import time
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.measure import COPY_BYTES_PER_S, DEVICE, MATRIX_FLOP_PER_S, ON_GPU, graph_ms, write_json
from weft.ops.moe.blocks import Tile, Tiles
from weft.ops.moe.experts import fused_moe_triton, moe_tiles
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
}
"""Experts of a layer, experts of a token, hidden size, width of an expert on one rank."""
TOKENS: tuple[int, ...] = (1, 8, 32, 128, 512, 2048, 8192)
Shapes = tuple[tuple[int, int, int, int, int], ...]
UP: Shapes = ((16, 32, 128, 4, 4), (16, 32, 256, 4, 3), (16, 64, 128, 4, 4), (16, 64, 128, 4, 3), (16, 32, 256, 8, 4))
DOWN: Shapes = ((16, 64, 128, 4, 4), (16, 64, 128, 4, 3), (16, 128, 128, 4, 2), (16, 64, 256, 4, 2))
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
if not ON_GPU:
    EXPERTS, TOKENS = {"tiny": (8, 2, 32, 32)}, (1, 8)
    UP, DOWN = ((16, 32, 32, 4, 2),), ((16, 16, 16, 4, 2),)


def measure(name: str, gate_up: torch.Tensor, down: torch.Tensor, num_tokens: int, *, sweep: bool) -> dict[str, Any]:
    """Microseconds of one layer's experts, and the floor of what these tokens need."""
    experts, top_k, hidden, width = EXPERTS[name]
    inputs = []
    for _ in range(6 if num_tokens <= 32 and ON_GPU else 2):
        logits = torch.randn(num_tokens, experts, device=DEVICE)
        weights, ids = topk_router_triton(logits, top_k, renormalize=True, num_tokens=num_tokens)
        inputs.append((torch.randn(num_tokens, hidden, device=DEVICE).to(DTYPE), weights, ids))
    used = sum(len(ids.unique()) for _, _, ids in inputs) / len(inputs)
    moved, flops = used * 3 * hidden * width * DTYPE.itemsize, num_tokens * top_k * 6 * hidden * width
    floor = max(moved / COPY_BYTES_PER_S, flops / MATRIX_FLOP_PER_S) * 1e6
    chosen = moe_tiles(num_tokens * top_k, experts, DTYPE.itemsize, width)

    def us(tiles: Tiles) -> float:
        calls = [partial(fused_moe_triton, x, gate_up, down, w, i, tiles=tiles) for x, w, i in inputs]
        return round(graph_ms(calls, repeats=7) * 1e3, 1)

    row: dict[str, Any] = {"experts": name, "tokens": num_tokens, "floor_us": round(floor, 1), "us": us(chosen)}
    if sweep and chosen.up.rows == 16:
        pairs = [Tiles(Tile(*up), chosen.down) for up in UP] + [Tiles(chosen.up, Tile(*down)) for down in DOWN]
        row["found"] = sorted((us(tiles), [list(tiles.up), list(tiles.down)]) for tiles in pairs)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiles", action="store_true", help="time other tiles of few tokens too")
    parser.add_argument("--seconds", type=float, default=120.0, help="begin no measurement after this time")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    end = time.monotonic() + args.seconds
    for name, (experts, _, hidden, width) in EXPERTS.items():
        gate_up = torch.empty(experts, 2 * width, hidden, device=DEVICE, dtype=DTYPE).normal_(std=hidden**-0.5)
        down = torch.empty(experts, hidden, width, device=DEVICE, dtype=DTYPE).normal_(std=width**-0.5)
        for num_tokens in itertools.takewhile(lambda _: time.monotonic() < end, TOKENS):
            rows.append(row := measure(name, gate_up, down, num_tokens, sweep=args.tiles))
            share = row["floor_us"] / row["us"] if row["us"] else 0.0
            print(f"{name:24} {num_tokens:5} {row['us']:9.1f} us, {share:.0%} of the floor", row.get("found", [""])[0])
            write_json("expert-shapes-h200.json", rows)


if __name__ == "__main__":
    main()
