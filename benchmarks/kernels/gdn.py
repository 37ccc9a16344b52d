"""Gated DeltaNet kernels: every configuration checked against float64, then measured against the memory floor.

    python -m benchmarks.kernels.gdn [--json FILE] [--check-only] [--chosen]

Geometry of Qwen3-Next: 16 key heads, 32 value heads, K = V = 128, convolution of 4. Times are medians over replays of a
CUDA graph that rotates through more data than the L2 cache holds. Where flash-linear-attention is installed, its
chunked kernels are timed beside ours. ``--chosen``: only the shapes that the kernels choose. Without a GPU,
``--check-only`` rehearses the checks at a small size.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.measure import COPY_BYTES_PER_S, DEVICE, error, time_us
from weft.bench import report
from weft.config.gated_delta_net import GatedDeltaNetConfig
from weft.forward_context import Batch, ChunkTable
from weft.ops.convolution.prefill import causal_conv1d_triton
from weft.ops.delta_rule import DeltaWeights, gdn_decode, gdn_gates
from weft.ops.delta_rule import gdn_prefill as gdr
from weft.ops.delta_rule.decode import Shape
from weft.ops.delta_rule.few_tokens import gdn_decode_triton
from weft.ops.norm.kernels import gated_rms_norm_triton

HK, HV, K, V, W = (16, 32, 128, 128, 4) if DEVICE == "cuda" else (1, 2, 16, 16, 4)
CONV_DIM = 2 * HK * K + HV * V
TILES: list[gdr.Tile | None] = [None] + [gdr.Tile(*t) for t in ((32, 4, 2), (32, 4, 3), (64, 4, 1), (64, 4, 3))]
"""Tiles to try. None is the kernel's own choice, which is another kernel on Hopper."""
DECODE_SHAPES: list[Shape | None] = [None] + [
    Shape(*s)
    for s in (
        (64, 4, True, None), (64, 4, True, 168), (64, 4, False, None), (64, 4, False, 128),
        (128, 4, False, None), (128, 4, False, 168),
    )
]  # fmt: skip


def shape_name(tile: gdr.Tile | Shape | None) -> str:
    return "chosen" if tile is None else str(tuple(tile))


def make_batch(lens: list[int], *, checkpoint: bool = False, pad: int = 0) -> Batch:
    """Fresh sequences in slots 1, 2, …; with ``checkpoint``, an extra boundary after 3 tokens of the last one."""
    rows: list[tuple[int, int, int, int]] = []
    first, start = [0], 0
    for s, n in enumerate(lens):
        done = 0
        while done < n:
            extra = checkpoint and s == len(lens) - 1 and done == 0 and n > 3
            length = 3 if extra else min(64, n - done)
            rows.append((s, start + done, length, len(lens) + 1 if extra else -1))
            done += length
        first.append(len(rows))
        start += n
    rows += [(0, 0, 0, -1)] * pad

    def ints(x: list[int]) -> Tensor:
        return torch.tensor(x, dtype=torch.int32, device=DEVICE)

    seqs, starts, lengths, slots = (ints(list(c)) for c in zip(*rows, strict=True))
    chunks = ChunkTable(seqs, starts, lengths, slots, ints(first + [first[-1]] * pad), max_seqs=len(lens))
    cu = [0, *itertools.accumulate(lens)]
    none = ints([0])
    return Batch(
        start, len(lens), 0, max(lens), max(lens), none, none, ints(cu + [start] * pad), ints(lens + [0] * pad), none,
        ints([*range(1, len(lens) + 1)] + [0] * pad), chunks,
    )  # fmt: skip


def make_inputs(num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, g, beta, with keys that resemble each other and decays from none to strong."""
    q, k = (torch.randn(num_tokens, HK, K, device=DEVICE) + 0.5 for _ in range(2))
    v = torch.randn(num_tokens, HV, V, device=DEVICE)
    a, b = (torch.randn(num_tokens, HV, device=DEVICE) for _ in range(2))
    a_log, dt_bias = torch.empty(HV, device=DEVICE).uniform_(-5, 2), torch.empty(HV, device=DEVICE).uniform_(-4, 1)
    g, beta = gdn_gates.reference(a, b, a_log, dt_bias)
    return q.to(dtype), k.to(dtype), v.to(dtype), g, beta


def oracle(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, at: int) -> tuple[Tensor, Tensor, Tensor]:
    """One fresh sequence token by token in float64: outputs, final state, state after ``at`` tokens."""
    q, k = (x.double().repeat_interleave(HV // HK, 1) for x in (q, k))
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    v, decay, beta = v.double(), g.double().exp(), beta.double()
    state = torch.zeros(HV, K, V, dtype=torch.double, device=q.device)
    out, checkpoint = torch.empty_like(v), state
    for t in range(q.shape[0]):
        state = state * decay[t, :, None, None]
        delta = (v[t] - torch.einsum("hkv,hk->hv", state, k[t])) * beta[t, :, None]
        state = state + k[t][:, :, None] * delta[:, None, :]
        out[t] = torch.einsum("hkv,hk->hv", state, q[t]) * K**-0.5
        checkpoint = state if t + 1 == at else checkpoint
    return out, state, checkpoint


def _or_nan(value: float) -> float:
    """For comparisons: NaN is the worst of errors."""
    return math.inf if math.isnan(value) else value


def check_chunk(dtype: torch.dtype, tile: gdr.Tile | None, lens: list[int]) -> dict[str, float]:
    """Relative errors of outputs, final states and checkpoint; NaN-poisoned outputs, slots and padding rows."""
    batch = make_batch(lens, checkpoint=True, pad=3)
    n, pad = batch.num_tokens, 5
    x = make_inputs(n + pad, dtype)
    for t in x:
        t[n:] = torch.nan
    state = torch.full((len(lens) + 3, HV, K, V), torch.nan, device=DEVICE)
    out = gdr.chunk_gated_delta_rule_triton(*x, state, batch, tile=tile)
    assert (out[n:] == 0).all(), "padding rows must be zero"
    assert state[0].isnan().all() and state[-1].isnan().all(), "foreign slots touched"
    errors, start = {"out": 0.0, "state": 0.0, "checkpoint": 0.0}, 0
    for s, length in enumerate(lens):
        q, k, v, g, beta = (t[start : start + length] for t in x)
        expected, final, at3 = oracle(q, k, v, g, beta, at=3)
        worst = {"out": error(out[start : start + length], expected), "state": error(state[s + 1], final)}
        if s == len(lens) - 1:
            worst["checkpoint"] = error(state[len(lens) + 1], at3)
        errors = {key: max(value, worst.get(key, 0.0), key=_or_nan) for key, value in errors.items()}
        start += length
    return errors


def decode_arguments(rows: int, slots: int, state_dtype: torch.dtype, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "projected": torch.randn(rows, CONV_DIM + HV * V + 2 * HV, device=DEVICE).to(dtype),
        "weights": DeltaWeights(
            torch.randn(CONV_DIM, W, device=DEVICE).to(dtype),
            torch.empty(HV, device=DEVICE).uniform_(-5, 2),
            torch.empty(HV, device=DEVICE).uniform_(-4, 1),
            torch.randn(V, device=DEVICE).to(dtype),
            1e-6,
        ),
        "conv_state": torch.randn(slots, CONV_DIM, W - 1, device=DEVICE).to(dtype),
        "state": torch.randn(slots, HV, K, V, device=DEVICE).to(state_dtype),
    }


GEOMETRY = GatedDeltaNetConfig(HK, HV, K, V, W)


def wide(arguments: dict[str, Any]) -> dict[str, Any]:
    """Copies of a decode operation's arguments in float32."""
    copies = {name: x.float().clone() if isinstance(x, Tensor) else x for name, x in arguments.items()}
    conv_weight, a_log, dt_bias, norm_weight, eps = arguments["weights"]
    return copies | {"weights": DeltaWeights(conv_weight.float(), a_log, dt_bias, norm_weight.float(), eps)}


def check_decode(dtype: torch.dtype, state_dtype: torch.dtype, shape: Shape | None) -> dict[str, float]:
    arguments = decode_arguments(5, 12, state_dtype, dtype)
    arguments["projected"][4] = torch.nan
    slots = torch.tensor([3, 7, 1, 5, 0], dtype=torch.int32, device=DEVICE)
    upcast = wide(arguments)
    expected = gdn_decode.reference(**upcast, state_slots=slots, geometry=GEOMETRY)
    out = gdn_decode_triton(**arguments, state_slots=slots, geometry=GEOMETRY, shape=shape)
    assert (out[4] == 0).all(), "padding rows must be zero"
    return {
        "out": error(out, expected),
        "state": error(arguments["state"][1:], upcast["state"][1:]),
        "conv": error(arguments["conv_state"][1:], upcast["conv_state"][1:]),
    }


def time_chunk(lens: list[int], tiles: list[gdr.Tile | None]) -> dict[str, float]:
    batch = make_batch(lens)
    state = torch.zeros(len(lens) + 2, HV, K, V, device=DEVICE)
    sets = [make_inputs(batch.num_tokens, torch.bfloat16) for _ in range(3)]
    times = {}
    prepare = [partial(gdr._prepare, q, k, g, beta, batch.chunk_table) for q, k, _, g, beta in sets]
    times["prepare"] = time_us(prepare)
    for tile in tiles:
        calls = [partial(gdr.chunk_gated_delta_rule_triton, *x, state, batch, tile=tile) for x in sets]
        times[f"total {shape_name(tile)}"] = time_us(calls)
    return times


def time_fla(lens: list[int]) -> dict[str, float]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    sets = [make_inputs(sum(lens), torch.bfloat16) for _ in range(3)]
    by_prompt = [[t.unflatten(0, (len(lens), -1)) for t in x] for x in sets]
    initial = torch.zeros(len(lens), HV, K, V, device=DEVICE)

    def call(x: list[Tensor]) -> None:
        with torch.no_grad():
            chunk_gated_delta_rule(*x, initial_state=initial, output_final_state=True, use_qk_l2norm_in_kernel=True)

    return {"fla": time_us([partial(call, x) for x in by_prompt])}


def time_layer_ops(lens: list[int]) -> dict[str, float]:
    """Convolution and gated norm of a prefill, with the times their bytes would take."""
    batch, n = make_batch(lens), sum(lens)
    weight = torch.randn(CONV_DIM, W, device=DEVICE).bfloat16()
    states = torch.zeros(len(lens) + 1, CONV_DIM, W - 1, device=DEVICE).bfloat16()
    sets = [torch.randn(n, CONV_DIM + HV * V + 2 * HV, device=DEVICE).bfloat16() for _ in range(3)]
    mixed, norm = torch.randn(n, HV, V, device=DEVICE).bfloat16(), torch.randn(V, device=DEVICE).bfloat16()
    gates = [x[:, CONV_DIM : CONV_DIM + HV * V].unflatten(-1, (HV, V)) for x in sets]
    return {
        "conv": time_us([partial(causal_conv1d_triton, x[:, :CONV_DIM], weight, None, states, batch) for x in sets]),
        "conv floor": n * CONV_DIM * 4 / COPY_BYTES_PER_S * 1e6,
        "norm": time_us([partial(gated_rms_norm_triton, mixed, x, norm, 1e-6) for x in gates]),
        "norm floor": n * HV * V * 6 / COPY_BYTES_PER_S * 1e6,
    }


def time_decode(rows: int, state_dtype: torch.dtype, shapes: list[Shape | None]) -> dict[str, float]:
    sets = max(2, -(-256 // rows)) if rows < 256 else 2
    sets = min(sets, 24)
    arguments = decode_arguments(rows, rows * sets + 1, state_dtype, torch.bfloat16)
    order = torch.randperm(rows * sets, device=DEVICE).int() + 1
    slots = [order[i * rows : (i + 1) * rows].contiguous() for i in range(sets)]
    state_bytes = 2 * rows * HV * K * V * state_dtype.itemsize
    other = rows * (CONV_DIM * (2 * W - 1) + HV * V * 2) * 2
    times = {"floor": (state_bytes + other) / COPY_BYTES_PER_S * 1e6}
    for shape in shapes:
        run = partial(gdn_decode_triton, **arguments, geometry=GEOMETRY, shape=shape)
        calls = [partial(run, state_slots=s) for s in slots]
        times[shape_name(shape)] = time_us(calls)
    return times


def attempt(results: dict[str, Any], name: str, function: Callable[[], Any]) -> None:
    """Record a result or the error: one broken configuration must not cost the others."""
    try:
        results[name] = function()
    except Exception as failure:
        results[name] = f"FAILED {type(failure).__name__}: {str(failure)[:200]}"
        traceback.print_exc(limit=3)
    print(name, json.dumps(results[name]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--decode-only", action="store_true", help="time the decode step alone")
    parser.add_argument("--chosen", action="store_true", help="only the shapes that the kernels choose")
    options = parser.parse_args()
    tiles, shapes = (TILES[:1], DECODE_SHAPES[:1]) if options.chosen or DEVICE != "cuda" else (TILES, DECODE_SHAPES)
    on_gpu = DEVICE == "cuda"
    results: dict[str, Any] = report.provenance("cuda" if on_gpu else "cpu")
    half = torch.bfloat16 if on_gpu else torch.float16
    lens = [1, 63, 64, 65, 130, 210] if on_gpu else [1, 70]
    for seed, tile in itertools.product(range(2), tiles):
        torch.manual_seed(seed)
        attempt(results, f"check {half} {shape_name(tile)} seed {seed}", partial(check_chunk, half, tile, lens))
    for tile in (gdr.Tile(32, 4, 1), gdr.Tile(16, 4, 1)):
        attempt(results, f"check float32 {tuple(tile)}", partial(check_chunk, torch.float32, tile, lens))
    for shape in shapes:
        for dtype, state_dtype in ((half, torch.float32), (half, half), (torch.float32, torch.float32)):
            attempt(
                results, f"check decode {dtype} state {state_dtype} {shape_name(shape)}",
                partial(check_decode, dtype, state_dtype, shape),
            )  # fmt: skip
    if on_gpu and not options.check_only:
        if not options.decode_only:
            for lens in ([64], [1024], [4096], [8192], [2048] * 2, [2048] * 4, [256] * 32, [1024] * 16):
                attempt(results, f"chunk {len(lens)} x {lens[0]} us", partial(time_chunk, lens, tiles))
            for lens in ([4096], [8192], [2048] * 4):
                attempt(results, f"fla {len(lens)} x {lens[0]} us", partial(time_fla, lens))
            for lens in ([64], [4096], [2048] * 4):
                attempt(results, f"conv and norm {len(lens)} x {lens[0]} us", partial(time_layer_ops, lens))
        for rows, dtype in itertools.product((1, 8, 32, 64, 128, 256), (torch.float32, torch.bfloat16)):
            attempt(results, f"decode {rows} {dtype} us", partial(time_decode, rows, dtype, shapes))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
