"""Kernels of coded experts against float64 of the dequantised weights, on the GPU or under the interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.ops.interpreter import DEVICE
from tests.ops.linear.test_triton_coded import DTYPES, FORMS, ON_GPU, coded_matrix
from tests.ops.moe.test_triton_moe import routing
from tests.whole import unless_long
from weft.ops.backend import Backend
from weft.ops.codes import CodedMatrix, dequantize_codes
from weft.ops.moe import NO_EXTRAS, ExpertExtras
from weft.ops.moe.blocks import Tile, Tiles
from weft.ops.moe.coded import coded_fused_moe
from weft.ops.moe.coded_experts import coded_fused_moe_triton, tiles_by_rule

TOLERANCE = {torch.float32: 2e-4 if ON_GPU else 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Relative error of all outputs of a token: roundings of weights, of hidden values and of results."""
# tokens, experts, experts per token, hidden size, expert width
SHAPES = [(1, 8, 2, 256, 128), (3, 5, 2, 160, 96), (7, 5, 3, 128, 256), (33, 6, 4, 256, 96)]
TILES = [
    Tiles(Tile(16, 64, 0, 4, 2), Tile(16, 32, 0, 4, 2)),
    Tiles(Tile(8, 32, 0, 1, 4), Tile(8, 64, 0, 2, 3)),
    Tiles(Tile(32, 64, 0, 4, 3), Tile(32, 64, 0, 4, 2)),
    Tiles(Tile(64, 128, 0, 4, 3), Tile(64, 64, 0, 4, 2)),
]


def expected(
    x: Tensor, gate_up: CodedMatrix, down: CodedMatrix, weights: Tensor, ids: Tensor, extras: ExpertExtras, gated: bool
) -> Tensor:
    """Pair by pair, in float64."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for token, pair in itertools.product(range(ids.shape[0]), range(ids.shape[1])):
        expert = int(ids[token, pair])
        if expert < 0:
            continue
        hidden = dequantize_codes(gate_up.expert(expert)).double() @ x[token].double()
        if extras.gate_up_bias is not None:
            hidden += extras.gate_up_bias[expert].double()
        if extras.limit is not None:
            gate, up = hidden.chunk(2)
            gate, up = gate.clamp(max=extras.limit), up.clamp(-extras.limit, extras.limit)
            hidden = gate * torch.sigmoid(extras.alpha * gate) * (up + 1)
        elif gated:
            hidden = torch.nn.functional.silu(hidden.chunk(2)[0]) * hidden.chunk(2)[1]
        else:
            hidden = hidden.relu().square()
        result = dequantize_codes(down.expert(expert)).double() @ hidden
        if extras.down_bias is not None:
            result += extras.down_bias[expert].double()
        out[token] += weights[token, pair].double() * result
    return out


def check_moe(
    shape: tuple[int, ...], form: str, dtype: torch.dtype, padding: int, tiles: Tiles | None = None,
    extras: ExpertExtras = NO_EXTRAS, gated: bool = True,
) -> None:  # fmt: skip
    num_tokens, num_experts, top_k, hidden, width = shape
    weights, ids = routing(num_tokens, num_experts, top_k, padding)
    x = torch.randn(num_tokens, hidden, device=DEVICE).to(dtype)
    gate_up = coded_matrix(form, (1 + gated) * width, hidden, num_experts, scale_dtype=dtype)
    down = coded_matrix(form, hidden, width, num_experts, scale_dtype=dtype)
    want = expected(x, gate_up, down, weights, ids, extras, gated)
    real = slice(num_tokens - padding)
    given = (x, gate_up, down, weights, ids)
    references = [] if ON_GPU else [coded_fused_moe(*given, extras=extras, backend=Backend.TORCH)]
    x[num_tokens - padding :] = torch.nan
    for out in (*references, coded_fused_moe_triton(*given, extras=extras, tiles=tiles)):
        assert (out[num_tokens - padding :] == 0).all(), "tokens without experts are zero"
        error, size = (out[real].double() - want[real]).norm(), want[real].norm()
        assert error <= TOLERANCE[dtype] * size, f"relative error {error / size:.2e}"


CASES = list(itertools.product(SHAPES, FORMS, TILES)) if ON_GPU else [
    (SHAPES[i % 4], form, TILES[i % 4]) for i, form in enumerate(FORMS)
] + [(SHAPES[(i + 1) % 4], form, TILES[(i + 2) % 4]) for i, form in enumerate(FORMS)][::2]  # fmt: skip


@pytest.mark.parametrize(("shape", "form", "tiles"), unless_long(CASES[: len(FORMS)], CASES))
def test_experts(shape: tuple[int, ...], form: str, tiles: Tiles) -> None:
    for dtype in DTYPES if ON_GPU else DTYPES[:1]:
        check_moe(shape, form, dtype, min(2, shape[0] - 1), tiles)


@pytest.mark.parametrize("form", ["int4 g64 zeros", "int8 g128 zeros"])
def test_float16(form: str) -> None:
    check_moe(SHAPES[2], form, torch.float16, 1)


@pytest.mark.parametrize("tokens", [2, 9])
def test_biases_and_a_clamped_activation(tokens: int) -> None:
    """gpt-oss."""
    biases = torch.randn(5, 192, device=DEVICE), torch.randn(5, 160, device=DEVICE)
    check_moe((tokens, 5, 2, 160, 96), "mxfp4", torch.float32, 1, extras=ExpertExtras(*biases, 1.702, 0.7))


@pytest.mark.parametrize("tokens", [2, 9])
def test_experts_without_a_gate(tokens: int) -> None:
    check_moe((tokens, 5, 2, 160, 96), "int4 g32", torch.float32, 1, gated=False)


def test_tiles_by_rule() -> None:
    for average in (0.02, 8, 20, 300):
        tiles = tiles_by_rule(average)
        assert tiles.up.rows == tiles.down.rows and tiles.up.columns % 2 == 0
