"""Kernels that go row by row through a prefill: every tile checked against float64, then timed beside the memory floor.

Usage: ``python -m benchmarks.kernels.rows [operation ...] [--chosen]``; without a GPU it rehearses on tiny shapes under
the interpreter. A star marks the tile that the kernel's ``TILES`` table chooses today; ``--chosen`` times those alone.
Outputs are filled with NaN first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.gdn import make_batch
from benchmarks.kernels.measure import COPY_BYTES_PER_S, DEVICE, ON_GPU, error, graph_ms, write_json
from weft.ops.activation.kernels import sigmoid_mul_triton
from weft.ops.convolution import causal_conv1d
from weft.ops.convolution import prefill as conv
from weft.ops.moe import Routed
from weft.ops.moe import combine as moe_sum
from weft.ops.norm import kernels as norm
from weft.ops.norm import mean_square, scale_by_mean_square
from weft.ops.rotary import CacheSlots, HeadNorms, QkvHeads, qk_norm_rope
from weft.ops.rotary import kernels as rope
from weft.ops.triton.tile_table import choose_tile

DTYPE = torch.bfloat16 if ON_GPU else torch.float32
LIMIT = 4e-3 if ON_GPU else 2e-6
SIZES = (1, 64, 1024, 8192) if ON_GPU else (1, 3)
CHECKED = 210 if ON_GPU else 7  # tokens of a check: no multiple of any tile

# Qwen3-Next; the projection of a Gated DeltaNet layer is q | k | v | z | b | a.
HEADS, HEAD_DIM, CHANNELS, HIDDEN, TOP_K = (32, 128, 8192, 2048, 10) if ON_GPU else (2, 24, 40, 48, 3)
PROJECTED = CHANNELS + HEADS * HEAD_DIM + 2 * HEADS
ROPE_A = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "gated": False}  # Qwen3-0.6B
ROPE_B = {"num_heads": 16, "num_kv_heads": 2, "head_dim": 256, "gated": True}  # Qwen3-Next, 64 dimensions turn

Call = Callable[..., Any]
"""Takes ``tile=``."""


class Operation(NamedTuple):
    """How one operation is timed.

    Attributes:
        tiles: alternatives of the kernel.
        table, key: which alternative is chosen for a number of tokens.
        bytes_per_token: what has to be moved.
        make_call: inputs for a number of tokens, and the call that is timed.
        check: the error of a result.
        sizes: numbers of tokens.
    """

    tiles: list[Any]
    table: Mapping[int, Any]
    key: Callable[[int], int]
    bytes_per_token: int
    make_call: Callable[[int], Call]
    check: Callable[[Any], float]
    sizes: tuple[int, ...] = SIZES


class Way(NamedTuple):
    """A way to compute a norm of channels of several ranks: ``kernels`` are Weft's, ``torch`` is what they replaced."""

    name: str


KERNELS = Way("kernels")


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that is allocated here holds NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def projected_gate(num_tokens: int) -> Tensor:
    """z of a projection, ``[T, HV, V]``, a strided slice."""
    return randn(num_tokens, PROJECTED)[:, CHANNELS : CHANNELS + HEADS * HEAD_DIM].unflatten(-1, (HEADS, HEAD_DIM))


def conv_call(num_tokens: int) -> Call:
    state = torch.zeros(2, CHANNELS, 3, device=DEVICE, dtype=DTYPE)
    x, batch = randn(num_tokens, PROJECTED)[:, :CHANNELS], make_batch([num_tokens])
    return partial(conv.causal_conv1d_triton, x, randn(CHANNELS, 4), None, state, batch)


def check_conv(tile: conv.Tile) -> float:
    """Sequences of awkward lengths, a checkpoint after 3 tokens, padding; outputs and states."""
    lens = [1, 63, 64, 65, 2, 130] if ON_GPU else [1, 5]
    batch = make_batch(lens, checkpoint=True, pad=3)
    x, weight = randn(batch.num_tokens + 5, CHANNELS), randn(CHANNELS, 4)
    x[batch.num_tokens :] = torch.nan
    state = torch.full((len(lens) + 2, CHANNELS, 3), torch.nan, device=DEVICE, dtype=DTYPE)
    want_state = state.double()
    with poisoned():
        out = conv.causal_conv1d_triton(x, weight, None, state, batch, tile=tile)
    want = causal_conv1d.reference(x.double(), weight, None, want_state, batch)
    return max(error(out, want), error(state[1:], want_state[1:]))


def norm_call(num_tokens: int) -> Call:
    x = randn(num_tokens, HEADS, HEAD_DIM)
    return partial(norm.gated_rms_norm_triton, x, projected_gate(num_tokens), randn(HEAD_DIM), 1e-6)


def check_norm(tile: norm.Tile) -> float:
    x, gate, weight = randn(CHECKED, HEADS, HEAD_DIM), projected_gate(CHECKED), randn(HEAD_DIM)
    with poisoned():
        out = norm.gated_rms_norm_triton(x, gate, weight, 1e-6, tile=tile)
    want = torch.nn.functional.rms_norm(x.double(), (HEAD_DIM,), weight.double(), 1e-6)
    return error(out, want * torch.nn.functional.silu(gate.double()))


def ranks_norm(x: Tensor, gate: Tensor, weight: Tensor, *, tile: Way) -> Tensor:
    """The gated norm of channels that are split over eight ranks, without the sum over them."""
    if tile is KERNELS:
        return norm.scale_by_mean_square_triton(x, norm.mean_square_triton(x, 8), weight, 1e-6, gate=gate)
    y = scale_by_mean_square.reference(x, mean_square.reference(x, 8), weight, 1e-6)
    return sigmoid_mul_triton(y, gate)


def ranks_norm_inputs(num_tokens: int, channels: int) -> tuple[Tensor, Tensor, Tensor]:
    return randn(num_tokens, channels), randn(num_tokens, 4 * channels)[:, 3 * channels :], randn(channels)


def check_ranks_norm(way: Way, channels: int) -> float:
    x, gate, weight = inputs = ranks_norm_inputs(CHECKED, channels)
    with poisoned():
        out = ranks_norm(*inputs, tile=way)
    mean = x.double().square().mean(-1, keepdim=True) / 8
    return error(out, x.double() / (mean + 1e-6).sqrt() * weight.double() * gate.double().sigmoid())


def ranks_norm_operation(channels: int) -> Operation:
    return Operation(
        [Way("torch")], {1: KERNELS}, lambda n: n, 4 * channels * BYTES,
        lambda n: partial(ranks_norm, *ranks_norm_inputs(n, channels)), partial(check_ranks_norm, channels=channels),
        (1, 8, 128, 8192) if ON_GPU else SIZES,
    )  # fmt: skip


def rope_inputs(num_tokens: int, sizes: dict[str, Any]) -> tuple[Any, ...]:
    heads, kv_heads, dim, gated = sizes.values()
    qkv = randn(num_tokens, (heads * (1 + gated) + 2 * kv_heads) * dim)
    caches = [torch.full((num_tokens // 16 + 2, 16, kv_heads, dim), 7.0, device=DEVICE, dtype=DTYPE) for _ in range(2)]
    cos_sin = torch.randn(4096, 64 if gated else dim, device=DEVICE)
    positions = torch.arange(num_tokens, device=DEVICE) % 4096
    slots = torch.arange(num_tokens, device=DEVICE) + 16
    norms = HeadNorms(randn(dim), randn(dim), 1e-6, gated)
    return qkv, QkvHeads(**sizes), norms, cos_sin, positions, CacheSlots(caches[0], caches[1], slots)


def rope_call(num_tokens: int, sizes: dict[str, Any]) -> Call:
    return partial(rope.qk_norm_rope_triton, *rope_inputs(num_tokens, sizes))


def check_rope(tile: rope.Tile, sizes: dict[str, Any]) -> float:
    qkv, heads, norms, cos_sin, positions, cache = rope_inputs(CHECKED, sizes)
    wide_norms = norms._replace(q_weight=norms.q_weight.double(), k_weight=norms.k_weight.double())
    wide = cache._replace(k_cache=cache.k_cache.double(), v_cache=cache.v_cache.double())
    with poisoned():
        q, _ = rope.qk_norm_rope_triton(qkv, heads, norms, cos_sin, positions, cache, tile=tile)
    want, _ = qk_norm_rope.reference(qkv.double(), heads, wide_norms, cos_sin.double(), positions, wide)
    return max(error(q, want), error(cache.k_cache, wide.k_cache), error(cache.v_cache, wide.v_cache))


def sum_inputs(num_tokens: int) -> tuple[Tensor, Routed]:
    ids = torch.randint(0, 512, (num_tokens, TOP_K), device=DEVICE, dtype=torch.int32)
    weights = torch.rand(num_tokens, TOP_K, device=DEVICE)
    return randn(num_tokens * TOP_K, HIDDEN), Routed(weights, ids, randn(num_tokens, HIDDEN), randn(num_tokens, 1))


def check_sum(tile: moe_sum.Tile) -> float:
    outputs, routed = sum_inputs(CHECKED)
    weights, ids, shared, logits = routed
    assert shared is not None and logits is not None
    ids[-1], ids[0, 0] = -1, -1
    outputs[(ids < 0).flatten()] = torch.nan
    with poisoned():
        out = moe_sum.sum_experts(outputs, routed, tile=tile)
    want = (outputs.nan_to_num().double().view(CHECKED, TOP_K, -1) * weights.double().unsqueeze(-1)).sum(1)
    return error(out, want + logits.double().sigmoid() * shared.double())


def rope_operation(sizes: dict[str, Any]) -> Operation:
    heads, kv_heads, dim, _ = sizes.values()
    tiles = [(1, 4, 1, None), (1, 8, 2, None), (2, 8, 4, 96), (2, 16, 4, 128), (4, 8, 4, 128), (4, 8, 8, 64)]
    return Operation(
        [rope.Tile(*t) for t in tiles], rope.TILES, lambda n: n, 2 * (heads + 2 * kv_heads) * dim * DTYPE.itemsize,
        partial(rope_call, sizes=sizes), partial(check_rope, sizes=sizes),
    )  # fmt: skip


CONV_TILES = [
    (256, 8, 4, 1, None), (512, 16, 4, 4, None), (512, 32, 4, 2, 128), (512, 64, 4, 4, None), (1024, 32, 4, 4, 128),
    (1024, 64, 4, 4, None), (1024, 64, 8, 4, None),
]  # fmt: skip
NORM_TILES = [(1024, 4, None), (2048, 4, 64), (4096, 4, 128), (4096, 8, 64), (2048, 8, None)]
SUM_TILES = [(256, 1, None), (512, 2, None), (1024, 4, 96), (1024, 4, None), (2048, 8, 96), (2048, 4, 128)]
BYTES = DTYPE.itemsize
OPERATIONS = {
    "conv": Operation(
        [conv.Tile(*t) for t in CONV_TILES], conv.TILES, lambda n: -(-n // 64) * 64, 2 * CHANNELS * BYTES,
        conv_call, check_conv,
    ),
    "gated norm": Operation(
        [norm.Tile(*t) for t in NORM_TILES], norm.TILES, lambda n: n * HEADS, 3 * HEADS * HEAD_DIM * BYTES,
        norm_call, check_norm,
    ),
    "norm of 1,024": ranks_norm_operation(1024 if ON_GPU else 40),
    "norm of 2,048": ranks_norm_operation(2048 if ON_GPU else 72),
    "rope A": rope_operation(ROPE_A),
    "rope B": rope_operation(ROPE_B),
    "sum of experts": Operation(
        [moe_sum.Tile(*t) for t in SUM_TILES], moe_sum.TILES, lambda n: n, (TOP_K + 2) * HIDDEN * BYTES,
        lambda n: partial(moe_sum.sum_experts, *sum_inputs(n)), check_sum,
    ),
}  # fmt: skip


def measured(name: str, operation: Operation, *, sweep: bool) -> Iterator[dict[str, Any]]:
    """Every tile of the table and of the alternatives, or the one in use, at every size."""
    tiles = list(dict.fromkeys([*operation.table.values(), *(operation.tiles if sweep else [])]))
    errors = {tile: operation.check(tile) for tile in tiles}
    for num_tokens in operation.sizes:
        calls = [operation.make_call(num_tokens) for _ in range(3 if num_tokens > 64 else 8)]
        chosen = choose_tile(operation.table, operation.key(num_tokens))
        for tile in tiles if sweep else [chosen]:
            us = graph_ms([partial(call, tile=tile) for call in calls]) * 1e3
            floor = num_tokens * operation.bytes_per_token / COPY_BYTES_PER_S * 1e6
            yield {"op": name, "tokens": num_tokens, "tile": tile, "chosen": tile == chosen, "us": us,
                   "floor_us": floor, "error": errors[tile]}  # fmt: skip


def main() -> None:
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    names = [name for name in sys.argv[1:] if name != "--chosen"]
    unknown = [name for name in names if name not in OPERATIONS]
    if unknown:
        sys.exit(f"unknown operations {unknown}; there are {list(OPERATIONS)}")
    rows: list[dict[str, Any]] = []
    print(f"{'operation':16} {'tokens':>6} {'tile':24} {'us':>9} {'floor us':>9} {'share':>6} {'error':>9}")
    for name in names or OPERATIONS:
        for row in measured(name, OPERATIONS[name], sweep="--chosen" not in sys.argv):
            rows.append(row)
            share = row["floor_us"] / row["us"] if row["us"] else 0.0
            verdict = (" *" if row["chosen"] else "") + ("" if row["error"] < LIMIT else "  WRONG")
            print(
                f"{row['op']:16} {row['tokens']:6} {tuple(row['tile'])!s:24} {row['us']:9.2f} {row['floor_us']:9.2f} "
                f"{share:6.2f} {row['error']:9.1e}{verdict}", flush=True,
            )  # fmt: skip
    write_json("rows.json", rows)


if __name__ == "__main__":
    main()
