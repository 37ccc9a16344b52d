"""FP8 kernels against float64 of the dequantised operands, on the GPU or under the interpreter."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.interpreter import DEVICE
from tests.whole import covering, unless_long
from weft.ops.backend import Backend
from weft.ops.fp8 import E4M3, Fp8Matrix, dequantize_inputs, dequantize_weight, quantize_inputs_reference
from weft.ops.fp8 import quantize as fp8_quantize
from weft.ops.fp8.quantize import quantize_inputs_triton
from weft.ops.linear import fp8 as fp8_linear_module
from weft.ops.linear import fp8_few_rows, fp8_linear, fp8_linear_parts, fp8_linear_silu_mul
from weft.ops.linear.fp8 import (
    Library,
    ManyRows,
    choose_config,
    fp8_product_triton,
    many_rows_config,
    outputs,
)
from weft.ops.linear.fp8_few_rows import FewRows, few_rows_config

ON_GPU = DEVICE == "cuda"
# Relative error of a whole product: one rounding to the dtype, float32 sums before it. Matrix units for FP8 add up with
# some 13 bits within a step of 128, which leaves 1e-4 to 2e-4 of a product (measured on an H200).
TOLERANCE = {torch.float32: 4e-4 if ON_GPU else 2e-6, torch.float16: 6e-4 if ON_GPU else 4e-4, torch.bfloat16: 3e-3}
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU


def sampled(*lists: list[Any]) -> list[tuple[Any, ...]]:
    """All combinations; interpreted, where a case takes a while, so many that any two entries of the longest two lists
    meet (and those of others, whose lengths have no common divisor)."""
    if ON_GPU:
        return list(itertools.product(*lists))
    first, second, *_ = sorted(map(len, lists), reverse=True)
    return [tuple(entries[i % len(entries)] for entries in lists) for i in range(first * second)]


def with_dtypes(cases: list[Any]) -> list[tuple[Any, ...]]:
    """Each case in each dtype; interpreted, in float32, and the first also in another one."""
    if ON_GPU:
        return [(*case, dtype) for case in cases for dtype in DTYPES]
    return [(*case, DTYPES[0]) for case in cases] + [(*case, DTYPES[1]) for case in cases[:1]]


SCHEMES = ["block", "token", "static"]

FEW = [FewRows(True, 16, 4, 1, 1), FewRows(True, 32, 4, 1, 2), FewRows(False, 64, 4, 3, 1), FewRows(False, 64, 4, 2, 3)]
MANY = [ManyRows(64, 128, 4, 3), ManyRows(128, 128, 8, 3), ManyRows(128, 256, 8, 3), ManyRows(64, 64, 4, 2)]
# tokens, weight rows, inner size
FEW_SHAPES = [(1, 256, 384), (3, 200, 256), (9, 256, 210), (16, 128, 128), (33, 384, 256)]
MANY_SHAPES = [(65, 256, 384), (130, 200, 210)]
MANY_CASES = sampled(MANY_SHAPES, MANY, SCHEMES)
if not ON_GPU:  # the widths of tiles matter to scales by block alone
    MANY_CASES = [((65, 136, 256), MANY[0], "block"), *((MANY_SHAPES[1], config, "block") for config in MANY[1:])]
    MANY_CASES += [((65, 136, 210), MANY[0], scheme) for scheme in ("token", "static")]


def block_of(scheme: str) -> int:
    return 128 if scheme == "block" else 0


def fp8_matrix(rows: int, inner: int, block: int, *lead: int) -> tuple[Tensor, Tensor]:
    weight = torch.randn(*lead, rows, inner, device=DEVICE).to(E4M3)
    shape = (-(-rows // 128), -(-inner // 128)) if block else (rows, 1)
    return weight, (torch.rand(*lead, *shape, device=DEVICE) + 0.5) * inner**-0.5


def inputs(tokens: int, inner: int, dtype: torch.dtype, scheme: str) -> tuple[Tensor, Tensor | None]:
    """Rows are a slice of something wider, and of very different size."""
    wide = torch.randn(tokens, inner + 16, device=DEVICE) * torch.logspace(-2, 1, tokens, device=DEVICE)[:, None]
    static = torch.tensor([0.01], device=DEVICE) if scheme == "static" else None
    return wide.to(dtype)[:, :inner], static


def quantised(x: Tensor, static: Tensor | None, block: int) -> tuple[Tensor, Tensor]:
    """Quantise like the kernels. Without a GPU the reference runs, which gives the same result in less time."""
    return (quantize_inputs_triton if ON_GPU else quantize_inputs_reference)(x, static, block=block)


def product(values: Tensor, scales: Tensor, weight: Tensor, scale: Tensor, block: int) -> Tensor:
    wide = dequantize_inputs(values, scales.reshape(1, 1) if scales.dim() == 1 else scales, block=block)
    return wide.double() @ dequantize_weight(weight, scale, block=block).double().T


def assert_near(actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    error = ((actual.double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max()
    assert error < (tolerance or TOLERANCE[actual.dtype]), f"relative error {error:.2e}"


@pytest.mark.parametrize(
    ("shape", "scheme", "dtype"),
    with_dtypes(sampled([(1, 128), (5, 384), (2, 1030), (3, 210), (11, 128)], SCHEMES)),
    ids=str,
)
def test_quantised_inputs_are_those_of_the_reference(
    shape: tuple[int, int], scheme: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By programs of one row, and of several, as there are for many rows."""
    monkeypatch.setattr(fp8_quantize, "_MANY_ROWS", 10)
    x, static = inputs(*shape, dtype, scheme)
    x[0] = 0.0
    values, scales = quantize_inputs_triton(x, static, block=block_of(scheme))
    want, want_scales = quantize_inputs_reference(x, static, block=block_of(scheme))
    torch.testing.assert_close(scales.expand_as(want_scales), want_scales, rtol=1e-6, atol=0.0)
    different = (values.float() != want.float()).float().mean()
    assert different < (1e-3 if ON_GPU else 1e-9)  # a quotient may fall to either side of a rounding boundary
    assert (values[0].float() == 0).all()


@pytest.mark.parametrize(
    ("shape", "config", "scheme", "dtype"), with_dtypes(sampled(FEW_SHAPES, FEW, SCHEMES)), ids=str
)
def test_few_rows_against_float64(
    shape: tuple[int, int, int], config: FewRows, scheme: str, dtype: torch.dtype
) -> None:
    check_product(shape, config, scheme, dtype)


@pytest.mark.parametrize(("shape", "config", "scheme", "dtype"), with_dtypes(MANY_CASES), ids=str)
def test_many_rows_against_float64(
    shape: tuple[int, int, int], config: ManyRows, scheme: str, dtype: torch.dtype
) -> None:
    check_product(shape, config, scheme, dtype)


def check_product(
    shape: tuple[int, int, int], config: FewRows | ManyRows | None, scheme: str, dtype: torch.dtype
) -> None:
    """Into a slice of a poisoned output, which keeps its other columns."""
    tokens, rows, inner = shape
    block = block_of(scheme)
    x, static = inputs(tokens, inner, dtype, scheme)
    weight, scale = fp8_matrix(rows, inner, block)
    bias = torch.randn(rows, device=DEVICE).to(dtype)
    values, scales = quantised(x, static, block)
    wide = torch.full((tokens, rows + 8), float("nan"), dtype=dtype, device=DEVICE)
    fp8_product_triton(x, Fp8Matrix(weight, scale, static, block), bias, wide[:, :rows], config=config)
    assert_near(wide[:, :rows], product(values, scales, weight, scale, block) + bias.double())
    assert wide[:, rows:].isnan().all()


@pytest.mark.parametrize(("tokens", "scheme"), [(9, "block"), (9, "static"), *unless_long([], [(18, "token")])])
def test_parts_add_up_in_order_to_the_same_bits(tokens: int, scheme: str) -> None:
    """A product of few rows is split by rule. A product of many rows has no parts to add."""
    x, static = inputs(tokens, 384, torch.float16, scheme)
    weight, scale = fp8_matrix(72, 384, block_of(scheme))
    options = {"block": block_of(scheme), "backend": Backend.TRITON}
    parts = fp8_linear_parts(x, weight, scale, static, **options)
    assert parts.shape == (3, tokens, 72) and parts.dtype == torch.float32
    whole = fp8_linear(x, weight, scale, None, static, **options)
    assert torch.equal((parts[0] + parts[1] + parts[2]).half(), whole)
    many = x.repeat(8, 1)
    whole = fp8_linear(many, weight, scale, None, static, **options)
    assert torch.equal(fp8_linear_parts(many, weight, scale, static, **options), whole)


@pytest.mark.parametrize(("config", "scheme"), sampled(FEW, SCHEMES)[:: 1 if ON_GPU else 5], ids=str)
def test_gated_product(config: FewRows, scheme: str) -> None:
    check_gated_product(5, 256, config, scheme)


@pytest.mark.parametrize("tokens", [5, 33])
@pytest.mark.parametrize("width", [100, 128])
def test_gated_product_by_block(tokens: int, width: int) -> None:
    """Inputs have few or many rows. The up rows of a program have scales of two blocks or of one block."""
    check_gated_product(tokens, width, FewRows(False, 64, 4, 3, 1), "block")


def check_gated_product(tokens: int, width: int, config: FewRows, scheme: str) -> None:
    block = block_of(scheme)
    x, static = inputs(tokens, 384, torch.float32, scheme)
    weight, scale = fp8_matrix(2 * width, 384, block)
    values, scales = quantised(x, static, block)
    out = torch.empty(tokens, width, device=DEVICE)
    fp8_product_triton(x, Fp8Matrix(weight, scale, static, block), None, out, silu_mul=True, config=config)
    gate, up = product(values, scales, weight, scale, block).chunk(2, dim=-1)
    assert_near(out, torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("config", [*FEW, *MANY] if ON_GPU else [FEW[0], FEW[3], MANY[0]], ids=str)
def test_a_row_does_not_depend_on_the_others_nor_on_the_launch(config: FewRows | ManyRows) -> None:
    x, _ = inputs(7, 384, torch.float32, "block")
    weight, scale = fp8_matrix(128, 384, 128)

    def run(x: Tensor) -> Tensor:
        out = torch.empty(7, 128, device=DEVICE)
        fp8_product_triton(x, Fp8Matrix(weight, scale, None, 128), None, out, config=config)
        return out

    alone = run(x)
    poisoned = x.clone()
    poisoned[3:] = float("nan")
    assert torch.equal(run(poisoned)[:3], alone[:3])
    for _ in range(20 if ON_GPU else 1):
        assert torch.equal(run(x), alone)


@pytest.mark.parametrize(("tokens", "scheme"), sampled([0, 1, 64, 65], SCHEMES)[:: 1 if ON_GPU else 2])
def test_dispatch(tokens: int, scheme: str) -> None:
    """Whatever the number of rows, the operations agree with their references, with plain rows and a bias."""
    block = block_of(scheme)
    x, static = inputs(max(tokens, 1), 256, torch.float32, scheme)
    x = x[:tokens]
    weight, scale = fp8_matrix(256, 256, block)
    plain, bias = torch.randn(24, 256, device=DEVICE) / 16, torch.randn(280, device=DEVICE)
    got = fp8_linear(x, weight, scale, bias, static, plain, block=block, backend=Backend.TRITON)
    want = fp8_linear(x, weight, scale, bias, static, plain, block=block, backend=Backend.TORCH)
    assert got.shape == (tokens, 280)
    near = 5 * TOLERANCE[torch.float32]
    if tokens:
        assert_near(got, want.double(), near)
    got = fp8_linear_silu_mul(x, weight, scale, None, static, block=block, backend=Backend.TRITON)
    want = fp8_linear_silu_mul(x, weight, scale, None, static, block=block, backend=Backend.TORCH)
    if tokens:
        assert_near(got, want.double(), near)


@pytest.mark.parametrize(("tokens", "scheme"), [(16, "block"), (16, "static"), (2, "token")])
def test_few_rows_are_quantised_by_the_product_itself(
    tokens: int, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pass over the inputs of a decode step's linear layers."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a pass of its own")

    monkeypatch.setattr(fp8_few_rows, "quantize_inputs_triton", refuse)
    check_product((tokens, 128, 128), None, scheme, torch.float32)


@pytest.mark.parametrize(
    ("tokens", "scheme", "rule"),
    [(1, "token", "_OWN_WEIGHT"), (2, "token", "_OWN_WEIGHT"), (1, "static", "_OWN_WEIGHT"),
     (8, "static", "_OWN_WEIGHT"), (9, "static", "_OWN_STATIC_WEIGHT")],
)  # fmt: skip
def test_a_pass_quantises_few_rows_for_a_large_weight(
    tokens: int, scheme: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs less than the same work in each of many programs."""
    passes = count_passes(monkeypatch)
    for largest in (128 * 128, 128 * 128 - 1):
        monkeypatch.setattr(fp8_few_rows, rule, largest)
        check_product((tokens, 128, 128), None, scheme, torch.float32)
    assert passes == [tokens]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_pass_quantises_more_rows_than_a_program_has_time_for(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = count_passes(monkeypatch)
    check_product((17, 128, 256), None, scheme, torch.float32)
    assert passes == [17]


def count_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows of the passes to come."""
    passes: list[int] = []

    def count(x: Tensor, *given: Any, **more: Any) -> tuple[Tensor, Tensor]:
        passes.append(x.shape[0])
        return quantize_inputs_triton(x, *given, **more)

    monkeypatch.setattr(fp8_few_rows, "quantize_inputs_triton", count)
    return passes


@pytest.mark.parametrize("tokens", [65, 68])
def test_the_matrix_library_gets_what_it_asks_for(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With scales by block: a multiple of four rows, and the scales of a group side by side. No bias in float32."""

    def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, **given: Any) -> None:
        rows, out = a.shape[0], given["out"]
        assert bias is None, "not with outputs in float32"
        assert rows % 4 == 0 and scale_a.shape == (rows, 3) and scale_a.stride() == (1, rows)
        assert scale_b.shape == (3, 2) and scale_b.t().is_contiguous() and out.shape == (rows, 256)
        out.copy_(product(a, scale_a, b.t(), scale_b.t(), 128))

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    x, _ = inputs(tokens, 384, torch.float32, "block")
    weight, scale = fp8_matrix(256, 384, 128)
    out, bias = outputs(tokens, 300, x), torch.randn(256, device=DEVICE)
    fp8_product_triton(x, Fp8Matrix(weight, scale, None, 128), bias, out[:, :256], config=Library())
    values, scales = quantised(x, None, 128)
    assert_near(out[:, :256], product(values, scales, weight, scale, 128) + bias.double())


@pytest.mark.parametrize(
    ("inner", "rows", "tokens", "block"),
    covering([128, 2048, 4096, 5120, 8192, 28672], [128, 2048, 12288, 57344], [1, 2, 16, 32, 64], [0, 128]),
)
def test_the_rule_for_few_rows_gives_every_program_work(rows: int, inner: int, tokens: int, block: int) -> None:
    config = few_rows_config(rows, inner, tokens, block)
    steps = -(-inner // 128)
    share = -(-steps // config.splits)
    assert (config.splits - 1) * share < steps, "a program without work"
    if config.held:
        assert share * 128 * config.rows <= 32768
    assert config.held == (tokens <= 16 and rows * inner <= 2**21), "large weights stream"
    if config.splits > 1:
        assert -(-rows // config.rows) <= 4096
    if config.stages == 6:
        programs = -(-rows // config.rows) * config.splits
        assert block == 0 and (tokens == 32 or (tokens == 64 and programs <= 264)), "a second wave of programs"
    if not config.held and rows * inner >= 2**25:
        assert -(-rows // config.rows) * config.splits >= 132, "a multiprocessor without work"


def test_tiles_of_many_rows() -> None:
    assert many_rows_config(65, 2048).rows == 64
    assert many_rows_config(8192, 8192) == ManyRows(128, 128, 8, 4)


@pytest.mark.parametrize(
    ("rows", "inner", "block", "library"),
    [
        (256, 1024, 128, True),
        (256, 384, 128, False),
        (200, 1024, 0, False),
        (208, 1040, 0, True),
        (208, 1030, 0, False),
    ],
)
def test_the_matrix_library_takes_what_it_can(
    rows: int, inner: int, block: int, library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that nobody tuned, on an H200; on other devices the kernel for many rows takes all."""
    weight = torch.empty(rows, inner)
    assert isinstance(choose_config(weight, 300, False, block), ManyRows)
    monkeypatch.setattr(fp8_linear_module, "is_hopper", lambda device: True)
    assert isinstance(choose_config(weight, 300, False, block), Library if library else ManyRows)
