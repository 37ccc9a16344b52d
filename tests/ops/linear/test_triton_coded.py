"""Kernels of coded weights against float64 of the dequantised weights, on the GPU or under the interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.ops.interpreter import DEVICE
from tests.whole import covering, unless_long
from weft.ops.backend import Backend
from weft.ops.codes import CodedMatrix, Packing, dequantize_codes, pack_words
from weft.ops.linear import coded_linear, coded_linear_parts, coded_linear_silu_mul
from weft.ops.linear.coded import (
    CodedTile,
    Widened,
    choose_config,
    coded_linear_parts_triton,
    coded_linear_silu_mul_triton,
    coded_linear_triton,
    tile_by_rule,
)

ON_GPU = DEVICE == "cuda"
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU
EPSILON = {torch.float32: 2.0**-22, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Relative error of one rounding; float32 sums are split in three parts on a GPU."""

FORMS = {
    "int4 g128": (4, False, 128, False), "int4 g64 zeros": (4, False, 64, True), "int4 g32": (4, False, 32, False),
    "int4 rows zeros": (4, False, 0, True), "int8 g128 zeros": (8, False, 128, True), "int8 g32": (8, False, 32, False),
    "int8 rows": (8, False, 0, False), "nvfp4": (4, True, 16, False), "mxfp4": (4, True, 32, False),
    "mxfp8": (8, True, 32, False),
}  # fmt: skip
"""Bits, floats, group, zeros."""
SHAPES = [(1, 64, 128), (3, 200, 384), (17, 72, 160), (33, 136, 256)]
"""Tokens, weight rows, inner size."""
TILES = [
    CodedTile(128, 16, 4, 4), CodedTile(32, 8, 1, 4), CodedTile(32, 64, 4, 3), CodedTile(64, 128, 4, 3),
    CodedTile(128, 128, 8, 3),
]  # fmt: skip


def coded_matrix(
    form: str, rows: int, columns: int, *lead: int, scale_dtype: torch.dtype = torch.float32
) -> CodedMatrix:
    """Random codes and, for every row and group, another scale and zero. Codes beyond the columns are arbitrary.

    Weights of 8 bits are as large as those of 4, because hidden values of experts would overflow float16 otherwise.
    """
    bits, is_float, group, has_zeros = FORMS[form]
    group = group if not group or columns % group == 0 else 32
    groups = columns // group if group else 1
    shape = Packing.of(bits, group).words_shape(rows, columns)
    words = torch.randint(-(2**31), 2**31 - 1, (*lead, *shape), dtype=torch.int32, device=DEVICE)
    if form == "mxfp8":
        octets = words.view(torch.uint8)
        octets[octets & 0x7F == 0x7F] ^= 1  # no NaN
    scales = (torch.rand(*lead, groups, rows, device=DEVICE) + 0.1) * columns**-0.5 * 2.0 ** (4 - bits)
    scales *= torch.where(torch.rand_like(scales) < 0.3, -1.0, 1.0)
    row_scale = None
    if form == "nvfp4":
        scales = torch.randint(0, 0x7F, scales.shape, dtype=torch.uint8, device=DEVICE)
        row_scale = (torch.rand(*lead, rows, device=DEVICE) + 0.5) * 0.01 * columns**-0.5
    elif is_float:
        scales = torch.randint(118, 126, scales.shape, dtype=torch.uint8, device=DEVICE) - (6 if bits == 8 else 0)
    else:
        scales = scales.to(scale_dtype)
    zeros = None
    if has_zeros:
        zeros = torch.randint(0, 2**bits, scales.shape, dtype=torch.uint8, device=DEVICE)
    return CodedMatrix(words, scales, zeros, row_scale, bits, is_float, group, columns)


def inputs(tokens: int, inner: int, dtype: torch.dtype) -> Tensor:
    """Rows that are a slice of something wider, whose other values are NaN."""
    wide = torch.full((tokens, inner + 16), torch.nan, device=DEVICE)
    wide[:, :inner] = torch.randn(tokens, inner, device=DEVICE)
    return wide.to(dtype)[:, :inner]


def check(got: Tensor, x: Tensor, weight: Tensor, want: Tensor) -> None:
    """Each output is within two roundings of each product, and one of the result, of float64."""
    epsilon = EPSILON[x.dtype]
    bound = x.double().abs() @ weight.double().abs().t() * (2 * epsilon) + want.abs() * epsilon + 1e-12
    error = (got.double() - want).abs()
    assert got.dtype == x.dtype and error.isfinite().all() and (error <= bound).all(), (error / bound).max()


def close(got: Tensor, want: Tensor) -> bool:
    """Equal but for float32 sums in another order."""
    return bool((got - want).norm() <= 1e-5 * want.norm())


CASES = list(itertools.product(FORMS, TILES)) if ON_GPU else [
    (form, TILES[i % len(TILES)]) for i, form in enumerate(FORMS)
] + [(form, TILES[(i + 2) % len(TILES)]) for i, form in enumerate(FORMS)]  # fmt: skip


@pytest.mark.parametrize(("case", "dtype"), covering(unless_long(CASES[: len(FORMS)], CASES), DTYPES, of=1))
def test_products(case: tuple[str, CodedTile], dtype: torch.dtype) -> None:
    form, tile = case
    shapes = SHAPES if ON_GPU else [SHAPES[len(form) % 4]]
    for tokens, rows, inner in shapes:
        matrix, x = coded_matrix(form, rows, inner, scale_dtype=dtype), inputs(tokens, inner, dtype)
        weight = dequantize_codes(matrix)
        want = x.double() @ weight.double().t()
        check(coded_linear_triton(x, matrix, config=tile), x, weight, want)


@pytest.mark.parametrize("splits", [2, 3, 5])
def test_splits_are_added(splits: int) -> None:
    """Also where the chunks do not divide, and the last splits have none."""
    for inner in (384, 512):
        matrix, x = coded_matrix("int4 g64 zeros", 72, inner), inputs(5, inner, torch.float32)
        weight, bias = dequantize_codes(matrix), torch.randn(72, device=DEVICE)
        want = x.double() @ weight.double().t() + bias.double()
        for _ in range(2):  # the counters are zero again
            check(coded_linear_triton(x, matrix, bias, config=CodedTile(32, 16, 4, 2, splits)), x, weight, want)


def test_partial_sums() -> None:
    """Few rows of a deep matrix are left in parts, which add up."""
    matrix, x = coded_matrix("int4 g128", 64, 1536), inputs(2, 1536, torch.float32)
    config = choose_config(matrix, 2, False)
    assert isinstance(config, CodedTile) and 1 < config.splits <= 4
    parts = coded_linear_parts_triton(x, matrix)
    want = coded_linear_parts(x, matrix, backend=Backend.TORCH)
    assert parts.shape == (4, 2, 64) and parts.dtype == torch.float32
    assert close(parts.sum(0), want)


@pytest.mark.parametrize("tokens", [1, 5, 40, 70])
def test_gated_products(tokens: int) -> None:
    matrix, x = coded_matrix("int4 g32", 2 * 72, 160), inputs(tokens, 160, torch.float32)
    bias = torch.randn(2 * 72, device=DEVICE)
    want = coded_linear_silu_mul(x, matrix, bias, backend=Backend.TORCH)
    assert close(coded_linear_silu_mul_triton(x, matrix, bias), want)


@pytest.mark.parametrize("tokens", [1, 33])
def test_unquantised_last_rows(tokens: int) -> None:
    matrix, x = coded_matrix("nvfp4", 64, 128), inputs(tokens, 128, torch.float32)
    plain, bias = torch.randn(16, 128, device=DEVICE), torch.randn(80, device=DEVICE)
    want = coded_linear(x, matrix, bias, plain, backend=Backend.TORCH)
    assert close(coded_linear_triton(x, matrix, bias, plain), want)


@pytest.mark.parametrize("form", FORMS)
def test_widened_weights(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts, the last of which is shorter; with a bias and without."""
    monkeypatch.setattr("weft.ops.codes.widen._PART_BYTES", 1)
    matrix, x = coded_matrix(form, 200, 160), inputs(5, 160, torch.float32)
    weight, bias = dequantize_codes(matrix), torch.randn(200, device=DEVICE)
    want = x.double() @ weight.double().t()
    check(coded_linear_triton(x, matrix, config=Widened()), x, weight, want)
    check(coded_linear_triton(x, matrix, bias, config=Widened()), x, weight, want + bias)
    gated = coded_linear_silu_mul_triton(x, matrix, config=Widened())
    assert close(gated, coded_linear_silu_mul.reference(x, matrix))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", [CodedTile(32, 8, 1, 4), CodedTile(64, 128, 4, 3), Widened()], ids=str)
def test_every_code_and_exponent_of_mxfp8(config: CodedTile | Widened, dtype: torch.dtype) -> None:
    """Row r has the code r alone, once in each group, between zeros. The codes 0x7f and 0xff are NaN."""
    codes = torch.zeros(256, 96, dtype=torch.uint8)
    codes[:, 17], codes[:, 40], codes[:, 95] = (torch.arange(256).to(torch.uint8) for _ in range(3))
    exponents = torch.tensor([127, 130, 120], dtype=torch.uint8)[:, None].repeat(1, 256)
    words, x = pack_words(codes, Packing.of(8, 32)).contiguous(), inputs(3, 96, dtype)
    matrix = CodedMatrix(words.to(DEVICE), exponents.to(DEVICE), None, None, 8, True, 32, 96)
    weight = codes.view(torch.float8_e4m3fn).double() * torch.ldexp(
        torch.ones(3, 256), exponents.int() - 127
    ).double().t().repeat_interleave(32, 1)
    assert torch.equal(dequantize_codes(matrix).double().cpu().nan_to_num(9e9), weight.nan_to_num(9e9))
    want = x.double().cpu() @ weight.t()
    got = coded_linear_triton(x, matrix, config=config).cpu()
    assert torch.equal(got.isnan(), want.isnan()) and want.isnan().any(0).nonzero().flatten().tolist() == [0x7F, 0xFF]
    finite = ~want[0].isnan()
    check(got[:, finite], x.cpu(), weight[finite], want[:, finite])


@pytest.mark.parametrize("config", [CodedTile(32, 8, 1, 4), Widened()], ids=str)
def test_extreme_exponents_of_mxfp8(config: CodedTile | Widened) -> None:
    """Powers of two from 2^-127 to 2^127 are exact, and 255 is NaN."""
    codes = torch.full((256, 64), 0x38, dtype=torch.uint8)  # 1.0
    exponents = torch.arange(256).to(torch.uint8).repeat(2, 1)
    words = pack_words(codes, Packing.of(8, 32)).contiguous()
    matrix = CodedMatrix(words.to(DEVICE), exponents.to(DEVICE), None, None, 8, True, 32, 64)
    x = torch.full((1, 64), 2.0**-6, device=DEVICE)
    want = torch.ldexp(torch.ones(255, dtype=torch.float64), torch.arange(255) - 127)
    for got in (coded_linear_triton(x, matrix, config=config), coded_linear(x, matrix, backend=Backend.TORCH)):
        assert torch.equal(got[0, :255].double().cpu(), want) and got[0, 255].isnan()


def test_no_rows() -> None:
    matrix = coded_matrix("int4 g128", 64, 128)
    assert coded_linear_triton(torch.empty(0, 128, device=DEVICE), matrix).shape == (0, 64)
    assert coded_linear_silu_mul_triton(torch.empty(0, 128, device=DEVICE), matrix).shape == (0, 32)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    matrix, x = coded_matrix("mxfp4", 64, 256), inputs(6, 256, torch.float32)
    tile = CodedTile(64, 16, 4, 2)
    whole = coded_linear_triton(x, matrix, config=tile)
    x[3:] = torch.nan
    assert torch.equal(coded_linear_triton(x, matrix, config=tile)[:3], whole[:3])


def test_tiles_by_rule_cover_all_numbers_of_rows() -> None:
    for tokens in (1, 2, 16, 17, 64, 65, 128, 129, 2048, 8192):
        for rows, columns in ((64, 128), (5120, 17408), (34816, 5120), (1024, 2048)):
            tile = tile_by_rule(rows, columns, tokens)
            assert tile.splits == 1 or tile.tokens >= tokens
