"""Linear layers with coded weights (``weft.ops.codes``), from one row to thousands.

Job: ``coded_linear`` and its variants on the GPU. Owns: the kernel, the choice of its tile
(``coded_linear_h200.json``, written by ``benchmarks/kernels/coded.py --tune``), and where the matrix library runs on
weights that were widened piece by piece. Does not know: layers, how codes become numbers (``codes/product.py``).
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
from weft.ops.codes import CodedMatrix
from weft.ops.codes.product import coded_product, fixed_of, operands_of, request_words
from weft.ops.codes.widen import widened_parts
from weft.ops.linear import coded_linear, coded_linear_parts, coded_linear_silu_mul
from weft.ops.linear.few_rows import CodedRows, add_splits, rows_of_block, workspace
from weft.ops.linear.skinny import linear_into
from weft.ops.triton.early_launch import early_launch, release, wait
from weft.ops.triton.gluon import GLUON_IS_KNOWN
from weft.ops.triton.hopper import runs_gluon
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2
from weft.ops.triton.tile_table import has_table

if GLUON_IS_KNOWN:
    from weft.ops.linear import coded_few_rows_hopper as hopper

MAX_TOKENS = 128
"""Most rows of a gated product, and of one that is split."""
_MOST_PARTS = 4
"""Largest number of partial sums that the following norm adds."""
_PROGRAMS = 528
"""Four for each multiprocessor of an H200."""
_LOOPS = {8: (128, 4, 3), 16: (128, 4, 3), 32: (64, 4, 4), 64: (64, 4, 3), 128: (128, 8, 3)}
"""Weight rows, warps and stages, by lanes of tokens."""
_WIDENED_TOKENS = 512
"""Rows from which weights are widened for the matrix library, by rule."""
TABLE_PATH = Path(__file__).with_name("coded_linear_h200.json")


class CodedTile(NamedTuple):
    """How a product is computed.

    Attributes:
        rows, tokens: weight rows and rows of inputs of a program (of a gated product half gate rows, half up rows).
        warps, stages: per program; stages of the pipeline.
        splits: programs that share the inner dimension.
    """

    rows: int
    tokens: int
    warps: int
    stages: int
    splits: int = 1


class Widened(NamedTuple):
    """The matrix library multiplies widened weights (``codes/widen.py``)."""


Config = CodedTile | Widened | CodedRows


@jit(do_not_specialize=["num_tokens"])
def _coded_linear_kernel(
    x, words, scales, zeros, row_scale, bias, out, partial, arrivals, num_tokens, stride_x, stride_out, stride_part,
    chunks, FIXED: tl.constexpr, SPLITS: tl.constexpr, ADDED: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Block ``program_id(0)`` of outputs, share ``program_id(1)`` of the inner dimension, block ``program_id(2)`` of
    tokens."""
    release(EARLY)
    ROWS: tl.constexpr = FIXED.rows
    TOKENS: tl.constexpr = FIXED.tokens
    WIDTH: tl.constexpr = FIXED.width // 2 if GATED else FIXED.width
    block, split, token = tl.program_id(0), tl.program_id(1), tl.program_id(2) * TOKENS
    rows = rows_of_block(block, WIDTH, ROWS, GATED)
    tokens = token + tl.arange(0, TOKENS)
    inside = tokens < num_tokens
    share = tl.cdiv(chunks, SPLITS)
    first = split * share
    x_rows = x + tokens.to(tl.int64) * stride_x
    last = tl.minimum(first + share, chunks)
    if EARLY and first < last:
        request_words(words, rows, first, last, FIXED)
    wait(EARLY)
    acc = coded_product((words, scales, zeros, row_scale), 0, rows, x_rows, inside, first, last, FIXED)
    out += split * stride_part + token.to(tl.int64) * stride_out
    add_splits(
        acc, bias, out, partial, arrivals, block, block, split, num_tokens - token, WIDTH, stride_out,
        ADDED, TOKENS, ROWS, GATED, BIAS,
    )  # fmt: skip


@functools.cache
def load_table() -> dict[tuple[int, int, bool], dict[int, Config]]:
    """``(weight rows, inner size, gated)`` to what was fastest for up to so many tokens."""
    table: dict[tuple[int, int, bool], dict[int, Config]] = {}
    for row in json.loads(TABLE_PATH.read_text())["rows"]:
        config = CodedTile(*row["tile"]) if row["tile"] else Widened()
        table.setdefault((row["rows"], row["inner"], row["silu_mul"]), {})[row["tokens"]] = config
    return table


def choose_config(matrix: CodedMatrix, num_tokens: int, silu_mul: bool) -> Config:
    """The configuration for a number of tokens: measured for this size and at least so many tokens, else by rule."""
    rows = matrix.words.shape[1]
    if GLUON_IS_KNOWN and num_tokens <= 8 and runs_gluon(matrix.words.device) and hopper.takes(matrix):
        few = few_rows_by_rule(rows, matrix.columns)
        if few is not None:
            return few
    tuned = load_table().get((rows, matrix.columns, silu_mul), {}) if has_table(matrix.words.device) else {}
    limits = [limit for limit in tuned if limit >= num_tokens]
    if limits:
        return tuned[min(limits)]
    return Widened() if num_tokens >= _WIDENED_TOKENS else tile_by_rule(rows, matrix.columns, num_tokens)


def few_rows_by_rule(rows: int, columns: int) -> CodedRows | None:
    """The shape of the kernel for Hopper; None where the other kernel is faster."""
    if columns > 4096:
        return None
    return CodedRows(32, 4, 3) if rows * columns >= 1 << 24 else CodedRows(16, 4, 4)


def parts_by_rule(columns: int) -> int:
    """How many programs share the inner dimension of a product that is left in parts."""
    return 2 if columns > 2048 else 1


def tile_by_rule(rows: int, columns: int, num_tokens: int) -> CodedTile:
    """The tile for a size that was not measured: the fastest shape of two large weights, split for four programs of
    each multiprocessor."""
    if num_tokens > MAX_TOKENS:
        return CodedTile(128, 128, 8, 3)
    tokens = max(8, next_power_of_2(num_tokens))
    height, warps, stages = _LOOPS[tokens]
    splits = max(1, min(round(_PROGRAMS / cdiv(rows, height)), columns // 384, 16))
    return CodedTile(height, tokens, warps, stages, splits)


def coded_product_triton(
    x: Tensor, matrix: CodedMatrix, bias: Tensor | None, out: Tensor, tile: CodedTile, *, silu_mul: bool = False
) -> None:
    """Write the product of ``x [T, K]`` into ``out [T, N]`` (``[T, N / 2]`` with ``silu_mul``), or splits' sums into
    ``[splits, T, N]`` float32."""
    num_tokens, rows = x.shape[0], matrix.words.shape[1]
    assert x.stride(1) == 1 and out.stride(-1) == 1
    blocks = cdiv(rows // 2, tile.rows // 2) if silu_mul else cdiv(rows, tile.rows)
    fixed = fixed_of(matrix, x, rows=tile.rows, tokens=tile.tokens, stages=tile.stages)
    added = tile.splits if out.dim() == 2 else 1
    assert added == 1 or num_tokens <= tile.tokens
    partial, arrivals = workspace(blocks, added, tile.rows, tile.tokens, out)
    _coded_linear_kernel[(blocks, tile.splits, cdiv(num_tokens, tile.tokens))](
        x, *operands_of(matrix), out if bias is None else bias, out, partial, arrivals, num_tokens, x.stride(0),
        out.stride(-2), out.stride(0) if out.dim() == 3 else 0, matrix.words.shape[0],
        FIXED=fixed, SPLITS=tile.splits, ADDED=added, GATED=silu_mul, BIAS=bias is not None, num_warps=tile.warps,
        **early_launch(x.device),
    )  # fmt: skip


def _widened_product(x: Tensor, matrix: CodedMatrix, bias: Tensor | None, out: Tensor) -> None:
    for rows, weight in widened_parts(matrix, x):
        if bias is None:
            torch.mm(x, weight.t(), out=out[:, rows])
        else:
            torch.addmm(bias[rows], x, weight.t(), out=out[:, rows])


@launches(coded_linear)
def coded_linear_triton(x, matrix, bias, plain_weight, *, config: Config | None = None) -> Tensor:
    """``coded_linear`` of ``weft/ops/linear``. ``config``: overrides the choice (tests and measurements)."""
    flat, rows = x.flatten(0, -2), matrix.words.shape[1]
    total = rows + (0 if plain_weight is None else plain_weight.shape[0])
    out = torch.empty((flat.shape[0], total), dtype=x.dtype, device=x.device)
    if not flat.shape[0]:
        return out.view(*x.shape[:-1], total)
    config = choose_config(matrix, flat.shape[0], False) if config is None else config
    if isinstance(config, CodedRows):
        hopper.few_rows_hopper_product(flat, matrix, bias, out, config, plain_weight=plain_weight)
        return out.view(*x.shape[:-1], total)
    first, rest = (None, None) if bias is None else (bias[:rows], bias[rows:])
    if isinstance(config, Widened):
        _widened_product(flat, matrix, first, out[:, :rows])
    else:
        coded_product_triton(flat, matrix, first, out[:, :rows], config)
    if plain_weight is not None:
        linear_into(flat, plain_weight, rest, out[:, rows:])
    return out.view(*x.shape[:-1], total)


@launches(coded_linear_parts)
def coded_linear_parts_triton(x, matrix) -> Tensor:
    """``coded_linear_parts`` of ``weft/ops/linear``."""
    tile = choose_config(matrix, x.shape[0], False)
    if isinstance(tile, CodedRows):
        tile = tile._replace(splits=parts_by_rule(matrix.columns))
    if not x.shape[0] or isinstance(tile, Widened) or not 1 < tile.splits <= _MOST_PARTS:
        return coded_linear_triton(x, matrix, None, None)
    parts = torch.empty((tile.splits, x.shape[0], matrix.words.shape[1]), dtype=torch.float32, device=x.device)
    if isinstance(tile, CodedRows):
        hopper.few_rows_hopper_product(x, matrix, None, parts, tile)
    else:
        coded_product_triton(x, matrix, None, parts, tile)
    return parts


@launches(coded_linear_silu_mul)
def coded_linear_silu_mul_triton(x, matrix, bias, *, config: Config | None = None) -> Tensor:
    """``coded_linear_silu_mul`` of ``weft/ops/linear``. ``config``: overrides the choice (tests and measurements)."""
    flat, rows = x.flatten(0, -2), matrix.words.shape[1]
    config = choose_config(matrix, flat.shape[0], True) if config is None else config
    if flat.shape[0] > MAX_TOKENS or isinstance(config, Widened):
        return silu_and_mul_triton(coded_linear_triton(x, matrix, bias, None))
    out = torch.empty((flat.shape[0], rows // 2), dtype=x.dtype, device=x.device)
    if not flat.shape[0]:
        pass
    elif isinstance(config, CodedRows):
        hopper.few_rows_hopper_product(flat, matrix, bias, out, config, silu_mul=True)
    else:
        coded_product_triton(flat, matrix, bias, out, config, silu_mul=True)
    return out.view(*x.shape[:-1], rows // 2)
