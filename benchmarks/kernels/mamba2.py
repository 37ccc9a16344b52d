"""Mamba-2's kernels: checked against float64, then prefill and decode measured against the memory floor.

    OUT=FOLDER python -m benchmarks.kernels.mamba2 [--check-only] [--peers]

Nemotron-H has 64 heads of 64 channels, a state of 128, 8 groups and a convolution of 4. Granite 4.0-H-Tiny has 48 heads
of 64 and one group. Times are medians over replays of a CUDA graph that rotates through more data than the L2 cache
holds. ``--peers`` measures prefill and the state's step alone, beside ``mamba_ssm``'s Triton kernels. Without a GPU the
checks run under the interpreter at a small size, and times are zero.
"""

from __future__ import annotations

import argparse
import json
import math
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.gdn import make_batch
from benchmarks.kernels.measure import COPY_BYTES_PER_S, DEVICE, L2_BYTES, ON_GPU, error, time_us, write_json
from weft.config.mamba2 import Mamba2Config
from weft.ops.convolution.decode import causal_conv1d_update_triton
from weft.ops.convolution.prefill import causal_conv1d_triton
from weft.ops.linear_attention import chunk_linear_attention
from weft.ops.linear_attention.decode import StepTile, TimeSteps, linear_attention_step
from weft.ops.linear_attention.prefill import (
    Tile,
    choose_tile,
    chunk_linear_attention_triton,
)
from weft.ops.mamba import Mamba2Weights, mamba2_decode, mamba2_gates, split_heads
from weft.ops.mamba.mamba2 import mamba2_decode_triton, mamba2_gates_triton
from weft.ops.norm.kernels import gated_group_norm_triton

NEMOTRON = Mamba2Config(64, 64, 128, 8, 4) if ON_GPU else Mamba2Config(2, 16, 16, 1, 4)
GRANITE = Mamba2Config(48, 64, 128, 1, 4) if ON_GPU else Mamba2Config(2, 16, 16, 1, 4)
TILES = [Tile(*t) for t in ((32, 4, 2), (32, 4, 3), (64, 4, 1), (64, 4, 2), (64, 4, 3))]
STEP_TILES = [StepTile(*t) for t in ((32, 2), (64, 2), (64, 4))]
DTYPE = torch.bfloat16 if ON_GPU else torch.float16


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


def weights_of(geometry: Mamba2Config, dtype: torch.dtype = DTYPE) -> Mamba2Weights:
    """Decays from none to strong, time steps around those of training."""
    heads = geometry.num_heads
    a_log, dt_bias = (torch.empty(heads, device=DEVICE).uniform_(*r) for r in ((0.0, math.log(16.0)), (-7.0, -2.0)))
    conv = random(geometry.conv_dim, geometry.conv_kernel).to(dtype)
    conv_bias, norm = (random(size).to(dtype) for size in (geometry.conv_dim, geometry.inner_size))
    return Mamba2Weights(conv, conv_bias, a_log, dt_bias, random(heads), norm, 1e-5)


def chunk_inputs(
    geometry: Mamba2Config, rows: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, g, beta, skip of the chunked recurrence."""
    x, b, c = split_heads(random(rows, geometry.conv_dim).to(dtype), geometry)
    w = weights_of(geometry)
    g, step = mamba2_gates.reference(random(rows, geometry.num_heads), w.A_log, w.dt_bias, (0.0, math.inf))
    return c, b, x, g, step, w.D


def state_of(geometry: Mamba2Config, slots: int) -> Tensor:
    return random(slots, geometry.num_heads, geometry.state_size, geometry.head_dim)


def check_chunks(geometry: Mamba2Config, tile: Tile, dtype: torch.dtype) -> dict[str, Any]:
    """Relative errors of outputs and states against the reference in float32, on the same inputs."""
    lens = [1, 63, 64, 65, 130, 700] if ON_GPU else [1, 70]
    batch = make_batch(lens, checkpoint=True)
    inputs = chunk_inputs(geometry, sum(lens), dtype)
    states = [state_of(geometry, len(lens) + 3) for _ in range(2)]
    states[1].copy_(states[0])
    got = chunk_linear_attention_triton(*inputs, states[0], batch, tile=tile)
    want = chunk_linear_attention.reference(*(x.float() for x in inputs), states[1], batch)
    used = slice(1, len(lens) + 2)
    return {"out": error(got, want), "state": error(states[0][used], states[1][used])}


def check_decode(geometry: Mamba2Config, dtype: torch.dtype) -> dict[str, Any]:
    w, slots = weights_of(geometry, dtype), torch.tensor([3, 1, 0, 2], dtype=torch.int32, device=DEVICE)
    projected = random(4, sum(geometry.part_sizes)).to(dtype)
    conv, state = random(5, geometry.conv_dim, geometry.conv_kernel - 1).to(dtype), state_of(geometry, 5)
    exact = [conv.float().clone(), state.clone()]
    got = mamba2_decode_triton(projected, w, conv, state, slots, geometry)
    wide = Mamba2Weights(*(x.float() if isinstance(x, Tensor) else x for x in w))  # type: ignore[arg-type]
    want = mamba2_decode.reference(projected.float(), wide, *exact, slots, geometry)
    return {"out": error(got, want), "state": error(state[1:], exact[1][1:])}


def time_prefill(geometry: Mamba2Config, lens: list[int]) -> dict[str, Any]:
    """Microseconds of the recurrence by tile, of its first kernel, and of the operations around it."""
    batch, rows = make_batch(lens), sum(lens)
    sets, state = [chunk_inputs(geometry, rows, DTYPE) for _ in range(3)], state_of(geometry, len(lens) + 2)
    times: dict[str, Any] = {
        "chosen": choose_tile(len(lens) * geometry.num_heads, geometry.state_size, geometry.head_dim, DTYPE)
    }
    for tile in TILES:
        calls = [partial(chunk_linear_attention_triton, *x, state, batch, tile=tile) for x in sets]
        times[str(tuple(tile))] = attempt(partial(time_us, calls))
    w, conv = weights_of(geometry), random(len(lens) + 2, geometry.conv_dim, geometry.conv_kernel - 1).to(DTYPE)
    wide = [random(rows, sum(geometry.part_sizes)).to(DTYPE) for _ in range(3)]
    parts = [x.split([geometry.inner_size, geometry.conv_dim, geometry.num_heads], dim=-1) for x in wide]
    norm = partial(gated_group_norm_triton, weight=w.norm_weight, eps=1e-5, num_groups=geometry.num_groups)
    y = random(rows, geometry.inner_size).to(DTYPE)
    around: dict[str, list[Callable[[], Any]]] = {
        "gates": [partial(mamba2_gates_triton, p[2], w.A_log, w.dt_bias, geometry.dt_limit) for p in parts],
        "conv": [
            partial(causal_conv1d_triton, p[1], w.conv_weight, w.conv_bias, conv, batch)
            for p in parts
        ],
        "norm": [partial(norm, y, p[0]) for p in parts],
    }  # fmt: skip
    return times | {name: time_us(calls) for name, calls in around.items()}


def time_mamba_ssm(geometry: Mamba2Config, lens: list[int]) -> float:
    """Microseconds of ``mamba_chunk_scan_combined``, gates and skip included, final states kept."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    w, g = weights_of(geometry), geometry
    shape, options = (len(lens), lens[0]), {"D": w.D, "dt_bias": w.dt_bias, "dt_softplus": True}
    a = -w.A_log.exp()
    calls = []
    for _ in range(3):
        x = random(*shape, g.num_heads, g.head_dim).to(DTYPE)
        b, c = (random(*shape, g.num_groups, g.state_size).to(DTYPE) for _ in range(2))
        dt = random(*shape, g.num_heads).to(DTYPE)
        calls.append(partial(mamba_chunk_scan_combined, x, dt, a, b, c, 256, return_final_states=True, **options))
    return time_us(calls)


def time_mamba_ssm_step(geometry: Mamba2Config, rows: int) -> dict[str, float]:
    """Microseconds of ``selective_state_update`` with time steps per head, beside our step; neither convolves."""
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    w, g = weights_of(geometry), geometry
    row_bytes = 2 * g.num_heads * g.state_size * g.head_dim * 4
    sets = max(2, min(24, -(-4 * L2_BYTES // (rows * row_bytes))))
    state = random(rows * sets + 1, g.num_heads, g.head_dim, g.state_size)
    order = (torch.randperm(rows * sets, device=DEVICE).int() + 1).split(rows)
    x, dt = random(rows, g.num_heads, g.head_dim).to(DTYPE), random(rows, g.num_heads).to(DTYPE)
    b, c = (random(rows, g.num_groups, g.state_size).to(DTYPE) for _ in range(2))
    wide = [
        t.view(g.num_heads, *[1] * n).expand(g.num_heads, g.head_dim, *[g.state_size] * (n - 1))
        for t, n in ((-w.A_log.exp(), 2), (w.D, 1), (w.dt_bias, 1))
    ]
    a, d, bias = wide
    theirs = [
        partial(
            selective_state_update, state, x, dt[:, :, None].expand(-1, -1, g.head_dim), a, b, c, d, dt_bias=bias,
            dt_softplus=True, state_batch_indices=slots,
        )
        for slots in order
    ]  # fmt: skip
    ours = state.transpose(2, 3).contiguous()
    step = partial(linear_attention_step, c, b, x, w.A_log, ours, steps=TimeSteps(dt, w.dt_bias, w.D, (0.0, math.inf)))
    return {"mamba_ssm": time_us(theirs), "weft": time_us([partial(step, s) for s in order])}


def time_decode(geometry: Mamba2Config, rows: int, state_dtype: torch.dtype) -> dict[str, Any]:
    """Microseconds of the whole step and of its parts, and the share of the memory floor."""
    row_bytes = 2 * geometry.num_heads * geometry.state_size * geometry.head_dim * state_dtype.itemsize
    sets = max(2, min(24, -(-4 * L2_BYTES // (rows * row_bytes))))
    w, n = weights_of(geometry), rows * sets + 1
    conv = random(n, geometry.conv_dim, geometry.conv_kernel - 1).to(DTYPE)
    state = state_of(geometry, n).to(state_dtype)
    projected = random(rows, sum(geometry.part_sizes)).to(DTYPE)
    order = torch.randperm(n - 1, device=DEVICE).int() + 1
    slots = [order[i * rows : (i + 1) * rows].contiguous() for i in range(sets)]
    z, xbc, dt = projected.split([geometry.inner_size, geometry.conv_dim, geometry.num_heads], dim=-1)
    x, b, c = split_heads(xbc.contiguous(), geometry)
    whole = [partial(mamba2_decode_triton, projected, w, conv, state, s, geometry) for s in slots]
    total = time_us(whole)
    other = (
        rows * (sum(geometry.part_sizes) + geometry.inner_size + 2 * geometry.conv_dim * (geometry.conv_kernel - 1)) * 2
    )
    floor = (rows * row_bytes + other) / COPY_BYTES_PER_S * 1e6
    step = partial(linear_attention_step, c, b, x, w.A_log, state, steps=TimeSteps(dt, w.dt_bias, w.D, (0.0, 9.0)))
    times = {"us": total, "floor_us": floor, "share": floor / total if total else 0.0}
    for tile in STEP_TILES:
        times[f"step {tuple(tile)}"] = attempt(partial(time_us, [partial(step, s, tile=tile) for s in slots]))
    update = partial(causal_conv1d_update_triton, xbc, w.conv_weight, w.conv_bias, conv)
    times["conv"] = time_us([partial(update, state_slots=s) for s in slots])
    y = random(rows, geometry.inner_size).to(DTYPE)
    norm = partial(gated_group_norm_triton, y, z, w.norm_weight, 1e-5, geometry.num_groups)
    times["norm"] = time_us([partial(norm, state_slots=s) for s in slots])
    return times


def attempt(run: Callable[[], Any]) -> Any:
    """A result, or the error: one broken configuration must not cost the others."""
    try:
        return run()
    except Exception as failure:
        traceback.print_exc(limit=3)
        return f"FAILED {type(failure).__name__}: {str(failure)[:200]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--peers", action="store_true")
    options = parser.parse_args()
    check_only = options.check_only
    rows: list[dict[str, Any]] = []

    def record(name: str, run: Callable[[], Any]) -> None:
        rows.append({"what": name, "result": attempt(run)})
        print(json.dumps(rows[-1], default=str), flush=True)

    if options.peers:
        for lens in ([4096], [8192], [2048] * 4):
            record(f"prefill nemotron {len(lens)} x {lens[0]}", partial(time_prefill, NEMOTRON, lens))
            record(f"mamba_ssm nemotron {len(lens)} x {lens[0]}", partial(time_mamba_ssm, NEMOTRON, lens))
        for count in (1, 64, 256):
            record(f"mamba_ssm step {count}", partial(time_mamba_ssm_step, NEMOTRON, count))
    else:
        for name, geometry in (("nemotron", NEMOTRON), ("granite", GRANITE)):
            for tile in TILES if ON_GPU else TILES[:1]:
                record(f"check {name} {tuple(tile)}", partial(check_chunks, geometry, tile, DTYPE))
            record(
                f"check {name} float32",
                partial(check_chunks, geometry, Tile(32 if ON_GPU else 16, 4, 1), torch.float32),
            )
            for dtype in (DTYPE, torch.float32):
                record(f"check {name} decode {dtype}", partial(check_decode, geometry, dtype))
        if not check_only:
            for lens in ([4096], [8192], [2048] * 4, [512]) if ON_GPU else ([70],):
                record(f"prefill nemotron {len(lens)} x {lens[0]}", partial(time_prefill, NEMOTRON, lens))
            for count in (1, 8, 32, 64, 128, 256) if ON_GPU else (2,):
                record(f"decode nemotron {count}", partial(time_decode, NEMOTRON, count, torch.float32))
            for count in (1, 64, 256) if ON_GPU else (2,):
                record(f"decode granite {count}", partial(time_decode, GRANITE, count, torch.float32))
                record(f"decode nemotron {count} bfloat16 state", partial(time_decode, NEMOTRON, count, DTYPE))
    write_json(f"mamba2-{'peers' if options.peers else 'kernels'}-h200.json", rows)
    failed = [row["what"] for row in rows if "FAILED" in json.dumps(row, default=str)]
    print("failed:", failed or "none")


if __name__ == "__main__":
    main()
