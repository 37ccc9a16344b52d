"""Linear layers with FP8 weights: which kernel, or the matrix library, computes a product, and the one for many rows.

Job: ``fp8_linear`` and ``fp8_linear_silu_mul`` on the GPU. Owns: the kernel for many rows, how the matrix library is
called, and for which sizes each runs (``fp8_linear_h200.json``, written by ``benchmarks/kernels/fp8.py --tune``). Does
not know: layers, how inputs are quantised (``fp8/quantize.py``), the kernel for few rows (``fp8_few_rows.py``).
"""

import functools
import json
from pathlib import Path
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from weft.ops.activation.kernels import silu_and_mul_triton
from weft.ops.backend import launches
from weft.ops.fp8 import Fp8Matrix
from weft.ops.fp8.quantize import padded_rows, quantize_inputs_triton
from weft.ops.linear import fp8_linear, fp8_linear_parts, fp8_linear_silu_mul
from weft.ops.linear.few_rows import load_inner
from weft.ops.linear.fp8_few_rows import (
    MAX_HOPPER_TOKENS,
    MAX_TOKENS,
    FewRows,
    HopperRows,
    few_rows_config,
    few_rows_product,
)
from weft.ops.linear.invariant import invariant_linear_triton
from weft.ops.linear.skinny import linear_into
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.gluon import GLUON_IS_KNOWN
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, is_hopper, next_power_of_2
from weft.ops.triton.tile_table import has_table

if GLUON_IS_KNOWN:
    from weft.ops.linear import fp8_few_rows_hopper as hopper
    from weft.ops.triton.hopper import runs_gluon

_PROGRAMS = 264
"""Two for each multiprocessor of an H200."""
TABLE_PATH = Path(__file__).with_name("fp8_linear_h200.json")


class ManyRows(NamedTuple):
    """Rows and columns of a program's tile of the output, warps, stages of the pipeline."""

    rows: int
    columns: int
    warps: int
    stages: int


class Library(NamedTuple):
    """The matrix library (cuBLASLt through torch)."""


Config = FewRows | HopperRows | ManyRows | Library

_MOST_PARTS = 4
"""Largest number of partial sums that the following norm adds. More are added by the product's own programs."""

KINDS: dict[str, type[Config]] = {"few": FewRows, "hopper": HopperRows, "many": ManyRows, "library": Library}
"""Names of the kinds in the table."""


@jit(do_not_specialize=["num_tokens", "stride_group"])
def _many_rows_kernel(
    values, scales, weight, weight_scale, bias, out, num_tokens, width, stride_group, stride_out,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr, STATIC: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BAND: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the output. The tiles of ``BAND`` rows of tiles are neighbours, which find weights in the
    cache."""
    enter(EARLY)
    tile_rows, tile_columns = tl.cdiv(num_tokens, ROWS), tl.cdiv(width, COLUMNS)
    band = tl.program_id(0) // (BAND * tile_columns)
    height = tl.minimum(tile_rows - band * BAND, BAND)
    place = tl.program_id(0) % (BAND * tile_columns)
    token = (band * BAND + place % height) * ROWS + tl.arange(0, ROWS)
    column = place // height * COLUMNS + tl.arange(0, COLUMNS)
    tokens = token % num_tokens  # rows without a token load all of them in turn, not one place of the cache
    rows = tl.minimum(column, width - 1)
    inner = tl.arange(0, 128)
    value_rows = values + tokens.to(tl.int64)[:, None] * DEPTH
    weight_rows = weight + rows.to(tl.int64)[:, None] * DEPTH
    GROUPS: tl.constexpr = (DEPTH + 128 - 1) // 128
    EVEN: tl.constexpr = DEPTH % 128 == 0
    acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in tl.range(0, DEPTH, 128, num_stages=STAGES):
        k = start + inner
        of_tokens = load_inner(value_rows + k[None, :], (k < DEPTH)[None, :], EVEN)
        of_outputs = load_inner(weight_rows + k[None, :], (k < DEPTH)[None, :], EVEN)
        sums = tl.dot(of_tokens, tl.trans(of_outputs))
        if BLOCK:
            of_inputs = tl.load(scales + start // 128 * stride_group + tokens)
            if COLUMNS <= BLOCK:  # one scale for the whole tile
                of_weight = tl.load(weight_scale + (place // height * COLUMNS) // BLOCK * GROUPS + start // 128)
                sums = sums * (of_inputs * of_weight)[:, None]
            else:
                of_weights = tl.load(weight_scale + rows // BLOCK * GROUPS + start // 128)
                sums = sums * of_inputs[:, None] * of_weights[None, :]
        acc += sums
    if not BLOCK:
        of_inputs = tl.load(scales + tokens * 0) if STATIC else tl.load(scales + tokens)
        acc = acc * of_inputs[:, None] * tl.load(weight_scale + rows)[None, :]
    if BIAS:
        acc += tl.load(bias + rows).to(tl.float32)[None, :]
    inside = (token < num_tokens)[:, None] & (column < width)[None, :]
    offsets = token.to(tl.int64)[:, None] * stride_out + column[None, :]
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=inside)


@functools.cache
def load_table() -> dict[tuple[int, int, bool, int], dict[int, Config]]:
    """``(weight rows, inner size, gated, block)`` to what was fastest for up to so many tokens."""
    table: dict[tuple[int, int, bool, int], dict[int, Config]] = {}
    for row in json.loads(TABLE_PATH.read_text())["rows"]:
        key = (row["rows"], row["inner"], row["silu_mul"], row["block"])
        table.setdefault(key, {})[row["tokens"]] = KINDS[row["kind"]](*row["config"])
    return table


def choose_config(weight: Tensor, tokens: int, silu_mul: bool, block: int) -> Config:
    """The configuration for ``weight [N, K]``: measured for this size and at least so many tokens, else by rule."""
    (rows, inner), few = weight.shape, tokens <= MAX_TOKENS
    if has_table(weight.device):
        tuned = load_table().get((rows, inner, silu_mul, block), {})
        if tokens > MAX_HOPPER_TOKENS or not (GLUON_IS_KNOWN and runs_gluon(weight.device)):
            tuned = {limit: config for limit, config in tuned.items() if not isinstance(config, HopperRows)}
        limits = [limit for limit in tuned if (limit <= MAX_TOKENS) == few]
        if limits:
            return tuned[min((limit for limit in limits if limit >= tokens), default=max(limits))]
    if few:
        tokens = next_power_of_2(tokens)
        config = hopper.hopper_config(rows, inner, tokens) if GLUON_IS_KNOWN and runs_gluon(weight.device) else None
        return config or few_rows_config(rows, inner, tokens, block)
    fits = inner % (512 if block else 16) == 0 and rows % 16 == 0
    return Library() if fits and is_hopper(weight.device) else many_rows_config(tokens, rows)


def many_rows_config(tokens: int, rows: int) -> ManyRows:
    """The tile for a number of tokens and of weight rows."""
    if tokens <= 128 or cdiv(tokens, 128) * cdiv(rows, 128) < _PROGRAMS // 2:
        return ManyRows(64, 128, 4, 4)
    return ManyRows(128, 128, 8, 4)


def fp8_product_triton(
    x: Tensor, matrix: Fp8Matrix, bias: Tensor | None, out: Tensor,
    *, silu_mul: bool = False, config: Config | None = None,
) -> None:  # fmt: skip
    """Write the product of ``x [T, K]`` into ``out [T, N]``, which may be a slice of ``outputs`` (``[T, N / 2]`` with
    ``silu_mul``, up to 64 tokens).

    Args:
        config: overrides the choice (tests and measurements).
    """
    if config is None:
        config = choose_config(matrix.weight, x.shape[0], silu_mul, matrix.block)
    if isinstance(config, FewRows):
        few_rows_product(x, matrix, bias, out, config, silu_mul=silu_mul)
    elif isinstance(config, HopperRows):
        hopper.few_rows_hopper_product(x, matrix, bias, out, config, silu_mul=silu_mul)
    else:
        assert not silu_mul
        values, scales = quantize_inputs_triton(x, matrix.input_scale, block=matrix.block)
        quantized_product(values, scales, matrix, bias, out, config)


def quantized_product(
    values: Tensor, scales: Tensor, matrix: Fp8Matrix, bias: Tensor | None, out: Tensor, config: ManyRows | Library
) -> None:
    """Write the product of what ``quantize_inputs_triton`` returned into ``out [T, N]``, as ``fp8_product_triton``."""
    if isinstance(config, Library):
        _library_product(values, scales, matrix, bias, out)
        return
    num_tokens, (rows, inner) = values.shape[0], matrix.weight.shape
    assert matrix.weight.is_contiguous() and matrix.scale.is_contiguous() and out.stride(1) == 1
    _many_rows_kernel[(cdiv(num_tokens, config.rows) * cdiv(rows, config.columns),)](
        values, scales, matrix.weight, matrix.scale, out if bias is None else bias, out, num_tokens, rows,
        scales.stride(-1), out.stride(0),
        DEPTH=inner, BLOCK=matrix.block, STATIC=scales.dim() == 1, BIAS=bias is not None, ROWS=config.rows,
        COLUMNS=config.columns, BAND=8, STAGES=config.stages, num_warps=config.warps, **early_launch(values.device),
    )  # fmt: skip


def _library_product(values: Tensor, scales: Tensor, matrix: Fp8Matrix, bias: Tensor | None, out: Tensor) -> None:
    """Compute a product with the matrix library.

    With scales by block the library needs a multiple of four rows. It reads and writes arbitrary memory in the rows
    beyond, which nobody uses. The library adds no bias to float32.
    """
    if matrix.block:
        height = padded_rows(values.shape[0])
        values, scales, out = (t.as_strided((height, t.shape[1]), t.stride()) for t in (values, scales, out))
    else:
        scales = scales.expand(values.shape[0], 1).contiguous()
    given, weight = None if out.dtype == torch.float32 else bias, matrix.weight.t()
    torch._scaled_mm(values, weight, scales, matrix.scale.t(), given, out_dtype=out.dtype, out=out)
    if given is None and bias is not None:
        out += bias


_FIXED = ManyRows(64, 64, 4, 4)
"""The kernel and the tile for any number of rows where a row's sum must not follow it."""


def outputs(num_rows: int, width: int, like: Tensor) -> Tensor:
    """``[num_rows, width]`` for a product, with room behind it for the rows that the matrix library adds."""
    return torch.empty((padded_rows(num_rows), width), dtype=like.dtype, device=like.device)[:num_rows]


@launches(fp8_linear, invariant={"fixed": True})
def fp8_linear_triton(
    x, weight, weight_scale, bias, input_scale, plain_weight, *, block, fixed: bool = False
) -> Tensor:  # fmt: skip
    """``fixed``: one kernel and tile for any number of rows."""
    flat, rows = x.flatten(0, -2), weight.shape[0]
    total = rows + (0 if plain_weight is None else plain_weight.shape[0])
    out = outputs(flat.shape[0], total, x)
    if flat.shape[0]:
        matrix = Fp8Matrix(weight, weight_scale, input_scale, block)
        config = _FIXED if fixed else choose_config(weight, flat.shape[0], False, block)
        if plain_weight is None:
            fp8_product_triton(flat, matrix, bias, out, config=config)
        elif isinstance(config, HopperRows) and x.element_size() == 2:
            hopper.few_rows_hopper_product(flat, matrix, bias, out, config, plain_weight=plain_weight)
        else:
            first, rest = (None, None) if bias is None else (bias[:rows], bias[rows:])
            fp8_product_triton(flat, matrix, first, out[:, :rows], config=config)
            if fixed:
                out[:, rows:] = invariant_linear_triton(flat, plain_weight, rest)
            else:
                linear_into(flat, plain_weight, rest, out[:, rows:])
    return out.view(*x.shape[:-1], total)


@launches(fp8_linear_parts)
def fp8_linear_parts_triton(x, weight, weight_scale, input_scale, *, block) -> Tensor:
    config = choose_config(weight, x.shape[0], False, block)
    if not x.shape[0] or not isinstance(config, FewRows) or not 1 < config.splits <= _MOST_PARTS:
        return fp8_linear_triton(x, weight, weight_scale, None, input_scale, block=block)
    parts = torch.empty((config.splits, x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    few_rows_product(x, Fp8Matrix(weight, weight_scale, input_scale, block), None, parts, config, silu_mul=False)
    return parts


@launches(fp8_linear_silu_mul)
def fp8_linear_silu_mul_triton(x, weight, weight_scale, bias, input_scale, *, block) -> Tensor:
    flat, rows = x.flatten(0, -2), weight.shape[0]
    if flat.shape[0] > MAX_TOKENS:
        return silu_and_mul_triton(fp8_linear_triton(x, weight, weight_scale, bias, input_scale, block=block))
    out = torch.empty((flat.shape[0], rows // 2), dtype=x.dtype, device=x.device)
    if flat.shape[0]:
        fp8_product_triton(flat, Fp8Matrix(weight, weight_scale, input_scale, block), bias, out, silu_mul=True)
    return out.view(*x.shape[:-1], rows // 2)
