"""Kernels of Mamba (selective scan), lightning attention and the short convolution, measured against the memory floor.

    OUT=FOLDER python -m benchmarks.kernels.recurrent [--peers]

Geometries of Jamba-mini (8,192 channels, a state of 16, convolution of 4), MiniMax-Text (64 heads of 128) and LFM2-8B
(2,048 channels, convolution of 3). Times are medians over replays of a CUDA graph that rotates through more data than
the L2 cache holds; the kernels' results are held to their references by ``tests/ops``. ``--peers`` measures prefill
beside flash-linear-attention's lightning attention and short convolution. Without a GPU it rehearses at a small size
under the interpreter, and times are zero.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.gdn import make_batch
from benchmarks.kernels.mamba2 import TILES, attempt
from benchmarks.kernels.measure import COPY_BYTES_PER_S, DEVICE, L2_BYTES, ON_GPU, time_us, write_json
from weft.forward_context import Batch
from weft.ops.convolution.decode import causal_conv1d_update_triton, short_conv_decode_triton
from weft.ops.convolution.prefill import causal_conv1d_triton
from weft.ops.linear_attention.decode import linear_attention_step
from weft.ops.linear_attention.prefill import chunk_linear_attention_triton
from weft.ops.mamba import ScanWeights
from weft.ops.mamba.scan import selective_scan_step_triton, selective_scan_triton

MAMBA_C, MAMBA_N, MAMBA_W = (8192, 16, 4) if ON_GPU else (32, 4, 4)
HEADS, HEAD_DIM = (64, 128) if ON_GPU else (2, 16)
CONV_C, CONV_W = (2048, 3) if ON_GPU else (32, 3)
DTYPE = torch.bfloat16 if ON_GPU else torch.float16


def random(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def slots_of(rows: int, row_bytes: int) -> tuple[int, list[Tensor]]:
    """Slots of a pool whose sets of ``rows`` fill the L2 cache several times over, in random order."""
    sets = max(2, min(64, -(-4 * L2_BYTES // (rows * row_bytes))))
    order = torch.randperm(rows * sets, device=DEVICE).int() + 1
    return rows * sets + 1, [order[i * rows : (i + 1) * rows].contiguous() for i in range(sets)]


def times_of(calls: Sequence[Callable[[], Any]], moved: int) -> dict[str, float]:
    floor, us = moved / COPY_BYTES_PER_S * 1e6, time_us(calls)
    return {"us": us, "floor_us": floor, "share": floor / us if us else 0.0}


def scan_inputs(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x, z, dt, b, c of the selective scan."""
    x, z, dt = (random(rows, MAMBA_C) for _ in range(3))
    return x, z, dt, random(rows, MAMBA_N), random(rows, MAMBA_N)


def scan_weights() -> ScanWeights:
    a_log = torch.arange(1, MAMBA_N + 1, device=DEVICE).log()[:, None].repeat(1, MAMBA_C)
    return ScanWeights(torch.empty(MAMBA_C, device=DEVICE).uniform_(-7, -2), a_log, torch.ones(MAMBA_C, device=DEVICE))


def scan_decode(rows: int) -> dict[str, Any]:
    """The convolution's step and the scan's."""
    state_bytes = 2 * MAMBA_N * MAMBA_C * 4
    num_slots, slots = slots_of(rows, state_bytes)
    state, inputs = random(num_slots, MAMBA_N, MAMBA_C, dtype=torch.float32), scan_inputs(rows)
    conv, weight = random(num_slots, MAMBA_C, MAMBA_W - 1), random(MAMBA_C, MAMBA_W)
    step = [partial(selective_scan_step_triton, *inputs, scan_weights(), state, s) for s in slots]
    update = [partial(causal_conv1d_update_triton, inputs[0], weight, None, conv, s) for s in slots]
    row_bytes = (4 * MAMBA_C + 2 * MAMBA_N) * 2
    weights = MAMBA_C * (MAMBA_N + 2) * 4
    return {
        "scan": times_of(step, rows * (state_bytes + row_bytes) + weights),
        "convolution": times_of(update, rows * MAMBA_C * 2 * (2 + 2 * (MAMBA_W - 1)) + MAMBA_C * MAMBA_W * 2),
    }


def scan_prefill(lens: list[int]) -> dict[str, Any]:
    batch, rows = make_batch(lens), sum(lens)
    state, weights = random(len(lens) + 2, MAMBA_N, MAMBA_C, dtype=torch.float32), scan_weights()
    calls = [partial(selective_scan_triton, *scan_inputs(rows), weights, state, batch) for _ in range(3)]
    return times_of(calls, rows * (4 * MAMBA_C + 2 * MAMBA_N) * 2)


def log_decay() -> Tensor:
    return -torch.tensor([2.0 ** (-8.0 * (head + 1) / HEADS) for head in range(HEADS)], device=DEVICE)


def lightning_decode(rows: int) -> dict[str, Any]:
    state_bytes = 2 * HEADS * HEAD_DIM * HEAD_DIM * 4
    num_slots, slots = slots_of(rows, state_bytes)
    state, heads = random(num_slots, HEADS, HEAD_DIM, HEAD_DIM, dtype=torch.float32), random(rows, 3, HEADS, HEAD_DIM)
    q, k, v = heads.unbind(1)
    calls = [partial(linear_attention_step, q, k, v, log_decay(), state, s) for s in slots]
    return times_of(calls, rows * (state_bytes + 4 * HEADS * HEAD_DIM * 2))


def lightning_prefill(lens: list[int]) -> dict[str, Any]:
    batch, rows = make_batch(lens), sum(lens)
    state = random(len(lens) + 2, HEADS, HEAD_DIM, HEAD_DIM, dtype=torch.float32)
    g, sets = log_decay().expand(rows, -1), [random(rows, 3, HEADS, HEAD_DIM).unbind(1) for _ in range(3)]
    run = partial(chunk_linear_attention_triton, g=g, beta=None, skip=None, state=state, batch=batch)
    times: dict[str, Any] = times_of([partial(run, *x) for x in sets], rows * 4 * HEADS * HEAD_DIM * 2)
    for tile in TILES if ON_GPU else ():
        times[str(tuple(tile))] = attempt(partial(time_us, [partial(run, *x, tile=tile) for x in sets]))
    return times


def fla_lightning(lens: list[int]) -> float:
    """Microseconds of ``chunk_simple_gla`` with fixed rates, which lightning attention is there; final states kept."""
    from fla.ops.simple_gla import chunk_simple_gla

    shape, options = (len(lens), lens[0], HEADS, HEAD_DIM), {"g_gamma": log_decay(), "output_final_state": True}
    calls = [partial(chunk_simple_gla, *(random(*shape) for _ in range(3)), scale=1.0, **options) for _ in range(3)]
    return time_us(calls)


def conv_decode(rows: int) -> dict[str, Any]:
    state_bytes = 2 * CONV_C * (CONV_W - 1) * 2
    num_slots, slots = slots_of(rows, state_bytes)
    conv, weight, projected = random(num_slots, CONV_C, CONV_W - 1), random(CONV_C, CONV_W), random(rows, 3 * CONV_C)
    calls = [partial(short_conv_decode_triton, projected, weight, None, conv, s) for s in slots]
    return times_of(calls, rows * (state_bytes + 4 * CONV_C * 2) + CONV_C * CONV_W * 2)


def convolve(x: Tensor, weight: Tensor, state: Tensor, batch: Batch) -> Tensor:
    return causal_conv1d_triton(x, weight, None, state, batch, silu=False)


def conv_prefill(lens: list[int]) -> dict[str, Any]:
    """The convolution between the two gates."""
    batch, rows = make_batch(lens), sum(lens)
    weight, state = random(CONV_C, CONV_W), random(len(lens) + 2, CONV_C, CONV_W - 1)
    calls = [partial(convolve, random(rows, CONV_C), weight, state, batch) for _ in range(24)]
    return times_of(calls, rows * 2 * CONV_C * 2)


def fla_conv(lens: list[int]) -> float:
    """Microseconds of ``causal_conv1d`` without activation, final states kept."""
    from fla.modules.causal_conv1d import causal_conv1d

    weight = random(CONV_C, CONV_W)
    inputs = [random(len(lens), lens[0], CONV_C) for _ in range(24)]
    return time_us([partial(causal_conv1d, x, weight, output_final_state=True) for x in inputs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", action="store_true")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    torch.manual_seed(0)

    def record(name: str, run: Callable[[], Any]) -> None:
        rows.append({"what": name, "result": attempt(run)})
        print(json.dumps(rows[-1]), flush=True)

    prompts = ([4096], [8192], [2048] * 4) if ON_GPU else ([70],)
    for lens in prompts:
        shape = f"{len(lens)} x {lens[0]}"
        record(f"lightning prefill {shape}", partial(lightning_prefill, lens))
        record(f"short convolution prefill {shape}", partial(conv_prefill, lens))
        if options.peers:
            record(f"fla lightning prefill {shape}", partial(fla_lightning, lens))
            record(f"fla short convolution prefill {shape}", partial(fla_conv, lens))
        else:
            record(f"selective scan prefill {shape}", partial(scan_prefill, lens))
    if not options.peers:
        for count in (1, 8, 32, 64, 128, 256) if ON_GPU else (2,):
            record(f"selective scan decode {count}", partial(scan_decode, count))
            record(f"lightning decode {count}", partial(lightning_decode, count))
            record(f"short convolution decode {count}", partial(conv_decode, count))
    write_json(f"recurrent-{'peers' if options.peers else 'kernels'}-h200.json", rows)
    print("failed:", [row["what"] for row in rows if "FAILED" in str(row["result"])] or "none")


if __name__ == "__main__":
    main()
