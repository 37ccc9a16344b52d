"""Mixture of experts on the GPU: every tile checked against float64, then timed beside the floor.

Usage: ``python -m benchmarks.kernels.moe [--ranks 2] [--chosen]``. It measures the experts' whole width, or with
``--ranks`` the share of one rank, for few tokens alone. ``--chosen`` measures only the tiles in use. Without a GPU it
rehearses on tiny shapes under the interpreter.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.measure import COPY_BYTES_PER_S, DEVICE, MATRIX_FLOP_PER_S, ON_GPU, error, graph_ms, write_json
from weft.ops.moe.blocks import Tile, Tiles
from weft.ops.moe.experts import fused_moe_triton, moe_tiles
from weft.ops.moe.groups import group_pairs
from weft.ops.moe.router import topk_router_triton

DTYPE = torch.bfloat16 if ON_GPU else torch.float32
EXPERTS, TOP_K, HIDDEN, WIDTH = (512, 10, 2048, 512) if ON_GPU else (8, 2, 32, 32)

# Alternatives by number of tokens: (rows, columns, inner, warps, stages) of the two products.
SWEEP = {
    1: [((16, 32, 128, 2, 4), (16, 64, 128, 2, 4)), ((16, 64, 128, 4, 3), (16, 128, 128, 4, 3)),
        ((16, 32, 256, 8, 3), (16, 64, 256, 8, 2)), ((16, 32, 64, 4, 6), (16, 64, 64, 4, 6))],
    2: [((16, 32, 128, 2, 4), (16, 64, 128, 2, 4)), ((16, 64, 128, 4, 3), (16, 128, 128, 4, 3)),
        ((16, 32, 256, 4, 3), (16, 64, 256, 4, 2))],
    8: [((16, 32, 256, 4, 3), (16, 64, 256, 4, 2)), ((16, 64, 128, 4, 3), (16, 128, 128, 4, 3)),
        ((16, 32, 128, 2, 4), (16, 64, 128, 2, 4))],
    128: [((16, 32, 256, 4, 3), (16, 64, 256, 4, 2)), ((16, 32, 128, 2, 4), (16, 64, 128, 2, 4))],
    2048: [((64, 64, 128, 4, 3), (64, 128, 128, 4, 3)), ((64, 128, 64, 8, 3), (64, 256, 64, 8, 3)),
           ((32, 64, 128, 4, 3), (32, 128, 128, 4, 3))],
    4096: [((128, 128, 64, 8, 4), (128, 256, 64, 8, 4)), ((128, 128, 64, 8, 3), (128, 256, 64, 8, 3))],
    8192: [((128, 128, 64, 8, 3), (128, 256, 64, 8, 3)), ((128, 64, 64, 4, 4), (128, 128, 64, 4, 3)),
           ((128, 64, 64, 8, 3), (128, 128, 64, 8, 3)), ((64, 128, 64, 4, 3), (64, 256, 64, 4, 3)),
           ((128, 128, 64, 4, 4), (128, 256, 64, 4, 4))],
}  # fmt: skip


# For a share of the width: each of these with each.
SHARE_UP = [(16, 32, 128, 4, 4), (16, 32, 256, 4, 3), (16, 32, 256, 8, 4), (16, 16, 512, 8, 3)]
SHARE_DOWN = [(16, 64, 128, 4, 4), (16, 32, 128, 4, 2), (16, 128, 128, 4, 2), (16, 64, 128, 2, 2)]
if not ON_GPU:
    SHARE_UP, SHARE_DOWN = [(16, 16, 32, 4, 2)], [(16, 16, 16, 4, 2)]


def alternatives(num_tokens: int, width: int) -> list[Tiles]:
    """Return the tiles in use, then tiles that may be faster."""
    chosen = moe_tiles(num_tokens * TOP_K, EXPERTS, DTYPE.itemsize, width)
    if width == WIDTH:
        return [chosen, *(Tiles(Tile(*up), Tile(*down)) for up, down in SWEEP.get(num_tokens, []))]
    if chosen.up.rows != 16:
        return [chosen]
    return [chosen, *(Tiles(Tile(*up), Tile(*down)) for up in SHARE_UP for down in SHARE_DOWN)]


def routed(num_tokens: int) -> tuple[Tensor, Tensor]:
    logits = torch.randn(num_tokens, EXPERTS, device=DEVICE)
    return topk_router_triton(logits, TOP_K, renormalize=True, num_tokens=num_tokens)


def expected(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, rows: list[int]) -> Tensor:
    """Some tokens, expert by expert, in float64."""
    outs = []
    for row in rows:
        total = torch.zeros(HIDDEN, dtype=torch.float64, device=DEVICE)
        for expert, weight in zip(ids[row].tolist(), weights[row], strict=True):
            gate, up = (gate_up[expert].double() @ x[row].double()).chunk(2)
            total += weight.double() * (down[expert].double() @ (torch.nn.functional.silu(gate) * up))
        outs.append(total)
    return torch.stack(outs)


def rows_of(num_tokens: int, gate_up: Tensor, down: Tensor, *, sweep: bool) -> list[dict[str, Any]]:
    pairs, width = num_tokens * TOP_K, down.shape[2]
    tiles = alternatives(num_tokens, width)[: None if sweep else 1]
    inputs = [
        (torch.randn(num_tokens, HIDDEN, device=DEVICE).to(DTYPE), *routed(num_tokens))
        for _ in range(8 if num_tokens <= 8 and ON_GPU else 2)
    ]
    hit = sum(len(ids.unique()) for _, _, ids in inputs) / len(inputs)
    weight_bytes = hit * 3 * HIDDEN * width * DTYPE.itemsize
    flops = pairs * 6 * HIDDEN * width
    floor = max(weight_bytes / COPY_BYTES_PER_S, flops / MATRIX_FLOP_PER_S) * 1e6
    rows = []
    for tile in tiles:
        try:
            calls = [
                lambda x=x, w=w, i=i, t=tile: fused_moe_triton(x, gate_up, down, w, i, tiles=t) for x, w, i in inputs
            ]
            ms = graph_ms(calls, repeats=9)
        except Exception as problem:  # a tile may not fit in shared memory
            print(f"{num_tokens} {tile}: {type(problem).__name__} {str(problem)[:80]}")
            continue
        x, w, i = inputs[-1]
        out = fused_moe_triton(x, gate_up, down, w, i, tiles=tile)
        checked = sorted({0, num_tokens // 2, num_tokens - 1})
        worst = error(out[checked], expected(x, gate_up, down, w, i, checked))
        if num_tokens > 500 and ON_GPU:
            worst = max(worst, error(out, fused_moe_triton(x, gate_up, down, w, i, tiles=tiles[0])))
        rows.append({"op": f"moe {num_tokens}", "tiles": tile, "us": ms * 1e3, "floor_us": floor, "error": worst})
    return rows


def part_rows(num_tokens: int) -> list[dict[str, Any]]:
    """Routing and grouping alone."""
    logits = torch.randn(num_tokens, EXPERTS, device=DEVICE).to(DTYPE)
    _, ids = routed(num_tokens)
    count = torch.tensor([num_tokens], dtype=torch.int32, device=DEVICE)
    route = [lambda: topk_router_triton(logits, TOP_K, renormalize=True, num_tokens=count)] * 5
    group = [lambda: group_pairs(ids, EXPERTS, moe_tiles(ids.numel(), EXPERTS, DTYPE.itemsize, WIDTH).up.rows)] * 5
    names = (("router", route), ("group", group))
    return [
        {"op": f"{name} {num_tokens}", "tiles": "", "us": graph_ms(calls) * 1e3, "floor_us": 0.0, "error": 0.0}
        for name, calls in names
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--chosen", action="store_true", help="only the tiles in use")
    args = parser.parse_args()
    ranks = args.ranks
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    width = WIDTH // ranks
    gate_up = torch.empty(EXPERTS, 2 * width, HIDDEN, device=DEVICE, dtype=DTYPE).normal_(std=HIDDEN**-0.5)
    down = torch.empty(EXPERTS, HIDDEN, width, device=DEVICE, dtype=DTYPE).normal_(std=width**-0.5)
    rows: list[dict[str, Any]] = []
    few = (1, 2, 8, 32, 128) if ON_GPU else (1, 8)
    for num_tokens in (*few, 256, 512, 1024, 2048, 4096, 8192) if ON_GPU and ranks == 1 else few:
        rows += rows_of(num_tokens, gate_up, down, sweep=not args.chosen)
    if ranks == 1:
        for num_tokens in (1, 128, 1024, 8192) if ON_GPU else (3,):
            rows += part_rows(num_tokens)
    limit = 1e-2 if ON_GPU else 1e-5
    print(f"{'operation':14} {'up tile':24} {'down tile':24} {'us':>9} {'floor us':>9} {'share':>6} {'error':>9}")
    for row in rows:
        up, down_tile = (tuple(t) for t in row["tiles"]) if row["tiles"] else ("", "")
        share = row["floor_us"] / row["us"] if row["us"] else 0.0
        verdict = "" if row["error"] < limit else "  WRONG"
        print(
            f"{row['op']:14} {up!s:24} {down_tile!s:24} {row['us']:9.2f} {row['floor_us']:9.2f} {share:6.2f} "
            f"{row['error']:9.1e}{verdict}"
        )
    write_json("moe.json" if ranks == 1 else f"moe-{ranks}.json", rows)


if __name__ == "__main__":
    main()
