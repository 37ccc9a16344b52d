"""Linear layers for a few rows: the weight streams through once, at the speed of memory.

Job: ``linear`` and ``linear_silu_mul`` on the GPU for up to 256 rows, where the matrix library leaves bandwidth unused.
Owns: the kernel. Does not know: layers, or which sizes it runs for (``skinny_choice.py``).

A program computes ``rows`` outputs of up to ``tokens`` tokens; programs of the same outputs run side by side, so that
memory is read once. There are four methods. ``sum`` keeps partial sums per token and lane and adds the lanes at the end
(up to 8 tokens). ``dot`` uses the tensor cores, with the weight as the left operand, which streams through a pipeline.
``held`` does the same with the whole weight loaded at the start. In ``warps`` every warp also has its own part of the
inner dimension, so that all warps of a program of few rows have work. If one program per block of rows cannot fill the
GPU, ``splits`` programs share the inner dimension. Each writes its sums, and the last program to arrive adds them in
order, or the following norm does (``linear_parts``). Nothing depends on the order in which programs run, nor one
token's output on another token. No kernel writes weights, so all but ``dot`` load a program's whole share before the
kernel before this one has ended.

The number of tokens is padded to a power of two, so that few kernels are compiled. Lanes without a token load nothing,
or all tokens in turn: if all loaded one token, all programs would wait for one place of the cache.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.activation.kernels import silu_and_mul_triton
from weft.ops.backend import launches
from weft.ops.collectives.packets import areas_of, flags_of, route_to
from weft.ops.collectives.peer_buffers import PeerBuffers, SentRows
from weft.ops.linear import linear_parts
from weft.ops.linear.few_rows import add_splits, load_inner, rows_of_block, workspace
from weft.ops.linear.skinny_choice import Config, choose_config
from weft.ops.triton.early_launch import early_launch, release, wait
from weft.ops.triton.gluon import GLUON_IS_KNOWN
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2

if GLUON_IS_KNOWN:
    from weft.ops.linear import gated_hopper as hopper

MAX_SUM_TOKENS = 8
"""Most tokens of the method ``sum``: every token has sums of its own in registers."""
MAX_SENDER_SUM_TOKENS = 8
"""Upper bound on tokens for which the sender adds the sums of the splits before it sends to other ranks. With more
tokens the receiver adds the sums."""


@triton.jit
def _load_weight(
    weight_rows, first, DEPTH: tl.constexpr, SPAN: tl.constexpr, INNER: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """A program's whole share of the weight, in registers: a tuple of tiles ``[ROWS, INNER]``."""
    tiles = ()
    for start in tl.static_range(0, SPAN, INNER):
        k = first + start + tl.arange(0, INNER)
        tile = load_inner(weight_rows + k[None, :], (k < DEPTH)[None, :], EVEN)
        tiles = tiles + (tile,)  # type: ignore[assignment]  # noqa: RUF005 (kernels cannot unpack)
    return tiles


@triton.jit
def _sum_products(
    x, weight_tiles, first, num_tokens, stride_x,
    DEPTH: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
    VECTOR: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """``[ROWS, TOKENS]`` by multiply and add. ``VECTOR`` neighbours, which one thread loads, are added at once."""
    sums = (tl.zeros([ROWS, INNER // VECTOR], dtype=tl.float32),) * TOKENS
    for step in tl.static_range(len(weight_tiles)):
        k = first + step * INNER + tl.arange(0, INNER)
        w = weight_tiles[step].to(tl.float32)
        added = ()
        for token in tl.static_range(TOKENS):
            token_x = x + tl.minimum(token, num_tokens - 1).to(tl.int64) * stride_x
            values = load_inner(token_x + k, k < DEPTH, EVEN).to(tl.float32)
            products = tl.reshape(w * values[None, :], [ROWS, INNER // VECTOR, VECTOR])
            added = added + (sums[token] + tl.sum(products, 2),)  # type: ignore[assignment] # noqa: RUF005
        sums = added
    acc = tl.zeros([ROWS, TOKENS], dtype=tl.float32)
    for token in tl.static_range(TOKENS):
        acc = tl.where((tl.arange(0, TOKENS) == token)[None, :], tl.sum(sums[token], 1)[:, None], acc)
    return acc


@triton.jit
def _held_products(
    x, weight_tiles, first, num_tokens, stride_x,
    DEPTH: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``[ROWS, TOKENS]`` on the tensor cores, from weights in registers."""
    is_token = tl.arange(0, TOKENS) < num_tokens
    tokens = tl.arange(0, TOKENS).to(tl.int64)
    x_rows = x + tokens[None, :] * stride_x
    x_tiles = ()
    for step in tl.static_range(len(weight_tiles)):  # all of them before the first product
        k = first + step * INNER + tl.arange(0, INNER)
        if EVEN:
            values = tl.load(x_rows + k[:, None], mask=is_token[None, :], other=0.0)
        else:
            values = tl.load(x_rows + k[:, None], mask=(k < DEPTH)[:, None] & is_token[None, :], other=0.0)
        x_tiles = x_tiles + (values,)  # type: ignore[assignment]  # noqa: RUF005
    acc = tl.zeros([ROWS, TOKENS], dtype=tl.float32)
    for step in tl.static_range(len(weight_tiles)):  # sums of their own, so that no product waits for the one before
        acc += tl.dot(weight_tiles[step], x_tiles[step], input_precision=PRECISION)
    return acc


@triton.jit
def _places(first, step, INNER: tl.constexpr, PARTS: tl.constexpr):
    """Compute the inner elements that a step multiplies, in parts: ``[PARTS, INNER // PARTS]``."""
    part = tl.arange(0, PARTS)[:, None] * (INNER // PARTS)
    return first + step * INNER + part + tl.arange(0, INNER // PARTS)[None, :]


@triton.jit
def _load_parts(
    weight_rows, first, DEPTH: tl.constexpr, SPAN: tl.constexpr, INNER: tl.constexpr, PARTS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """``_load_weight`` in parts of the inner dimension: a tuple of tiles ``[PARTS, ROWS, INNER // PARTS]``."""
    tiles = ()
    weight_rows = weight_rows[None, :, :]
    for step in tl.static_range(SPAN // INNER):
        k = _places(first, step, INNER, PARTS)[:, None, :]
        tile = load_inner(weight_rows + k, k < DEPTH, EVEN)
        tiles = tiles + (tile,)  # type: ignore[assignment]  # noqa: RUF005 (kernels cannot unpack)
    return tiles


@triton.jit
def _part_products(
    x, weight_tiles, first, num_tokens, stride_x,
    DEPTH: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, PARTS: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``[ROWS, TOKENS]`` on the tensor cores: each warp multiplies its part, and their sums are added in order."""
    is_token = tl.arange(0, TOKENS) < num_tokens
    tokens = tl.arange(0, TOKENS).to(tl.int64)
    x_rows = x + tokens[None, None, :] * stride_x
    x_tiles = ()
    for step in tl.static_range(len(weight_tiles)):  # all of them before the first product
        k = _places(first, step, INNER, PARTS)[:, :, None]
        if EVEN:
            values = tl.load(x_rows + k, mask=is_token[None, None, :], other=0.0)
        else:
            values = tl.load(x_rows + k, mask=(k < DEPTH) & is_token[None, None, :], other=0.0)
        x_tiles = x_tiles + (values,)  # type: ignore[assignment]  # noqa: RUF005
    acc = tl.zeros([PARTS, ROWS, TOKENS], dtype=tl.float32)
    for step in tl.static_range(len(weight_tiles)):
        acc = tl.dot(weight_tiles[step], x_tiles[step], acc, input_precision=PRECISION)
    return tl.sum(acc, 0)


@triton.jit
def _dot_products(
    x, weight_rows, first, num_tokens, stride_x,
    DEPTH: tl.constexpr, SPAN: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``[ROWS, TOKENS]`` on the tensor cores."""
    tokens = (tl.arange(0, TOKENS) % num_tokens).to(tl.int64)  # masks would cost the pipeline 1%
    x_rows = x + tokens[None, :] * stride_x
    acc = tl.zeros([ROWS, TOKENS], dtype=tl.float32)
    for start in tl.range(0, SPAN, INNER, num_stages=STAGES):
        k = first + start + tl.arange(0, INNER)
        w = load_inner(weight_rows + k[None, :], (k < DEPTH)[None, :], EVEN)
        values = load_inner(x_rows + k[:, None], (k < DEPTH)[:, None], EVEN)
        acc = tl.dot(w, values, acc, input_precision=PRECISION)
    return acc


@jit(do_not_specialize=["num_tokens"])
def _skinny_linear_kernel(
    x, weight, bias, out, partial, arrivals, addresses, counters, num_tokens, width, stride_x, stride_out, stride_part,
    DEPTH: tl.constexpr, SPAN: tl.constexpr, SPLITS: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, VECTOR: tl.constexpr,
    DOT: tl.constexpr, HELD: tl.constexpr, PARTS: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, ROUTE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A block of outputs of a block of tokens, by ``program_id(0)``; share ``program_id(1)`` of the inner dimension."""
    place = tl.program_id(0)
    split = tl.program_id(1)
    token_blocks = tl.cdiv(num_tokens, TOKENS)
    block = place // token_blocks
    first_token = place % token_blocks * TOKENS
    x += first_token.to(tl.int64) * stride_x
    out += first_token.to(tl.int64) * stride_out + split * stride_part
    num_tokens -= first_token
    first = split * SPAN
    weight_rows = weight + rows_of_block(block, width, ROWS, GATED).to(tl.int64)[:, None] * DEPTH
    if ROUTE is None:
        release(EARLY)
    areas = areas_of(addresses, ROUTE)
    if PARTS > 1:
        weight_tiles = _load_parts(weight_rows, first, DEPTH, SPAN, INNER, PARTS, EVEN)
    elif HELD:
        weight_tiles = _load_weight(weight_rows, first, DEPTH, SPAN, INNER, EVEN)
    wait(EARLY)
    if ROUTE is not None:
        release(EARLY)  # what receives starts when all of this has waited
    token_rows = (first_token + tl.arange(0, TOKENS))[None, :]
    flags = flags_of(counters, token_rows, ROUTE)
    if PARTS > 1:
        acc = _part_products(
            x, weight_tiles, first, num_tokens, stride_x, DEPTH, TOKENS, ROWS, INNER, PARTS, EVEN, PRECISION
        )  # fmt: skip
    elif DOT and HELD:
        acc = _held_products(
            x, weight_tiles, first, num_tokens, stride_x, DEPTH, TOKENS, ROWS, INNER, EVEN, PRECISION
        )  # fmt: skip
    elif DOT:
        acc = _dot_products(
            x, weight_rows, first, num_tokens, stride_x, DEPTH, SPAN, TOKENS, ROWS, INNER, EVEN, PRECISION, STAGES
        )
    else:
        acc = _sum_products(x, weight_tiles, first, num_tokens, stride_x, DEPTH, TOKENS, ROWS, INNER, VECTOR, EVEN)
    add_splits(
        acc, bias, out, partial, arrivals, place, block, split, num_tokens, width, stride_out,
        SPLITS, TOKENS, ROWS, GATED, BIAS, (token_rows, flags, areas), ROUTE,
    )  # fmt: skip


def launch_options(
    config: Config, inner: int, tokens: int, dtype: torch.dtype, *, silu_mul: bool, bias: bool
) -> dict[str, Any]:
    """Compile-time arguments of the kernel for an inner size and a program's tokens."""
    span = cdiv(cdiv(inner, config.splits), config.inner) * config.inner
    even = inner == span * config.splits
    assert config.method != "sum" or tokens <= MAX_SUM_TOKENS
    return {
        "DEPTH": inner, "SPAN": span, "SPLITS": config.splits, "TOKENS": tokens, "ROWS": config.rows,
        "INNER": config.inner, "VECTOR": 16 // dtype.itemsize,
        "DOT": config.method != "sum", "HELD": config.method != "dot",
        "PARTS": config.warps if config.method == "warps" else 1,
        "GATED": silu_mul, "BIAS": bias, "EVEN": even, "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",
        "STAGES": config.stages, "num_warps": config.warps,
    }  # fmt: skip


def skinny_linear_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: Config,
    *,
    silu_mul: bool = False,
    out: Tensor | None = None,
    peers: PeerBuffers | None = None,
) -> Tensor:
    """``x [T, K] -> [T, N]`` (``[T, N / 2]`` with ``silu_mul``) by the kernel, ``T >= 1``. ``out``: where to; it may
    be a slice of wider rows, or ``[splits, T, N]`` float32 for the sums of each split. ``peers``: send the outputs to
    these ranks instead."""
    num_tokens, (rows, inner) = x.shape[0], weight.shape
    tokens = min(next_power_of_2(num_tokens), config.tokens)
    outputs, width = (config.rows // 2, rows // 2) if silu_mul else (config.rows, rows)
    programs = cdiv(width, outputs) * cdiv(num_tokens, tokens)
    assert x.stride(1) == 1 and weight.is_contiguous() and x.dtype == weight.dtype
    if out is None:
        out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    options = launch_options(config, inner, tokens, x.dtype, silu_mul=silu_mul, bias=bias is not None)
    route, addresses, counters = None, out, out
    if peers is not None:
        route, addresses, counters = route_to(peers, x.dtype), peers.addresses, peers.counters
    if out.dim() == 3:
        options["SPLITS"] = 1  # to add up here
    partial, arrivals = workspace(programs, options["SPLITS"], config.rows, tokens, out)
    _skinny_linear_kernel[(programs, config.splits)](
        x, weight, out if bias is None else bias, out, partial, arrivals, addresses, counters, num_tokens, width,
        x.stride(0), out.stride(-2), out.stride(0) if out.dim() == 3 else 0,
        ROUTE=route, **options, **early_launch(x.device),
    )  # fmt: skip
    return out


def linear_into(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """``linear`` of ``x [T, K]`` into ``out [T, N]``, which may be a slice of wider rows."""
    config = choose_config(x, weight, silu_mul=False)
    if config is not None:
        skinny_linear_triton(x, weight, bias, config, out=out)
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def linear_triton(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    flat = x.flatten(0, -2)
    config = choose_config(flat, weight, silu_mul=False)
    if config is None:
        return F.linear(x, weight, bias)
    return skinny_linear_triton(flat, weight, bias, config).view(*x.shape[:-1], -1)


@launches(linear_parts)
def linear_parts_triton(x, weight, peers) -> Tensor | SentRows:
    config = choose_config(x, weight, silu_mul=False, leaves_sums=True)
    if config is None:
        return F.linear(x, weight)
    if peers is not None and (config.splits == 1 or x.shape[0] <= MAX_SENDER_SUM_TOKENS):
        sent = SentRows.to(peers, x.shape[0], x.dtype)
        skinny_linear_triton(x, weight, None, config, out=sent.room[0], peers=peers)
        return sent
    parts = None
    if config.splits > 1:
        parts = torch.empty((config.splits, x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    return skinny_linear_triton(x, weight, None, config, out=parts)


def linear_silu_mul_triton(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    flat = x.flatten(0, -2)
    config = choose_config(flat, weight, silu_mul=True)
    if config is None and bias is None and GLUON_IS_KNOWN and hopper.takes_gated(flat, weight):
        return hopper.gated_linear_hopper(flat, weight).view(*x.shape[:-1], -1)
    if config is None:
        return silu_and_mul_triton(linear_triton(x, weight, bias))
    return skinny_linear_triton(flat, weight, bias, config, silu_mul=True).view(*x.shape[:-1], -1)
