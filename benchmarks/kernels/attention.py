"""Paged attention on the GPU: every tile checked against float64, then timed beside the floor.

Usage: ``python -m benchmarks.kernels.attention [--decode-only | --prefill-only] [--chosen]``; without a GPU it
rehearses on tiny shapes under the interpreter. ``--chosen`` times no tiles but those in use, which tells from how many
rows on the kernel for Hopper pays (``_HOPPER_ROWS`` in ``weft/ops/attention/paged.py``).
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.measure import COPY_BYTES_PER_S, DEVICE, MATRIX_FLOP_PER_S, ON_GPU, error, graph_ms, write_json
from weft.forward_context import Batch
from weft.ops.attention import AttentionCall
from weft.ops.attention.decode import DecodeChoice, decode_tile, launch_decode
from weft.ops.attention.paged import GLUON_IS_KNOWN
from weft.ops.attention.prefill import launch_prefill, prefill_tile
from weft.ops.attention.tiles import Tile

if GLUON_IS_KNOWN:
    from weft.ops.attention import prefill_hopper as hopper

PAGE = 16
MODELS = {"A": (16, 8, 128), "B": (16, 2, 256)}
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
HOPPER = None
"""In place of a tile: the kernel that has one of its own."""

DECODE_TILES = {
    "A": [Tile(16, *t) for t in ((64, 4, 3, True), (64, 4, 3, False), (32, 2, 3, True), (128, 4, 2, False))],
    "B": [Tile(16, *t) for t in ((64, 4, 2, False), (64, 4, 2, True), (32, 4, 3, True), (64, 8, 2, True))],
}
DECODE_SPLITS = (256, 512, 1024) if ON_GPU else (256,)
DECODE_CASES = [(size, 1024) for size in (1, 8, 32, 64, 128, 256)] + [(4, 16000), (32, 8192), (8, 32000)]
"""Sequences, and tokens of each at least."""
PREFILL_TILES = {
    "A": [
        Tile(*t)
        for t in (
            (64, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3), (64, 128, 4, 2), (128, 128, 8, 2), (128, 64, 4, 3),
            (128, 64, 8, 4), (128, 128, 4, 2), (128, 32, 8, 4),
        )
    ],
    "B": [Tile(*t) for t in ((128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 3), (64, 64, 4, 3), (64, 32, 4, 3))],
}  # fmt: skip


def make_case(
    model: str, query_lens: list[int], seq_lens: list[int], max_len: int
) -> tuple[Tensor, Tensor, Tensor, Batch]:
    """Random q and caches whose sequences have scattered pages."""
    hq, hkv, dim = MODELS[model]
    pages_of = [-(-n // PAGE) for n in seq_lens]
    ids = torch.randperm(sum(pages_of)) + 1
    table = torch.zeros(len(seq_lens), max_len // PAGE, dtype=torch.int32)
    begin = 0
    for row, count in zip(table, pages_of, strict=True):
        row[:count] = ids[begin : begin + count]
        begin += count
    shape = (len(ids) + 1, PAGE, hkv, dim)
    k, v = (torch.randn(shape, device=DEVICE, dtype=DTYPE) for _ in range(2))
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    q = torch.randn(int(starts[-1]), hq, dim, device=DEVICE, dtype=DTYPE)
    empty = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    batch = Batch(
        num_tokens=q.shape[0], num_seqs=len(seq_lens), num_decodes=0, max_query_len=max(query_lens),
        max_seq_len=max(seq_lens), positions=empty, slot_mapping=empty, cu_seqlens_q=starts.int().to(DEVICE),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE), page_table=table.to(DEVICE),
        state_slots=empty,
    )  # fmt: skip
    return q, k, v, batch


def expected(q: Tensor, k: Tensor, v: Tensor, batch: Batch, seq: int) -> Tensor:
    """One sequence in float64, on at most its last 300 query tokens: ``[n, Hq, D]``."""
    begin, end = batch.cu_seqlens_q[seq : seq + 2].tolist()
    length = int(batch.seq_lens[seq])
    slots = (batch.page_table[seq, :, None] * PAGE + torch.arange(PAGE, device=DEVICE)).flatten()[:length].long()
    keys, values = (c.flatten(0, 1)[slots].double() for c in (k, v))
    queries = q[max(begin, end - 300) : end].double()
    group = q.shape[1] // keys.shape[1]
    outs = []
    for head in range(q.shape[1]):
        scores = queries[:, head] @ keys[:, head // group].T * q.shape[2] ** -0.5
        positions = torch.arange(length - len(queries), length, device=DEVICE)
        scores.masked_fill_(torch.arange(length, device=DEVICE)[None] > positions[:, None], -torch.inf)
        outs.append(scores.softmax(-1) @ values[:, head // group])
    return torch.stack(outs, dim=1)


def worst_error(out: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Batch, seqs: list[int]) -> float:
    worst = 0.0
    for seq in seqs:
        want = expected(q, k, v, batch, seq)
        end = int(batch.cu_seqlens_q[seq + 1])
        found = error(out[end - len(want) : end], want)
        worst = found if found != found else max(worst, found)
    return worst


def decode_rows(model: str, size: int, context: int, max_len: int, sweep: bool) -> list[dict[str, Any]]:
    hq, hkv, dim = MODELS[model]
    lens = [context + int(n) for n in torch.randint(0, 128 if ON_GPU else 20, (size,))]
    kv_bytes = sum(lens) * hkv * dim * 2 * DTYPE.itemsize
    # Rotate through sets of caches that exceed the L2 cache together (12 sets at most).
    sets = [make_case(model, [1] * size, lens, max_len) for _ in range(max(1, min(12, (200 << 20) // kv_bytes)))]
    chosen = decode_tile(size, hkv, dim, hq // hkv, DTYPE.itemsize, DTYPE.itemsize, max_len)
    trials: list[tuple[Tile, dict[str, Any]]] = [(chosen, {})]
    if sweep:  # of one size for all sequences, each by a program of its own
        for split, tile in itertools.product(DECODE_SPLITS, DECODE_TILES[model]):
            aim = size * hkv * -(-max(lens) // split)
            trials.append((tile, {"split": split, "double_from": max_len, "aim": aim}))
    rows = []
    for tile, options in trials:
        outs = [torch.full_like(s[0], torch.nan) for s in sets]

        def call(
            i: int, tile: Tile = tile, outs: list[Tensor] = outs, options: dict[str, Any] = options
        ) -> Callable[[], None]:
            q, k, v, batch = sets[i]
            call = AttentionCall(q, k, v, batch, dim**-0.5, outs[i])
            return lambda: launch_decode(call, DecodeChoice(tile, **options))

        ms = graph_ms([call(i) for i in range(len(sets))] * (4 if size < 8 and ON_GPU else 1))
        worst = worst_error(outs[-1], *sets[-1], sorted({0, size // 2, size - 1}))
        rows.append(
            {"op": f"decode {model} b{size} ctx{context}", "tile": (options.get("split"), *tile), "us": ms * 1e3,
             "error": worst, "floor_us": kv_bytes / COPY_BYTES_PER_S * 1e6}
        )  # fmt: skip
    return rows


def prefill_rows(model: str, query_lens: list[int], context: int, sweep: bool) -> list[dict[str, Any]]:
    hq, hkv, dim = MODELS[model]
    lens = [n + context for n in query_lens]
    q, k, v, batch = make_case(model, query_lens, lens, max(lens) + PAGE)
    flops = sum(4 * hq * dim * n * (context + (n + 1) / 2) for n in query_lens)
    tiles = [prefill_tile(len(q), hq, dim, hq // hkv, DTYPE.itemsize), *(PREFILL_TILES[model] if sweep else [])]
    for_hopper = [HOPPER] if GLUON_IS_KNOWN and hopper.takes(q, k) else []
    rows = []
    for tile in [*tiles, *for_hopper]:
        out = torch.full_like(q, torch.nan)

        def call(tile: Tile | None = tile, out: Tensor = out) -> None:
            attention = AttentionCall(q, k, v, batch, dim**-0.5, out)
            if tile is HOPPER:
                hopper.launch_prefill_hopper(attention, skip_decodes=False)
            else:
                launch_prefill(attention, tile, skip_decodes=False)

        try:
            ms = graph_ms([call] * 2)
        except Exception as problem:  # a tile may not fit in shared memory
            print(f"{model} {tile}: {type(problem).__name__} {str(problem)[:80]}")
            continue
        worst = worst_error(out, q, k, v, batch, [0, len(lens) - 1])
        name = f"prefill {model} {len(query_lens)}x{query_lens[0]}" + (f" after {context}" if context else "")
        rows.append(
            {"op": name, "tile": "hopper" if tile is HOPPER else tuple(tile), "us": ms * 1e3, "error": worst,
             "floor_us": flops / MATRIX_FLOP_PER_S * 1e6}
        )  # fmt: skip
    if ON_GPU and not context and len(query_lens) == 1:
        rows.append(sdpa_row(model, query_lens[0], flops))
    return rows


def all_prefill_rows(model: str, sweep: bool) -> list[dict[str, Any]]:
    rows = []
    for length in (16, 128, 256, 512, 1024, 2048, 4096, 8192):
        rows += prefill_rows(model, [length], 0, sweep=sweep and length in (1024, 8192))
    for lengths, context in (([32] * 16, 0), ([128] * 16, 0), ([256] * 16, 0), ([512], 4096)):
        rows += prefill_rows(model, lengths, context, sweep=False)
    return rows


def sdpa_row(model: str, length: int, flops: float) -> dict[str, Any]:
    """The best of torch's own contiguous kernels, as a yardstick."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    hq, _hkv, dim = MODELS[model]
    q, k, v = (torch.randn(1, h, length, dim, device=DEVICE, dtype=DTYPE) for h in (hq, hq, hq))
    best = float("inf")
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel(backend):
                ms = graph_ms([lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)] * 2)
            best = min(best, ms)
        except RuntimeError:
            continue
    return {"op": f"prefill {model} 1x{length} torch", "tile": (), "us": best * 1e3, "error": 0.0,
            "floor_us": flops / MATRIX_FLOP_PER_S * 1e6}  # fmt: skip


def main() -> None:
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    rows: list[dict[str, Any]] = []
    sweep = "--chosen" not in sys.argv
    if ON_GPU:
        for model in MODELS:
            if "--prefill-only" not in sys.argv:
                for size, context in DECODE_CASES:
                    rows += decode_rows(model, size, context, 16384 if context < 16000 else 32768, sweep)
            if "--decode-only" not in sys.argv:
                rows += all_prefill_rows(model, sweep)
    else:
        MODELS.update(A=(4, 2, 16), B=(4, 1, 32))
        for model in MODELS:
            rows += decode_rows(model, 2, 270, 512, sweep=True)
            rows += prefill_rows(model, [40, 3], 0, sweep=True)
            rows += prefill_rows(model, [20], 70, sweep=False)
    limit = 8e-3 if ON_GPU else 1e-5
    print(f"{'operation':28} {'tile':28} {'us':>9} {'floor us':>9} {'floor/us':>8} {'error':>9}")
    for row in rows:
        verdict = "" if row["error"] < limit else "  WRONG"
        share = row["floor_us"] / row["us"] if row["us"] else 0.0
        print(
            f"{row['op']:28} {row['tile']!s:28} {row['us']:9.2f} {row['floor_us']:9.2f} {share:8.2f} "
            f"{row['error']:9.1e}{verdict}"
        )
    write_json("attention.json", rows)


if __name__ == "__main__":
    main()
