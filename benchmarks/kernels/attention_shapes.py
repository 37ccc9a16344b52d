"""Attention of published models on the GPU, beside the floor: ``python -m benchmarks.kernels.attention_shapes``.

Job: the time of paged attention as an engine calls it, for head shapes that no tile was tuned for. Owns: the shapes,
which are those of published configs at one or several ranks. ``--compile I N`` runs part I of N of the cases once, so
that several processes fill the cache of kernels before one of them measures. Without a GPU tiny shapes are rehearsed
under the interpreter. The floor is that of the bytes of keys and values, or of the FLOPs of scores and sums.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import torch

from benchmarks.kernels import attention
from benchmarks.kernels.attention import make_case
from benchmarks.kernels.measure import COPY_BYTES_PER_S, DEVICE, LEAST_CALLS, MATRIX_FLOP_PER_S, ON_GPU, graph_ms
from weft.bench import report
from weft.ops.attention import paged_attention
from weft.ops.backend import Backend

HEADS = {
    "qwen3-0.6b": (16, 8, 128),
    "llama-3.1-8b": (32, 8, 128),
    "llama-3.1-70b TP=8": (8, 1, 128),
    "qwen3-32b": (64, 8, 128),
    "mistral-small-24b TP=4": (8, 2, 128),
    "qwen3-14b": (40, 8, 128),
    "qwen3-30b-a3b": (32, 4, 128),
    "qwen3-235b-a22b": (64, 4, 128),
    "falcon-h1-34b": (20, 4, 128),
    "olmo-2-1b": (16, 16, 128),
    "qwen3-next-80b-a3b": (16, 2, 256),
    "qwen3.5-27b": (24, 4, 256),
    "qwen3.5-122b-a10b": (32, 2, 256),
    "gemma-2-9b": (16, 8, 256),
    "gpt-oss-20b": (64, 8, 64),
    "lfm2-8b-a1b": (32, 8, 64),
    "phi-3-mini": (32, 32, 96),
    "zamba2-7b": (32, 32, 224),
}
"""Query heads, key heads and head size on one rank."""
DECODES: tuple[tuple[int, int], ...] = (
    (1, 1000),
    (1, 32000),
    (4, 4000),
    (8, 1000),
    (8, 16000),
    (32, 1000),
    (32, 8000),
    (128, 1000),
    (256, 300),
)
"""Sequences, and tokens of each."""
PREFILLS: tuple[tuple[list[int], int], ...] = (
    ([256], 0),
    ([512], 0),
    ([2048], 0),
    ([8192], 0),
    ([256] * 16, 0),
    ([512], 8000),
    ([64] * 32, 500),
    ([64], 0),
    ([128], 0),
    ([1024], 0),
    ([1024] * 4, 0),
    ([64] * 4, 0),
    ([16], 8000),
    ([64], 8000),
    ([256], 2000),
    ([64] * 4, 1000),
    ([128] * 16, 2000),
)
"""New tokens of each sequence, and tokens before them."""
if not ON_GPU:
    HEADS, DECODES, PREFILLS = {"tiny": (4, 2, 16)}, ((2, 40),), (([20, 3], 0),)
    CACHED = attention.DTYPE
else:
    CACHED = torch.float8_e4m3fn


def measure(name: str, new: list[int], context: int, fp8: bool, *, compile_only: bool) -> dict[str, Any]:
    """Time one batch.

    Args:
        new: this step's tokens of each sequence.
        context: tokens before them in the cache.
        fp8: the cache is in e4m3.
    """
    attention.MODELS[name] = HEADS[name]
    query_heads, key_heads, dim = HEADS[name]
    lens = [n + context for n in new]
    size = 1 if fp8 else attention.DTYPE.itemsize
    kv_bytes = sum(lens) * key_heads * dim * 2 * size
    flops = sum(4 * query_heads * dim * n * (context + (n + 1) / 2) for n in new)
    width = max(16384 if ON_GPU else 64, -(-max(lens) // 4096) * 4096)
    count = 1 if compile_only else max(1, min(12, (200 << 20) // kv_bytes))  # leave the L2 cache behind
    calls = []
    for _ in range(count):
        q, k, v, batch = make_case(name, new, lens, width)
        if fp8:
            k, v = k.to(CACHED), v.to(CACHED)
        calls.append(
            partial(paged_attention, q, k, v, batch, scale=dim**-0.5, out=torch.empty_like(q), backend=Backend.TRITON)
        )
    moved = kv_bytes + 2 * sum(new) * query_heads * dim * attention.DTYPE.itemsize
    floor = max(moved / COPY_BYTES_PER_S, flops / MATRIX_FLOP_PER_S) * 1e6
    if compile_only:
        calls[0]()
    us = 0.0 if compile_only else graph_ms(calls, repeats=5, least=max(2, min(LEAST_CALLS, int(3000 / floor)))) * 1e3
    case = {"new": new[0], "sequences": len(new), "context": context, "fp8_cache": fp8}
    return {"heads": name, **case, "us": round(us, 2), "floor_us": round(floor, 2)}


def cases() -> list[tuple[str, list[int], int, bool]]:
    """All cases, those of one model after those of another."""
    found = []
    for name in HEADS:
        of_name = [([1] * size, context - 1) for size, context in DECODES] + list(PREFILLS)
        found += [(name, new, context, False) for new, context in of_name]
        found += [(name, [1] * size, context - 1, True) for size, context in DECODES if ON_GPU and context >= 8000]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", nargs="*", default=list(HEADS), choices=list(HEADS))
    parser.add_argument("--prefills", action="store_true", help="leave out decodes")
    parser.add_argument("--compile", nargs=2, type=int, metavar=("I", "N"), help="only run part I of N of the cases")
    parser.add_argument("--seconds", type=float, default=120.0, help="begin no measurement after this time")
    parser.add_argument("--json")
    args = parser.parse_args()
    target, end, rows = report.open_json(args.json), time.monotonic() + args.seconds, []
    of_heads = [case for case in cases() if case[0] in args.heads and not (args.prefills and max(case[1]) == 1)]
    if args.compile:
        for case in of_heads[args.compile[0] :: args.compile[1]]:
            measure(*case, compile_only=True)
        return
    for case in of_heads:
        if time.monotonic() < end:
            rows.append(measure(*case, compile_only=False))
    report.write_json(target, report.provenance(DEVICE) | {"left_out": len(of_heads) - len(rows), "rows": rows})
    rows.sort(key=lambda row: row["floor_us"] / row["us"] if row["us"] else 0.0)
    columns = ("heads", "sequences", "new", "context", "FP8 cache", "us", "floor", "share")
    cells = [
        [row["heads"], str(row["sequences"]), str(row["new"]), str(row["context"]), "yes" if row["fp8_cache"] else "",
         f"{row['us']:.1f}", f"{row['floor_us']:.1f}", f"{row['floor_us'] / row['us']:.0%}" if row["us"] else ""]
        for row in rows[:60]
    ]  # fmt: skip
    report.table(f"{len(rows)} cases; the worst:", columns, cells)


if __name__ == "__main__":
    main()
