"""Kernels of FP8 experts against float64 of the dequantised operands, on the GPU or under the interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.ops.interpreter import DEVICE
from tests.ops.linear.test_triton_fp8 import (
    ON_GPU,
    SCHEMES,
    block_of,
    fp8_matrix,
    inputs,
    product,
    quantised,
    sampled,
    with_dtypes,
)
from tests.ops.moe.test_triton_moe import expected_moe, routing
from tests.whole import RUNS_LONG, covering, unless_long
from weft.ops.backend import Backend
from weft.ops.fp8 import Fp8Matrix, quantize_inputs_reference, quantize_rows
from weft.ops.fp8 import quantize as fp8_quantize
from weft.ops.fp8.quantize import prepare_pass
from weft.ops.moe import NO_EXTRAS, ExpertExtras, clamped_swiglu, fp8_fused_moe, softcapped_swiglu
from weft.ops.moe.blocks import Tile, Tiles
from weft.ops.moe.fp8_experts import LARGE, SINGLE, Config, choose_tiles, fp8_fused_moe_triton, fp8_moe_tiles
from weft.ops.moe.groups import group_pairs

# Experts: hidden values are quantised between the products. One near a rounding boundary may fall to either side: at
# an error of 2e-4 one in 300 does, by up to an eighth.
ROUNDED_TWICE = {torch.float32: 1e-2 if ON_GPU else 1e-4, torch.float16: 1e-2 if ON_GPU else 3e-3, torch.bfloat16: 2e-2}

# tokens, experts, experts per token, hidden size, expert width
MOE_SHAPES = [(1, 8, 2, 256, 128), (7, 5, 3, 128, 256), (33, 6, 4, 256, 128)]


def check_moe(
    shape: tuple[int, ...],
    scheme: str,
    dtype: torch.dtype,
    padding: int,
    config: Config | None = None,
    extras: ExpertExtras = NO_EXTRAS,
) -> None:
    num_tokens, num_experts, top_k, hidden, width = shape
    block = block_of(scheme)
    weights, ids = routing(num_tokens, num_experts, top_k, padding)
    x = torch.randn(num_tokens, hidden, device=DEVICE).to(dtype)
    static = (torch.tensor([0.01], device=DEVICE), torch.tensor([0.03], device=DEVICE)) if scheme == "static" else None
    gate_up, gate_up_scale = fp8_matrix(2 * width, hidden, block, num_experts)
    down, down_scale = fp8_matrix(hidden, width, block, num_experts)
    want = reference_moe(x, gate_up, gate_up_scale, down, down_scale, weights, ids, static, block, extras)
    up = Fp8Matrix(gate_up, gate_up_scale, static and static[0], block)
    given = (x, up, Fp8Matrix(down, down_scale, static and static[1], block), weights, ids)
    references = [] if ON_GPU else [fp8_fused_moe(*given, extras=extras, backend=Backend.TORCH)]
    x[num_tokens - padding :] = torch.nan
    for out in (*references, fp8_fused_moe_triton(*given, extras=extras, config=config)):
        assert (out[num_tokens - padding :] == 0).all(), "tokens without experts are zero"
        real = slice(num_tokens - padding)
        error, size = (out[real].double() - want[real]).norm(), want[real].norm()
        assert error <= ROUNDED_TWICE[dtype] * size, f"relative error {error / size:.2e}"


def reference_moe(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    weights: Tensor,
    ids: Tensor,
    static: tuple[Tensor, Tensor] | None,
    block: int,
    extras: ExpertExtras = NO_EXTRAS,
) -> Tensor:
    """Pair by pair, products in float64; hidden values are rounded to x's dtype and quantised in between."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=DEVICE)
    for token, experts in enumerate(ids.tolist()):
        for place, expert in enumerate(experts):
            if expert < 0:
                continue
            values, scales = quantize_inputs_reference(x[token : token + 1], static and static[0], block=block)
            both = product(values, scales, gate_up[expert], gate_up_scale[expert], block)
            gate, up = both.chunk(2, dim=-1)
            hidden = torch.nn.functional.silu(gate) * up
            if extras.limit is not None:
                hidden = clamped_swiglu(both, extras.alpha, extras.limit, extras.up_offset)
            if extras.gate_cap is not None and extras.up_cap is not None:
                hidden = softcapped_swiglu(both, extras.gate_cap, extras.up_cap)
            hidden = hidden.to(x.dtype)
            values, scales = quantize_inputs_reference(hidden, static and static[1], block=block)
            result = product(values, scales, down[expert], down_scale[expert], block)
            out[token] += weights[token, place].double() * result[0]
    return out


@pytest.mark.parametrize(
    ("shape", "scheme", "padding", "dtype"),
    with_dtypes(
        [
            (shape, scheme, (i + j) % 2)
            for i, shape in enumerate(MOE_SHAPES)
            for j, scheme in enumerate(SCHEMES)
            if RUNS_LONG or i % len(SCHEMES) == j
        ]
    ),
    ids=str,
)
def test_experts_pair_by_pair(shape: tuple[int, ...], scheme: str, padding: int, dtype: torch.dtype) -> None:
    check_moe(shape, scheme, dtype, padding)


@pytest.mark.parametrize(
    ("num_tokens", "scheme", "extras"),
    covering(
        [2, 9], ["token", "block"], [{"alpha": 1.3, "limit": 0.7, "up_offset": 0.2}, {"gate_cap": 0.5, "up_cap": 0.6}]
    ),
    ids=str,
)
def test_activations_that_are_not_swiglu(num_tokens: int, scheme: str, extras: dict[str, float]) -> None:
    check_moe((num_tokens, 4, 2, 256, 128), scheme, torch.float32, 1, extras=ExpertExtras(**extras))


@pytest.mark.parametrize("num_tokens", [2, 5], ids=["single", "grouped"])
@pytest.mark.parametrize("scheme", ["token", "static"])
def test_experts_of_awkward_widths(num_tokens: int, scheme: str) -> None:
    """Widths that 128 does not divide: with scales by channel only."""
    check_moe((num_tokens, 4, 2, 200, 72), scheme, torch.float32, 1)


@pytest.mark.parametrize("num_tokens", [2, 9], ids=["single", "grouped"])
@pytest.mark.parametrize("scaled", [0, 1], ids=["gate_up", "down"])
def test_each_product_has_input_scales_of_its_own(num_tokens: int, scaled: int) -> None:
    """Only one product has a given scale for all inputs. The second product computes the scales of its own rows."""
    (weights, ids), x = routing(num_tokens, 4, 2, 0), torch.randn(num_tokens, 128, device=DEVICE)
    scales = [torch.tensor([0.02], device=DEVICE) if place == scaled else None for place in range(2)]
    gate_up, down = (
        Fp8Matrix(*fp8_matrix(n, 128, 0, 4), scale, 0) for n, scale in zip((256, 128), scales, strict=True)
    )
    want = fp8_fused_moe(x, gate_up, down, weights, ids, backend=Backend.TORCH)
    error = (fp8_fused_moe_triton(x, gate_up, down, weights, ids) - want).norm()
    assert error <= ROUNDED_TWICE[torch.float32] * want.norm()


def test_single_pairs_of_many_groups() -> None:
    """More groups of inputs than a tensor core has rows; tiles over the boundary of two blocks of scales."""
    tiles = SINGLE if ON_GPU else Tiles(Tile(1, 64, 128, 4, 3), Tile(1, 128, 128, 4, 2))
    check_moe((1, 2, 1, 2176, 384), "block", torch.float32, 0, tiles)


@pytest.mark.parametrize("num_tokens", [1, 9])
def test_experts_quantise_without_a_pass(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single pairs in the product, grouped ones in the first launch of the grouping."""

    class Refused:
        def __getitem__(self, grid: object) -> None:
            raise AssertionError("a pass of its own")

    monkeypatch.setattr(fp8_quantize, "_quantize_kernel", Refused())
    check_moe((num_tokens, 4, 2, 128, 128), "block", torch.float32, 0)


@pytest.mark.parametrize(("tokens", "scheme"), [(9, "block"), (140, "token"), (4, "static")])
def test_grouping_quantises_as_the_reference_does(tokens: int, scheme: str) -> None:
    """Bit for bit, beside a grouping in which every pair has a place among those of its expert."""
    block, (_weights, ids) = block_of(scheme), routing(tokens, 4, 2, 1)
    x, static = inputs(tokens, 1152 if tokens < 50 else 32, torch.float32, scheme)
    work = prepare_pass(x, static, block=block)
    (pairs, first_place, *_), _max_blocks = group_pairs(ids, 4, 16, work)
    ends = [0, *first_place[1:5].tolist()]
    for expert, (first, end) in enumerate(itertools.pairwise(ends)):
        assert sorted(pairs[first:end].tolist()) == (ids.flatten() == expert).nonzero().flatten().tolist()
    values, scales = work.outputs
    want, want_scales = quantised(x, static, block)
    assert torch.equal(values.float(), want.float()) and torch.equal(scales.expand_as(want_scales), want_scales)


@pytest.mark.parametrize(("pairs", "scheme"), sampled([200, 10240, 20480], SCHEMES)[:: 1 if ON_GPU else 4])
def test_every_tile_of_experts(pairs: int, scheme: str) -> None:
    """Each set of tiles that any number of tokens selects."""
    tiles = fp8_moe_tiles(pairs, 512, 512, block_of(scheme))
    check_moe((300, 3, 2, 384, 256) if ON_GPU else (40, 3, 2, 128, 128), scheme, torch.float32, 3, tiles)


def test_narrow_experts_with_block_scales_go_through_tiles_of_columns() -> None:
    spans = {
        (width, block): fp8_moe_tiles(512 * 9, 512, width, block).down.span
        for width in (256, 384)
        for block in (0, 128)
    }
    assert spans == {(256, 0): 1, (384, 0): 1, (256, 128): 8, (384, 128): 1}


@pytest.mark.parametrize(("block", "tokens", "is_large"), [(0, 769, True), (0, 768, False), (128, 769, False)])
def test_large_tiles_are_for_many_pairs_with_row_scales(
    block: int, tokens: int, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """48 pairs of 128 experts and 8 experts of a token are 768 tokens."""
    monkeypatch.setattr("weft.ops.moe.fp8_experts.is_hopper", lambda device: True)
    assert (choose_tiles(torch.empty(128, 256, 384), tokens, 8, block) == LARGE) == is_large


def test_large_tiles() -> None:
    check_moe((300, 3, 2, 384, 256) if ON_GPU else (70, 3, 2, 128, 128), "token", torch.float32, 3, LARGE)


WAYS = [(16, "block"), (128, "block"), (16, "token"), (128, "static")]


@pytest.mark.parametrize(
    ("way", "hidden"),
    unless_long([(WAYS[3], 256)], itertools.product(WAYS, [256, 384])),
)
def test_down_product_through_tiles_of_columns(way: tuple[int, str], hidden: int) -> None:
    """The same bits as of programs with one tile each; the last tile is whole, or ragged."""
    rows, scheme = way
    up, down = Tile(rows, 64, 128, 4, 2), Tile(rows, 128, 128, 4, 2)
    check_same_bits(scheme, hidden, Tiles(up, down), Tiles(up, down._replace(span=2)))


def check_same_bits(scheme: str, hidden: int, *configs: Tiles) -> None:
    weights, ids = routing(70, 3, 2, 3)
    block, (x, static) = block_of(scheme), inputs(70, hidden, torch.float32, scheme)
    up, down = (Fp8Matrix(*fp8_matrix(*size, block, 3), static, block) for size in ((512, hidden), (hidden, 256)))
    want, out = (fp8_fused_moe_triton(x, up, down, weights, ids, config=config) for config in configs)
    assert want[:67].any(1).all() and torch.equal(out, want)


def test_experts_quantise_alike_in_both_products() -> None:
    """A wide up tile quantises its hidden values itself; the down product would have done the same."""
    weights, ids = routing(9, 4, 2, 0)
    x = torch.randn(9, 128, device=DEVICE)
    gate_up, down = (Fp8Matrix(*fp8_matrix(n, 128, 128, 4), None, 128) for n in (256, 128))
    outs = [
        fp8_fused_moe_triton(
            x,
            gate_up,
            down,
            weights,
            ids,
            config=Tiles(Tile(16, columns, 128, 4, 2), Tile(16, 64, 128, 4, 2)),
        )
        for columns in (32, 128)
    ]
    torch.testing.assert_close(*outs, rtol=1e-3, atol=1e-3)


def test_a_shared_expert_is_gated_and_added() -> None:
    weights, ids = routing(5, 4, 2, 1)
    x = torch.randn(5, 128, device=DEVICE)
    gate_up, down = (Fp8Matrix(*fp8_matrix(n, 128, 128, 4), None, 128) for n in (256, 128))
    shared, logits = torch.randn(5, 128, device=DEVICE), torch.randn(5, 9, device=DEVICE)
    plain = fp8_fused_moe_triton(x, gate_up, down, weights, ids)
    gated = logits[:, 8:]
    out = fp8_fused_moe_triton(x, gate_up, down, weights, ids, shared=shared, shared_gate=gated)
    torch.testing.assert_close(out, plain + torch.sigmoid(gated) * shared)


def test_unquantised_experts_are_near() -> None:
    """Quantising by channel and token costs a few percent, not more: scales are applied to what they belong to."""
    weights, ids = routing(33, 4, 2, 0)
    x, wide_up, wide_down = (torch.randn(s, device=DEVICE) for s in ((33, 256), (4, 256, 256), (4, 256, 128)))
    wide_up, wide_down = wide_up / 16, wide_down / 11
    gate_up, down = (Fp8Matrix(*quantize_rows(wide), None, 0) for wide in (wide_up, wide_down))
    out = fp8_fused_moe_triton(x, gate_up, down, weights, ids)
    want = expected_moe(x, wide_up, wide_down, weights, ids)
    assert (out - want).norm() < 0.08 * want.norm()


@pytest.mark.parametrize("scheme", unless_long(["block"], ["block", "token"]))
def test_a_token_has_the_same_bits_for_any_number_of_tokens(scheme: str) -> None:
    counts = (1, 3, 40, 200) if ON_GPU else (1, 3)
    experts, hidden, width, block = 6, 256, 128, block_of(scheme)
    weights, ids = routing(max(counts) + 9, experts, 2, 0)
    x = torch.randn(max(counts) + 9, hidden, device=DEVICE).to(torch.bfloat16 if ON_GPU else torch.float32)
    matrices = [Fp8Matrix(*fp8_matrix(*s, block, experts), None, block) for s in ((2 * width, hidden), (hidden, width))]

    def run(count: int) -> Tensor:
        given = x[:count], *matrices, weights[:count].contiguous(), ids[:count].contiguous()
        return fp8_fused_moe(*given, backend=Backend.INVARIANT_TRITON)

    for count in counts:
        assert torch.equal(run(count), run(len(x))[:count]), count
