"""Linear layers in which a row's bits do not depend on the number of rows (``--deterministic``).

Job: ``linear`` and ``linear_silu_mul`` on the GPU for any number of rows. Owns: the order of a row's sum, and tiles.
Does not know: layers.

The inner dimension is cut into ``splits`` spans, by the weight's shape alone. Inside a span the tensor cores add the
products in order, 16 at a time, into one float32 sum. The spans' sums are then added in order. A tile of any size, of a
kernel for few rows or for many, computes these same sums. With few rows every span has programs of its own. With many
rows a program computes all spans of its outputs in turn.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.ops.backend import launches
from weft.ops.linear import invariant_linear_parts
from weft.ops.linear.few_rows import add_splits, rows_of_block, workspace
from weft.ops.triton.early_launch import early_launch, enter, release, wait
from weft.ops.triton.gluon import GLUON_IS_KNOWN
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2, precision

if GLUON_IS_KNOWN:
    from weft.ops.linear import gated_hopper as hopper


class Order(NamedTuple):
    """The order of a row's sum: ``splits`` spans of ``span`` inner elements."""

    splits: int
    span: int


class Tile(NamedTuple):
    """One tile: weight rows, tokens, inner elements per step, warps, stages of the pipeline.

    ``held``: load the whole span's weights before the previous kernel has ended. ``group``: blocks of weight rows whose
    programs run side by side.
    """

    rows: int
    tokens: int
    inner: int
    warps: int
    stages: int
    held: bool = False
    group: int = 1


class Fixed(NamedTuple):
    """Compile-time parameters of the kernels: the shape, the order, the tile, and what follows the product."""

    depth: int
    span: int
    splits: int
    rows: int
    tokens: int
    inner: int
    stages: int
    held: bool
    masked: bool
    group: int
    gated: bool
    bias: bool
    even: bool
    precision: str
    by_descriptor: bool
    parts: bool


@jit(do_not_specialize=["num_tokens"])
def _span_kernel(
    x, weight, bias, out, partial, arrivals, num_tokens, width, stride_x, stride_out, stride_part,
    FIXED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A block of outputs of a block of tokens, by ``program_id(0)``; span ``program_id(1)`` of the inner dimension."""
    ROWS: tl.constexpr = FIXED.rows
    TOKENS: tl.constexpr = FIXED.tokens
    INNER: tl.constexpr = FIXED.inner
    SPAN: tl.constexpr = FIXED.span
    DEPTH: tl.constexpr = FIXED.depth
    PRECISION: tl.constexpr = FIXED.precision
    place, split = tl.program_id(0), tl.program_id(1)
    token_blocks = tl.cdiv(num_tokens, TOKENS)
    block = place // token_blocks
    first_token = place % token_blocks * TOKENS
    x += first_token.to(tl.int64) * stride_x
    out += first_token.to(tl.int64) * stride_out + split * stride_part
    num_tokens -= first_token
    first = split * SPAN
    weight_rows = weight + rows_of_block(block, width, ROWS, FIXED.gated).to(tl.int64)[:, None] * DEPTH
    release(EARLY)
    tiles = ()
    if FIXED.held:
        for start in tl.static_range(0, SPAN, INNER):
            k = first + start + tl.arange(0, INNER)
            if FIXED.even:
                tile = tl.load(weight_rows + k[None, :])
            else:
                tile = tl.load(weight_rows + k[None, :], mask=(k < DEPTH)[None, :], other=0.0)
            tiles = tiles + (tile,)  # type: ignore[assignment]  # noqa: RUF005 (kernels cannot unpack)
    wait(EARLY)
    acc = tl.zeros([ROWS, TOKENS], dtype=tl.float32)
    if FIXED.held:
        is_token = (tl.arange(0, TOKENS) < num_tokens)[None, :]
        x_rows = x + tl.arange(0, TOKENS).to(tl.int64)[None, :] * stride_x
        x_tiles = ()
        for start in tl.static_range(0, SPAN, INNER):
            k = first + start + tl.arange(0, INNER)
            mask = is_token if FIXED.even else is_token & (k < DEPTH)[:, None]
            x_tiles = x_tiles + (tl.load(x_rows + k[:, None], mask=mask, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
        for step in tl.static_range(len(tiles)):
            acc = tl.dot(tiles[step], x_tiles[step], acc, input_precision=PRECISION)
    else:
        # Masks cost the pipeline 1%. But if many lanes loaded one token, all programs would wait for one place of the
        # cache.
        lanes = tl.arange(0, TOKENS)
        is_token = (lanes < num_tokens)[None, :]
        x_rows = x + (lanes if FIXED.masked else lanes % num_tokens).to(tl.int64)[None, :] * stride_x
        for start in tl.range(0, SPAN, INNER, num_stages=FIXED.stages):
            k = first + start + tl.arange(0, INNER)
            if FIXED.even:
                w = tl.load(weight_rows + k[None, :])
            else:
                w = tl.load(weight_rows + k[None, :], mask=(k < DEPTH)[None, :], other=0.0)
            if FIXED.masked:
                values = tl.load(x_rows + k[:, None], mask=is_token & (k < DEPTH)[:, None], other=0.0)
            elif FIXED.even:
                values = tl.load(x_rows + k[:, None])
            else:
                values = tl.load(x_rows + k[:, None], mask=(k < DEPTH)[:, None], other=0.0)
            acc = tl.dot(w, values, acc, input_precision=PRECISION)
    add_splits(
        acc, bias, out, partial, arrivals, place, block, split, num_tokens, width, stride_out,
        1 if FIXED.parts else FIXED.splits, TOKENS, ROWS, FIXED.gated, FIXED.bias,
    )  # fmt: skip


@jit(do_not_specialize=["num_tokens"])
def _spans_kernel(
    x, weight, bias, out, num_tokens, width, stride_x, stride_out, FIXED: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """A block of outputs of a block of tokens: all spans in order. ``x`` and ``weight`` may be descriptors."""
    enter(EARLY)
    TOKENS: tl.constexpr = FIXED.tokens
    INNER: tl.constexpr = FIXED.inner
    SPAN: tl.constexpr = FIXED.span
    DEPTH: tl.constexpr = FIXED.depth
    GATED: tl.constexpr = FIXED.gated
    OUTPUTS: tl.constexpr = FIXED.rows // 2 if GATED else FIXED.rows
    PRECISION: tl.constexpr = FIXED.precision
    token_blocks = tl.cdiv(num_tokens, TOKENS)
    per_group = FIXED.group * token_blocks
    first_block = tl.program_id(0) // per_group * FIXED.group
    in_group = tl.minimum(tl.cdiv(width, OUTPUTS) - first_block, FIXED.group)
    block = first_block + tl.program_id(0) % per_group % in_group
    first_token = tl.program_id(0) % per_group // in_group * TOKENS
    column = block * OUTPUTS
    columns, tokens = column + tl.arange(0, OUTPUTS), first_token + tl.arange(0, TOKENS)
    if not FIXED.by_descriptor:
        x_rows = x + tl.minimum(tokens, num_tokens - 1).to(tl.int64)[:, None] * stride_x
        w_rows = weight + tl.minimum(columns, width - 1).to(tl.int64)[:, None] * DEPTH
    total = tl.zeros([TOKENS, OUTPUTS], dtype=tl.float32)
    total_up = total
    for part in tl.range(0, FIXED.splits):
        acc = tl.zeros([TOKENS, OUTPUTS], dtype=tl.float32)
        up = acc
        for start in tl.range(part * SPAN, part * SPAN + SPAN, INNER, num_stages=FIXED.stages):
            if FIXED.by_descriptor:
                a, b = x.load([first_token, start]), weight.load([column, start])
                if GATED:
                    u = weight.load([width + column, start])
            else:
                k = start + tl.arange(0, INNER)[None, :]
                a = tl.load(x_rows + k, mask=k < DEPTH, other=0.0)
                b = tl.load(w_rows + k, mask=k < DEPTH, other=0.0)
                if GATED:
                    u = tl.load(w_rows + width.to(tl.int64) * DEPTH + k, mask=k < DEPTH, other=0.0)
            acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
            if GATED:
                up = tl.dot(a, tl.trans(u), up, input_precision=PRECISION)
        if FIXED.splits == 1:
            total = acc
            total_up = up
        else:
            total += acc
            total_up += up
    if FIXED.bias:
        inside = columns < width
        total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            total_up += tl.load(bias + width + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * total_up
    mask = (tokens < num_tokens)[:, None] & (columns < width)[None, :]
    tl.store(
        out + tokens.to(tl.int64)[:, None] * stride_out + columns[None, :], total.to(out.dtype.element_ty), mask=mask
    )


def _fixed(
    x: Tensor, weight: Tensor, bias: Tensor | None, order: Order, tile: Tile, gated: bool, *,
    by_descriptor: bool = False, parts: bool = False,
) -> Fixed:  # fmt: skip
    inner = weight.shape[1]
    return Fixed(
        inner, order.span, order.splits, tile.rows, tile.tokens, tile.inner, tile.stages, tile.held,
        2 * x.shape[0] <= tile.tokens, tile.group, gated, bias is not None, inner == order.span * order.splits,
        precision(x), by_descriptor, parts,
    )  # fmt: skip


def few_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, order: Order, tile: Tile, *, gated: bool, out: Tensor
) -> None:
    """``x [T, K]`` times the weight, by programs for each span. ``out``: ``[T, N]``, or ``[splits, T, N]`` float32 for
    the sums of each span."""
    num_tokens = x.shape[0]
    width, outputs = (weight.shape[0] // 2, tile.rows // 2) if gated else (weight.shape[0], tile.rows)
    programs = cdiv(width, outputs) * cdiv(num_tokens, tile.tokens)
    assert order.span % tile.inner == 0
    parts = out.dim() == 3
    partial, arrivals = workspace(programs, 1 if parts else order.splits, tile.rows, tile.tokens, out)
    _span_kernel[(programs, order.splits)](
        x, weight, out if bias is None else bias, out, partial, arrivals, num_tokens, width, x.stride(0),
        out.stride(-2), out.stride(0) if parts else 0,
        FIXED=_fixed(x, weight, bias, order, tile, gated, parts=parts), num_warps=tile.warps, **early_launch(x.device),
    )  # fmt: skip


def many_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, order: Order, tile: Tile, *, gated: bool, out: Tensor
) -> None:
    """The same by programs that compute all spans."""
    num_tokens = x.shape[0]
    width, outputs = (weight.shape[0] // 2, tile.rows // 2) if gated else (weight.shape[0], tile.rows)
    programs = cdiv(width, outputs) * cdiv(num_tokens, tile.tokens)
    assert order.span % tile.inner == 0
    aligned = x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0  # as the copy engine needs it
    by_descriptor = aligned and x.element_size() == 2 and x.stride(0) % 8 == 0 and weight.shape[1] % 8 == 0
    source, weights = x, weight
    if by_descriptor:
        source = TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [tile.tokens, tile.inner])
        weights = TensorDescriptor(weight, list(weight.shape), [weight.stride(0), 1], [outputs, tile.inner])
    _spans_kernel[(programs,)](
        source, weights, out if bias is None else bias, out, num_tokens, width, x.stride(0), out.stride(0),
        FIXED=_fixed(x, weight, bias, order, tile, gated, by_descriptor=by_descriptor), num_warps=tile.warps,
        **early_launch(x.device),
    )  # fmt: skip


_FEW_BLOCKS, _ENOUGH_PROGRAMS, _LONGEST_SPAN, _LEAST_SPAN, _STEP = 48, 64, 1024, 256, 128
"""A weight with fewer blocks of 64 rows is cut into spans: until there are enough programs for one tile of tokens, and
spans are at most so long. No span is shorter than the last but one number; the last one divides every span."""

MOST_PARTS = 256
"""Tokens up to which the following norm adds the sums of spans."""


def order_of(rows: int, inner: int) -> Order:
    """The order of sums of a weight ``[rows, inner]``. With many tokens one span is faster. With few, spans keep the
    chain of additions short."""
    splits, blocks = 1, cdiv(rows, 64)
    while (
        blocks < _FEW_BLOCKS
        and (blocks * splits < _ENOUGH_PROGRAMS or inner // splits > _LONGEST_SPAN)
        and inner % (2 * splits * _STEP) == 0
        and inner // (2 * splits) >= _LEAST_SPAN
    ):
        splits *= 2
    return Order(splits, cdiv(cdiv(inner, splits), _STEP) * _STEP)


class Choice(NamedTuple):
    """The kernel of a product, ``few``, ``many`` or ``hopper`` (``gated_hopper.py``), and its tile."""

    kernel: str
    tile: Tile


_HELD_SPAN, _HELD_BLOCKS, _ONE_WAVE = 512, 96, 132
"""The longest span that is held for more than four tokens, most programs that hold theirs, and programs that run at the
same time."""


def choose(x: Tensor, weight: Tensor, bias: Tensor | None, order: Order, gated: bool) -> Choice:
    """The kernel and the tile for ``x [T, K]`` and ``weight [N, K]``. No choice changes a bit of the result.

    Measured on an H200 with the weights of Qwen3-0.6B and Qwen3-Next (``benchmarks/kernels/invariant.py``).
    """
    num_tokens, blocks = x.shape[0], cdiv(weight.shape[0], 64)
    if x.element_size() == 4:
        few = Choice("few", Tile(32, 16, 32, 4, 2))
        return few if num_tokens <= 256 else Choice("many", Tile(64, 32, 32, 4, 2, group=8))
    if num_tokens <= 128 or (num_tokens <= 256 and blocks <= _ONE_WAVE) or (num_tokens <= 512 and order.splits > 1):
        return Choice("few", _few_tile(num_tokens, order, blocks))
    if order.splits > 1:
        return Choice("many", Tile(128, 64 if num_tokens <= 2048 else 128, 64, 4, 4, group=8))
    if GLUON_IS_KNOWN and bias is None and hopper.takes(x, weight, gated=gated):
        width, columns = (weight.shape[0] // 2, 96) if gated else (weight.shape[0], 192)
        if hopper.filled(next_power_of_2(num_tokens), width, columns) >= _FILLED:  # kernels are compiled for these
            return Choice("hopper", Tile(256, columns, 64, 8, 4))
    if gated:
        return Choice("many", Tile(256, 128, 64, 8, 4, group=4))
    return Choice("many", Tile(128, 128, 64, 4, 4, group=8) if num_tokens <= 512 else Tile(256, 128, 64, 8, 3, group=8))


_FILLED = 0.8
"""Least part of its tiles that the kernel for Hopper must fill."""


def _few_tile(num_tokens: int, order: Order, blocks: int) -> Tile:
    """The tile of programs with a span each."""
    if num_tokens <= 16:
        holds = (
            order.span <= (_LONGEST_SPAN if num_tokens <= 4 else _HELD_SPAN) and blocks * order.splits <= _HELD_BLOCKS
        )
        if holds:
            return Tile(64, 16, 128, 4, 1, held=True)
        if blocks < _ONE_WAVE:
            return Tile(64, 16, 128, 4, 6)
        return Tile(64, 16, 64, 4, 6) if num_tokens <= 4 else Tile(64, 16, 128, 4, 4)
    if num_tokens <= 32:
        return Tile(64, 32, 128, 4, 6 if blocks < _ONE_WAVE else 4)
    if num_tokens > 128 or (num_tokens > 64 and blocks > _ONE_WAVE):
        return Tile(64, 128, 64, 4, 4)
    return Tile(64, 64, 128, 4, 4)


def run(
    x: Tensor, weight: Tensor, bias: Tensor | None, choice: Choice, order: Order, *, gated: bool = False
) -> Tensor:  # fmt: skip
    """``x [T, K] -> [T, N]``, or ``[T, N / 2]`` if ``gated``, by the chosen kernel."""
    if choice.kernel == "hopper":
        return hopper.gated_linear_hopper(x, weight, gated=gated)
    out = torch.empty(x.shape[0], weight.shape[0] // (2 if gated else 1), dtype=x.dtype, device=x.device)
    product = few_rows if choice.kernel == "few" else many_rows
    product(x, weight, bias, order, choice.tile, gated=gated, out=out)
    return out


def invariant_linear_triton(x: Tensor, weight: Tensor, bias: Tensor | None, *, gated: bool = False) -> Tensor:
    """``linear`` of ``weft/ops/linear``, or ``linear_silu_mul``; a row has the same bits for any number of rows."""
    flat, order = x.flatten(0, -2), order_of(*weight.shape)
    if not flat.shape[0]:
        return x.new_empty(*x.shape[:-1], weight.shape[0] // (2 if gated else 1))
    out = run(flat, weight, bias, choose(flat, weight, bias, order, gated), order, gated=gated)
    return out.view(*x.shape[:-1], -1)


@launches(invariant_linear_parts, invariant={})
def invariant_linear_parts_triton(x, weight) -> Tensor:
    """``invariant_linear_parts`` of ``weft/ops/linear``."""
    order = order_of(*weight.shape)
    if order.splits == 1 or not 0 < x.shape[0] <= MOST_PARTS:
        return invariant_linear_triton(x, weight, None)
    choice = choose(x, weight, None, order, False)
    assert choice.kernel == "few", "few tokens have programs for each span"
    parts = torch.empty(order.splits, x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    few_rows(x, weight, None, order, choice.tile, gated=False, out=parts)
    return parts
