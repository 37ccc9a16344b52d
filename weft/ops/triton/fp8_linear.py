"""Linear layers with FP8 weights: one kernel for a few rows, through which the weight streams once, one for many.

Job: ``fp8_linear`` and ``fp8_linear_silu_mul`` on the GPU. Owns: both kernels and for which sizes they run. Does not
know: layers, how inputs are quantised (``fp8_quantize.py``).

Tensor cores on Hopper add e4m3 products up with fewer bits than float32 has. So both kernels multiply 128 inputs at a
time and add these sums up in float32, where scales by block have their place anyway.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.triton.activation import silu_and_mul_triton
from weft.ops.triton.early_launch import early_launch, enter, release, wait
from weft.ops.triton.fp8_quantize import quantize_inputs_triton
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2
from weft.ops.triton.skinny_linear import linear_into

MAX_TOKENS = 64
"""The kernel for few rows is for at most this many."""
_HELD_BYTES = 32768
"""Weights that a program of four warps holds in registers before they are widened."""
_PROGRAMS = 264
"""Two for each multiprocessor of an H200."""
_MAX_BLOCKS = 4096
_TABLE_PATH = Path(__file__).with_name("fp8_linear_h200.json")
_TABLE_CAPABILITY = (9, 0)


class FewRows(NamedTuple):
    """How a product with few rows is computed.

    Attributes:
        held: the weight is loaded into registers at once, and as float16 multiplied; else it streams through a pipeline
            and is multiplied as it is.
        rows: weight rows per program (for a gated product half of them gate rows, half up rows).
        warps, stages: per program; stages of the pipeline.
        splits: programs that share the inner dimension.
    """

    held: bool
    rows: int
    warps: int
    stages: int
    splits: int


class ManyRows(NamedTuple):
    """Rows and columns of a program's tile of the output, warps, stages of the pipeline."""

    rows: int
    columns: int
    warps: int
    stages: int


class Library(NamedTuple):
    """The matrix library, for scales by row. It refused most sizes with scales by block (torch 2.11 on an H200)."""


KINDS: dict[str, type[FewRows | ManyRows | Library]] = {"few": FewRows, "many": ManyRows, "library": Library}
"""Names of the kinds in the table."""


@triton.jit
def _weight_rows(block, width, ROWS: tl.constexpr, GATED: tl.constexpr):
    """The weight rows of a block, gate and up rows taking turns. Rows beyond the end repeat the last one."""
    lanes = tl.arange(0, ROWS)
    if GATED:
        rows = tl.minimum(block * (ROWS // 2) + lanes // 2, width - 1) + lanes % 2 * width
    else:
        rows = tl.minimum(block * ROWS + lanes, width - 1)
    return rows


@triton.jit
def _weight_tile(weight_rows, k, DEPTH: tl.constexpr, EVEN: tl.constexpr):
    """``[ROWS, 128]``; zeros beyond the end."""
    if EVEN:
        tile = tl.load(weight_rows + k[None, :])
    else:
        tile = tl.load(weight_rows + k[None, :], mask=(k < DEPTH)[None, :], other=0.0)
    return tile


@triton.jit
def _inputs_tile(value_rows, k, DEPTH: tl.constexpr, EVEN: tl.constexpr):
    """``[128, TOKENS]``; zeros beyond the end."""
    if EVEN:
        tile = tl.load(value_rows + k[:, None])
    else:
        tile = tl.load(value_rows + k[:, None], mask=(k < DEPTH)[:, None], other=0.0)
    return tile


@triton.jit
def _step_scale(weight_scale, scale_rows, scales, tokens, step, DEPTH: tl.constexpr):
    """``[ROWS, TOKENS]``: what the sums of 128 products are multiplied by, under scales by block."""
    GROUPS: tl.constexpr = (DEPTH + 128 - 1) // 128
    of_weight = tl.load(weight_scale + scale_rows * GROUPS + step)
    of_inputs = tl.load(scales + tokens * GROUPS + step)
    return of_weight[:, None] * of_inputs[None, :]


@jit(do_not_specialize=["num_tokens"])
def _few_rows_kernel(
    values, scales, weight, weight_scale, bias, out, partial, arrivals, num_tokens, width, stride_out,
    DEPTH: tl.constexpr, SPAN: tl.constexpr, SPLITS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, STATIC: tl.constexpr, HELD: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Block ``program_id(0)`` of outputs, share ``program_id(1)`` of the inner dimension."""
    block = tl.program_id(0)
    split = tl.program_id(1)
    first = split * SPAN
    rows = _weight_rows(block, width, ROWS, GATED)
    weight_rows = weight + rows.to(tl.int64)[:, None] * DEPTH
    inner = tl.arange(0, 128)
    release(EARLY)
    tiles = ()
    if HELD:
        for step in tl.static_range(SPAN // 128):
            tile = _weight_tile(weight_rows, first + step * 128 + inner, DEPTH, EVEN)
            tiles = tiles + (tile,)  # type: ignore[assignment]  # noqa: RUF005 (kernels cannot unpack)
    wait(EARLY)
    tokens = tl.minimum(tl.arange(0, TOKENS), num_tokens - 1)
    value_rows = values + tokens.to(tl.int64)[None, :] * DEPTH
    scale_rows = rows // 128
    acc = tl.zeros([ROWS, TOKENS], dtype=tl.float32)
    if HELD:
        for step in tl.static_range(SPAN // 128):
            k = first + step * 128 + inner
            sums = tl.dot(tiles[step].to(tl.float16), _inputs_tile(value_rows, k, DEPTH, EVEN).to(tl.float16))
            if BLOCK:
                at = tl.minimum(split * (SPAN // 128) + step, (DEPTH - 1) // 128)  # beyond the end sums are zero
                sums = sums * _step_scale(weight_scale, scale_rows, scales, tokens, at, DEPTH)
            acc += sums
    else:
        for start in tl.range(0, SPAN, 128, num_stages=STAGES):
            k = first + start + inner
            sums = tl.dot(_weight_tile(weight_rows, k, DEPTH, EVEN), _inputs_tile(value_rows, k, DEPTH, EVEN))
            if BLOCK:
                at = tl.minimum((first + start) // 128, (DEPTH - 1) // 128)
                sums = sums * _step_scale(weight_scale, scale_rows, scales, tokens, at, DEPTH)
            acc += sums
    if not BLOCK:
        of_inputs = tl.load(scales + tokens * 0) if STATIC else tl.load(scales + tokens)
        acc = acc * tl.load(weight_scale + rows)[:, None] * of_inputs[None, :]
    if SPLITS == 1:
        _store_few_rows(acc, bias, out, block, num_tokens, width, stride_out, TOKENS, ROWS, GATED, BIAS)
    else:
        tile = tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        parts = partial + block * (SPLITS * ROWS * TOKENS)
        tl.store(parts + split * (ROWS * TOKENS) + tile, acc)
        tl.debug_barrier()  # all of this program's sums are written before it is counted
        if tl.atomic_add(arrivals + block, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(arrivals + block, 0)
            total = tl.zeros([ROWS, TOKENS], dtype=tl.float32)
            for part in range(SPLITS):
                total += tl.load(parts + part * (ROWS * TOKENS) + tile, cache_modifier=".cg")
            _store_few_rows(total, bias, out, block, num_tokens, width, stride_out, TOKENS, ROWS, GATED, BIAS)


@triton.jit
def _store_few_rows(
    acc, bias, out, block, num_tokens, width, stride_out,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Bias and gate, and one rounding."""
    if BIAS:
        acc += tl.load(bias + _weight_rows(block, width, ROWS, GATED)).to(tl.float32)[:, None]
    OUTPUTS: tl.constexpr = ROWS // 2 if GATED else ROWS
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, [OUTPUTS, 2, TOKENS]), [0, 2, 1]))
        acc = gate / (1.0 + tl.exp(-gate)) * up
    columns = block * OUTPUTS + tl.arange(0, OUTPUTS)
    tokens = tl.arange(0, TOKENS)
    inside = (columns < width)[:, None] & (tokens < num_tokens)[None, :]
    offsets = tokens.to(tl.int64)[None, :] * stride_out + columns[:, None]
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["num_tokens"])
def _many_rows_kernel(
    values, scales, weight, weight_scale, bias, out, num_tokens, width, stride_out,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr, STATIC: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BAND: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One tile of the output. The tiles of ``BAND`` rows of tiles are neighbours, which find weights in the cache."""
    enter(EARLY)
    tile_rows, tile_columns = tl.cdiv(num_tokens, ROWS), tl.cdiv(width, COLUMNS)
    band = tl.program_id(0) // (BAND * tile_columns)
    height = tl.minimum(tile_rows - band * BAND, BAND)
    place = tl.program_id(0) % (BAND * tile_columns)
    token = (band * BAND + place % height) * ROWS + tl.arange(0, ROWS)
    column = place // height * COLUMNS + tl.arange(0, COLUMNS)
    tokens = tl.minimum(token, num_tokens - 1)
    rows = tl.minimum(column, width - 1)
    inner = tl.arange(0, 128)
    value_rows = values + tokens.to(tl.int64)[:, None] * DEPTH
    weight_rows = weight + rows.to(tl.int64)[:, None] * DEPTH
    GROUPS: tl.constexpr = (DEPTH + 128 - 1) // 128
    acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in tl.range(0, DEPTH, 128, num_stages=STAGES):
        k = start + inner
        sums = tl.dot(_weight_tile(value_rows, k, DEPTH, EVEN), tl.trans(_weight_tile(weight_rows, k, DEPTH, EVEN)))
        if BLOCK:
            of_inputs = tl.load(scales + tokens * GROUPS + start // 128)
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
def _arrivals(device: torch.device) -> Tensor:
    """Programs that have finished, per block; every launch leaves zeros behind. Launches on one stream share it."""
    return torch.zeros(_MAX_BLOCKS, dtype=torch.int32, device=device)


@functools.cache
def load_table() -> dict[tuple[int, int, bool, int], dict[int, FewRows | ManyRows | Library]]:
    """``(weight rows, inner size, gated, block)`` to what was fastest for up to so many tokens."""
    table: dict[tuple[int, int, bool, int], dict[int, FewRows | ManyRows | Library]] = {}
    for row in json.loads(_TABLE_PATH.read_text())["rows"]:
        key = (row["rows"], row["inner"], row["silu_mul"], row["block"])
        table.setdefault(key, {})[row["tokens"]] = KINDS[row["kind"]](*row["config"])
    return table


@functools.cache
def has_table(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == _TABLE_CAPABILITY


def choose_config(weight: Tensor, tokens: int, silu_mul: bool, block: int) -> FewRows | ManyRows | Library:
    """The configuration for ``weight [N, K]``: measured for this size and at least so many tokens, else by rule."""
    (rows, inner), few = weight.shape, tokens <= MAX_TOKENS
    if has_table(weight.device):
        tuned = load_table().get((rows, inner, silu_mul, block), {})
        limits = [limit for limit in tuned if (limit <= MAX_TOKENS) == few]
        if limits:
            return tuned[min((limit for limit in limits if limit >= tokens), default=max(limits))]
    return few_rows_config(rows, inner, next_power_of_2(tokens)) if few else many_rows_config(tokens, rows)


def few_rows_config(rows: int, inner: int, tokens: int) -> FewRows:
    """How a product of up to 64 rows is computed.

    Args:
        rows, inner: of the weight.
        tokens: a power of two.
    """
    held = tokens <= 16
    block = 16 if held else 64
    steps = cdiv(inner, 128)
    splits = min(steps, cdiv(_PROGRAMS, cdiv(rows, block))) if rows <= block * _MAX_BLOCKS else 1
    if held:
        splits = max(splits, cdiv(steps * 128 * block, _HELD_BYTES))
    return FewRows(held, block, 4, 4, cdiv(steps, cdiv(steps, splits)))


def many_rows_config(tokens: int, rows: int) -> ManyRows:
    """The tile for a number of tokens and of weight rows."""
    if tokens <= 128 or cdiv(tokens, 128) * cdiv(rows, 128) < _PROGRAMS // 2:
        return ManyRows(64, 128, 4, 4)
    return ManyRows(128, 128, 8, 4)


def fp8_product_triton(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    block: int,
    silu_mul: bool = False,
    config: FewRows | ManyRows | Library | None = None,
) -> None:
    """Write the product into ``out [T, N]``, which may be a slice (``[T, N / 2]`` with ``silu_mul``, up to 64 tokens).

    Args:
        values, scales: as ``quantize_inputs_triton`` returns them.
        config: overrides the choice (tests and measurements).
    """
    num_tokens, (rows, inner) = values.shape[0], weight.shape
    assert values.is_contiguous() and weight.is_contiguous() and weight_scale.is_contiguous() and out.stride(1) == 1
    if config is None:
        config = choose_config(weight, num_tokens, silu_mul, block)
    if isinstance(config, Library):
        assert not block, "the library takes scales by row"
        library_product(values, scales, weight, weight_scale, bias, out)
        return
    static, given = scales.dim() == 1, out if bias is None else bias
    if isinstance(config, ManyRows):
        assert not silu_mul
        _many_rows_kernel[(cdiv(num_tokens, config.rows) * cdiv(rows, config.columns),)](
            values, scales, weight, weight_scale, given, out, num_tokens, rows, out.stride(0),
            DEPTH=inner, BLOCK=block, STATIC=static, BIAS=bias is not None, ROWS=config.rows, COLUMNS=config.columns,
            BAND=8, EVEN=inner % 128 == 0, STAGES=config.stages, num_warps=config.warps, **early_launch(values.device),
        )  # fmt: skip
        return
    tokens, width = next_power_of_2(num_tokens), rows // 2 if silu_mul else rows
    blocks = cdiv(width, config.rows // 2 if silu_mul else config.rows)
    partial, arrivals = out, out
    if config.splits > 1:
        assert blocks <= _MAX_BLOCKS
        size = blocks * config.splits * config.rows * tokens
        partial, arrivals = torch.empty(size, dtype=torch.float32, device=out.device), _arrivals(out.device)
    span = cdiv(cdiv(inner, 128), config.splits) * 128
    _few_rows_kernel[(blocks, config.splits)](
        values, scales, weight, weight_scale, given, out, partial, arrivals, num_tokens, width, out.stride(0),
        DEPTH=inner, SPAN=span, SPLITS=config.splits, TOKENS=tokens,
        ROWS=config.rows, BLOCK=block, STATIC=static, HELD=config.held, GATED=silu_mul, BIAS=bias is not None,
        EVEN=inner == span * config.splits, STAGES=config.stages, num_warps=config.warps,
        **early_launch(values.device),
    )  # fmt: skip


def library_product(
    values: Tensor, scales: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """The product by the matrix library, with scales by row and token (or one for all inputs)."""
    of_inputs = scales.expand(values.shape[0], 1).contiguous()
    target = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    torch._scaled_mm(values, weight.t(), of_inputs, weight_scale.t(), bias, out_dtype=out.dtype, out=target)
    if target is not out:
        out.copy_(target)


def fp8_linear_triton(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    input_scale: Tensor | None = None,
    plain_weight: Tensor | None = None,
    *,
    block: int,
) -> Tensor:
    """``fp8_linear`` of ``weft/ops/fp8.py``."""
    flat, rows = x.flatten(0, -2), weight.shape[0]
    total = rows + (0 if plain_weight is None else plain_weight.shape[0])
    out = torch.empty((flat.shape[0], total), dtype=x.dtype, device=x.device)
    if flat.shape[0]:
        values, scales = quantize_inputs_triton(flat, input_scale, block=block)
        first = None if bias is None else bias[:rows]
        fp8_product_triton(values, scales, weight, weight_scale, first, out[:, :rows], block=block)
        if plain_weight is not None:
            rest = None if bias is None else bias[rows:]
            linear_into(flat, plain_weight, rest, out[:, rows:])
    return out.view(*x.shape[:-1], total)


def fp8_linear_silu_mul_triton(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    input_scale: Tensor | None = None,
    *,
    block: int,
) -> Tensor:
    """``fp8_linear_silu_mul`` of ``weft/ops/fp8.py``."""
    flat, rows = x.flatten(0, -2), weight.shape[0]
    if flat.shape[0] > MAX_TOKENS:
        return silu_and_mul_triton(fp8_linear_triton(x, weight, weight_scale, bias, input_scale, block=block))
    out = torch.empty((flat.shape[0], rows // 2), dtype=x.dtype, device=x.device)
    if flat.shape[0]:
        values, scales = quantize_inputs_triton(flat, input_scale, block=block)
        fp8_product_triton(values, scales, weight, weight_scale, bias, out, block=block, silu_mul=True)
    return out.view(*x.shape[:-1], rows // 2)
