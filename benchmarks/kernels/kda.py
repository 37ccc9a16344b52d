"""Kernels of Kimi-Linear and of sliding windows: checked against their references, then measured.

    python -m benchmarks.kernels.kda [--json FILE] [--check-only] [--chosen] [--peers]

Kimi Delta Attention has 32 heads of 128, and latent attention 32 heads of 512 + 64. Windows are those of gpt-oss (64
and 8 heads of 64, window 128) and of Gemma 3 (8 and 4 heads of 256, window 1,024). Times are medians over replays of a
CUDA graph that rotates through several sets of data. ``--peers`` measures prefill alone, beside
flash-linear-attention's; ``--chosen`` times only the shapes that the kernels choose. Without a GPU, ``--check-only``
rehearses the checks at a small size.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.gdn import attempt, make_batch, shape_name, wide
from benchmarks.kernels.measure import COPY_BYTES_PER_S, DEVICE, ON_GPU, error, time_us
from weft.bench import report
from weft.config.kimi import KimiDeltaConfig
from weft.forward_context import Batch
from weft.ops.attention.latent import latent_attention_triton
from weft.ops.delta_rule import DeltaWeights, chunk_gated_delta_rule, kda_decode, kda_gates
from weft.ops.delta_rule import kda_prefill as kda
from weft.ops.delta_rule.decode import Shape
from weft.ops.delta_rule.few_tokens import kda_decode_triton
from weft.ops.delta_rule.gdn_prefill import chunk_gated_delta_rule_triton
from weft.ops.delta_rule.kda_prefill import kda_gates_triton
from weft.ops.triton.chunk_scan import Tile
from weft.ops.window_attention import ScoreTerms, Windows
from weft.ops.window_attention.kernels import window_attention_decode_triton, window_attention_triton

H, K, W = (32, 128, 4) if ON_GPU else (2, 16, 4)
WINDOWS = {"gpt-oss": (64, 8, 64, 128), "gemma3": (8, 4, 256, 1024)}
PREPARE_SHAPES = [
    kda.Shape(*s)
    for s in ((128, 8, None), (128, 16, None), (128, 16, 64), (64, 8, None), (64, 8, 128), (64, 4, None), (32, 8, 128))
]
TILES = [Tile(*t) for t in ((32, 4, 1), (32, 4, 2), (64, 4, 1), (64, 4, 2), (64, 8, 2))]
SHAPES: list[Shape | None] = [None] + [
    Shape(*s)
    for s in (
        (64, 4, True, None), (64, 4, False, 128), (64, 4, False, 160), (32, 4, False, None), (32, 4, True, 128),
        (128, 8, False, 128),
    )
]  # fmt: skip
GEOMETRY = KimiDeltaConfig(H, K, W)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def rule_inputs(num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, g, beta, with keys that resemble each other and decays from none to strong."""
    q, k = (torch.randn(num_tokens, H, K, device=DEVICE) + 0.5 for _ in range(2))
    v, f, b = random(num_tokens, H, K), random(num_tokens, H * K), random(num_tokens, H)
    a_log, dt_bias = torch.empty(H, device=DEVICE).uniform_(-5, 2), torch.empty(H * K, device=DEVICE).uniform_(-4, 1)
    g, beta = kda_gates.reference(f, b, a_log, dt_bias)
    return q.to(dtype), k.to(dtype), v.to(dtype), g, beta


def check_chunk(dtype: torch.dtype, lens: list[int]) -> dict[str, float]:
    batch = make_batch(lens, checkpoint=True, pad=3)
    x = rule_inputs(batch.num_tokens + 5, dtype)
    states = [torch.zeros(len(lens) + 3, H, K, K, device=DEVICE) for _ in range(2)]
    out = chunk_gated_delta_rule_triton(*x, states[0], batch)
    q, k, v, g, beta = (y.float() for y in x)
    want = chunk_gated_delta_rule.reference(q, k, v, g, beta, states[1], batch)
    return {"out": error(out, want), "states": error(states[0], states[1])}


def decode_arguments(rows: int, slots: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "projected": random(rows, 3 * H * K + H + 2 * K, dtype=dtype),
        "f": random(rows, H * K, dtype=dtype),
        "gate": random(rows, H * K, dtype=dtype),
        "weights": DeltaWeights(
            random(3 * H * K, W, dtype=dtype),
            torch.empty(H, device=DEVICE).uniform_(-5, 2),
            torch.empty(H * K, device=DEVICE).uniform_(-4, 1),
            random(K, dtype=dtype),
            1e-5,
        ),
        "conv_state": random(slots, 3 * H * K, W - 1, dtype=dtype),
        "state": torch.randn(slots, H, K, K, device=DEVICE),
    }


def choice(shape: Shape | None) -> Callable[[int], Shape] | None:
    """Choose ``shape`` for any number of programs; None leaves the choice to the operation."""
    return None if shape is None else lambda _: shape


def check_decode(dtype: torch.dtype) -> dict[str, float]:
    arguments, slots = decode_arguments(5, 12, dtype), torch.tensor([3, 7, 1, 5, 0], dtype=torch.int32, device=DEVICE)
    upcast = wide(arguments)
    want = kda_decode.reference(**upcast, state_slots=slots, geometry=GEOMETRY)
    errors = {}
    for shape in SHAPES:
        given: dict[str, Any] = {n: x.clone() if isinstance(x, Tensor) else x for n, x in arguments.items()}
        out = kda_decode_triton(**given, state_slots=slots, geometry=GEOMETRY, choose=choice(shape))
        errors[f"out {shape_name(shape)}"] = error(out, want)
        errors[f"state {shape_name(shape)}"] = error(given["state"][1:], upcast["state"][1:])
    return errors


def time_chunk(lens: list[int]) -> dict[str, float]:
    batch = make_batch(lens)
    state = torch.zeros(len(lens) + 2, H, K, K, device=DEVICE)
    sets = [rule_inputs(batch.num_tokens, torch.bfloat16) for _ in range(3)]
    times = {
        str(tuple(tile)): time_us([partial(chunk_gated_delta_rule_triton, *x, state, batch, tile=tile) for x in sets])
        for tile in TILES
    }
    for shape in [*PREPARE_SHAPES, None]:
        prepare = partial(kda.prepare_channels, chunks=batch.chunk_table, shape=shape)
        name = "chosen" if shape is None else tuple(shape)
        times[f"prepare {name}"] = time_us([partial(prepare, q, k, g, beta) for q, k, _, g, beta in sets])
    times["chosen"] = time_us([partial(chunk_gated_delta_rule_triton, *x, state, batch) for x in sets])
    f, b = random(batch.num_tokens, H * K), random(batch.num_tokens, H)
    a_log, dt_bias = torch.zeros(H, device=DEVICE), torch.zeros(H * K, device=DEVICE)
    times["gates"] = time_us([partial(kda_gates_triton, f, b, a_log, dt_bias)] * 3)
    return times


def time_fla(lens: list[int]) -> float:
    from fla.ops.kda import chunk_kda

    sets = [[y[None] for y in rule_inputs(sum(lens), torch.bfloat16)] for _ in range(3)]
    cu = torch.tensor([sum(lens[:i]) for i in range(len(lens) + 1)], device=DEVICE)
    calls = [partial(chunk_kda, *x, use_qk_l2norm_in_kernel=True, output_final_state=True, cu_seqlens=cu) for x in sets]
    return time_us(calls)


def time_decode(rows: int) -> dict[str, float]:
    sets = min(max(2, -(-256 // rows)), 24)
    arguments = decode_arguments(rows, rows * sets + 1, torch.bfloat16)
    order = torch.randperm(rows * sets, device=DEVICE).int() + 1
    run = partial(kda_decode_triton, **arguments, geometry=GEOMETRY)
    calls = [partial(run, state_slots=order[i * rows : (i + 1) * rows].contiguous()) for i in range(sets)]
    moved = rows * (2 * H * K * K * 4 + H * K * (3 * 2 * (2 * W - 1) + 6))
    times = {shape_name(shape): time_us([partial(call, choose=choice(shape)) for call in calls]) for shape in SHAPES}
    floor = moved / COPY_BYTES_PER_S * 1e6
    return times | {"floor": floor, "share": floor / times["chosen"] if ON_GPU else 0.0}


def paged(batch: Batch, length: int, page_size: int = 16) -> Batch:
    """The batch with a page table: each sequence's pages one after the other."""
    count, pages = batch.seq_lens.shape[0], -(-length // page_size)
    table = torch.arange(1, count * pages + 1, dtype=torch.int32, device=DEVICE).view(count, pages)
    return dataclasses.replace(batch, page_table=table)


def time_latent(rows: int, context: int) -> dict[str, float]:
    """Time one token for each of ``rows`` sequences of ``context`` tokens, or with 0 rows a prompt of that length."""
    batch = paged(make_batch([context] if rows == 0 else [1] * rows), context)
    if rows:
        lens = torch.full((rows,), context, dtype=torch.int32, device=DEVICE)
        batch = dataclasses.replace(batch, seq_lens=lens, num_decodes=rows, max_seq_len=context)
    latents = random(max(1, rows) * -(-context // 16) + 1, 16, 576)
    sets = [random(batch.num_tokens, 32, 576) for _ in range(3)]
    times = {"us": time_us([partial(latent_attention_triton, q, latents, batch, rank=512, scale=0.07) for q in sets])}
    return times | {"bytes floor": max(1, rows) * context * 576 * 2 / COPY_BYTES_PER_S * 1e6}


def time_window(name: str, rows: int, length: int) -> dict[str, float]:
    """Decode of ``rows`` full windows, or (0 rows) a prompt of ``length`` tokens."""
    heads, kv_heads, dim, window = WINDOWS[name]
    sinks, tokens = (random(heads) if name == "gpt-oss" else None), rows or length
    windows = [random(rows + 2, window, kv_heads, dim) for _ in range(2)]
    sets = [(random(tokens, heads, dim), *(random(tokens, kv_heads, dim) for _ in range(2))) for _ in range(3)]
    if rows:
        slots = torch.arange(1, rows + 1, dtype=torch.int32, device=DEVICE)
        positions = torch.full((rows,), length, device=DEVICE)
        decode = partial(window_attention_decode_triton, scale=0.1, terms=ScoreTerms(sinks))
        calls = [partial(decode, *x, Windows(*windows), slots, positions) for x in sets]
        floor = rows * 2 * window * kv_heads * dim * 2 / COPY_BYTES_PER_S * 1e6
        return {"us": time_us(calls), "floor": floor}
    batch, run = make_batch([length]), partial(window_attention_triton, scale=0.1, sinks=sinks)
    return {"us": time_us([partial(run, *x, *windows, batch) for x in sets])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--chosen", action="store_true", help="only the shapes that the kernels choose")
    parser.add_argument("--peers", action="store_true", help="only prefill, beside flash-linear-attention")
    options = parser.parse_args()
    if options.chosen:
        TILES.clear()
        PREPARE_SHAPES.clear()
        del SHAPES[1:]
    results: dict[str, Any] = report.provenance("cuda" if ON_GPU else "cpu")
    half = torch.bfloat16 if ON_GPU else torch.float32
    record: Callable[[str, Callable[[], Any]], None] = partial(attempt, results)
    torch.manual_seed(0)
    prompts = ([4096], [8192], [2048] * 4) if ON_GPU and not options.check_only else ()
    for lens in prompts:
        record(f"chunk {len(lens)} x {lens[0]} us", partial(time_chunk, lens))
        if options.peers:
            record(f"fla {len(lens)} x {lens[0]} us", partial(time_fla, lens))
    if not options.peers:
        for dtype in {half, torch.float32}:
            record(f"check chunk {dtype}", partial(check_chunk, dtype, [1, 63, 64, 130] if ON_GPU else [1, 70]))
            record(f"check decode {dtype}", partial(check_decode, dtype))
    if prompts and not options.peers:
        for rows in (1, 8, 32, 64, 128, 256):
            record(f"decode {rows} us", partial(time_decode, rows))
        for name in WINDOWS:
            for rows, length in ((1, 5000), (32, 5000), (256, 5000), (0, 4096)):
                record(f"window {name} {rows} {length}", partial(time_window, name, rows, length))
        for rows, context in ((1, 2048), (32, 2048), (128, 2048), (0, 4096)):
            record(f"latent {rows} {context}", partial(time_latent, rows, context))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
