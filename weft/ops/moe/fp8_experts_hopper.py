"""FP8 products of many pairs of each expert, for Hopper, in Gluon: operands arrive while others are multiplied.

Job: what ``fp8_experts.py`` does up to the sum, with a scale for each row of the weights, where experts have many
pairs. Owns: the shape of its tiles, and who waits for whom. Does not know: routing, how pairs are grouped or summed.

A program goes through tiles of 128 pairs of one expert by 128 rows of its weights: outputs, or the gate and up rows of
64 hidden values. A ring of stages holds 128 inner elements of both operands each. Four warps, the *gatherers*, copy
inputs, whose rows lie where the tokens are. Another warp, the *producer*, requests weights from the copy engine. Two
*consumers*, four warps with 64 pairs each, multiply. Sums of 128 products are added up in float32: while one consumer
adds, the products of the other run. Gatherers and producer run ahead into the next tile.

Who waits for whom, by barriers of every stage::

    ready   the gatherers, when their copies have arrived, and the copy engine  ->  the consumers
    empty   both consumers                                                      ->  gatherers and producer
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere.async_copy import commit_group, wait_group
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from weft.ops.fp8 import Fp8Matrix
from weft.ops.fp8.quantize import prepare_pass, quantize_inputs_triton
from weft.ops.moe.groups import group_many
from weft.ops.triton.early_launch import early_launch, release, wait
from weft.ops.triton.gluon import async_load, threads_load
from weft.ops.triton.hopper import GluonKernel, runs_gluon
from weft.ops.triton.hopper_rows import STORED, silu_mul, store_inside
from weft.ops.triton.sizes import MULTIPROCESSORS

ROWS = 128
"""Pairs of a block."""
_STAGES = gl.constexpr(6)
_UNDER_WAY = gl.constexpr(3)
"""Stages whose copies are still under way when the gatherers hand over an earlier stage."""

_ALL_REGISTERS = 128
_CONSUMER_REGISTERS = gl.constexpr(208)
_GATHERER_REGISTERS = gl.constexpr(64)
_PRODUCER_REGISTERS = gl.constexpr(24)

_TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
_COPIED = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))


class Fixed(NamedTuple):
    """Compile-time parameters of a product.

    Attributes:
        depth: inner elements.
        width: outputs of an expert; with ``gated``, hidden values, each of two weight rows.
        top_k: pairs of a token.
        static: one scale of all inputs is given.
        gated: the up product, of inputs by token. Else inputs are in the order of places, and outputs in that of pairs.
    """

    depth: int
    width: int
    top_k: int
    static: bool
    gated: bool


@gluon.constexpr_function
def tiles_across(width, gated):
    """Tiles of a block."""
    return width // (64 if gated else 128)


@gluon.jit
def _block_of(table, tile, FIXED: gl.constexpr):
    """The expert of a tile, and the places of its pairs: from the first one up to the end of all of the expert's."""
    first_place, block_expert, block_first = table
    block = tile // tiles_across(FIXED.width, FIXED.gated)
    expert = gl.load(block_expert + block)
    return expert, gl.load(block_first + block), gl.load(first_place + expert + 1)


@gluon.jit
def _column(tile, FIXED: gl.constexpr):
    """The first output of a tile."""
    return tile % tiles_across(FIXED.width, FIXED.gated) * (64 if FIXED.gated else 128)


@gluon.jit
def _inputs_of(pairs, places, inside, FIXED: gl.constexpr):
    """The rows of the inputs at some places."""
    rows = places
    if FIXED.gated:
        rows = gl.load(pairs + places, mask=inside, other=0) // FIXED.top_k
    return rows


@gluon.jit
def _hand_over(ready, n, UNDER_WAY: gl.constexpr):
    """Tell the consumers that the inputs of stage ``n`` are there, once they are."""
    wait_group(UNDER_WAY)
    fence_async_shared()  # the matrix units read by another path than these copies take
    mbarrier.arrive(ready.index(n % _STAGES), count=1)


@gluon.jit
def _gather(values, pairs, table, num_tiles, inputs, ready, empty, FIXED: gl.constexpr):
    """The gatherers."""
    lanes = gl.arange(0, 128, layout=gl.SliceLayout(1, _COPIED))
    inner = gl.arange(0, 128, layout=gl.SliceLayout(0, _COPIED))[None, :]
    n = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        _expert, first, end = _block_of(table, tile, FIXED)
        inside = first + lanes < end
        rows = _inputs_of(pairs, first + lanes, inside, FIXED).to(gl.int64) * FIXED.depth
        for step in range(FIXED.depth // 128):
            stage = n % _STAGES
            mbarrier.wait(empty.index(stage), (n // _STAGES & 1) ^ 1)
            threads_load(inputs.index(stage), values + (rows[:, None] + (step * 128 + inner)), inside[:, None])
            commit_group()
            if n >= _UNDER_WAY:
                _hand_over(ready, n - _UNDER_WAY, _UNDER_WAY)
            n += 1
    for left in gl.static_range(_UNDER_WAY, 0, -1):
        if n >= left:
            _hand_over(ready, n - left, left - 1)


@gluon.jit
def _produce(w_desc, table, num_tiles, weights, ready, empty, FIXED: gl.constexpr):
    """The producer: 64 gate rows and the up rows of the same hidden values, or 128 rows in a row."""
    MATRIX: gl.constexpr = (2 if FIXED.gated else 1) * FIXED.width
    BEHIND: gl.constexpr = FIXED.width if FIXED.gated else 64
    n = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, _first, _end = _block_of(table, tile, FIXED)
        row = expert * MATRIX + _column(tile, FIXED)
        for step in range(FIXED.depth // 128):
            stage = n % _STAGES
            mbarrier.wait(empty.index(stage), (n // _STAGES & 1) ^ 1)
            mbarrier.expect(ready.index(stage), 128 * 128)
            box = weights.index(stage)
            async_load(w_desc, [row, step * 128], ready.index(stage), box.slice(0, 64, dim=0))
            async_load(w_desc, [row + BEHIND, step * 128], ready.index(stage), box.slice(64, 64, dim=0))
            n += 1


@gluon.jit
def _scales(scales, w_scales, rows, inside, expert, column, FIXED: gl.constexpr):
    """The products of scales that a consumer's sums are multiplied by, ``[64, 128]``."""
    MATRIX: gl.constexpr = (2 if FIXED.gated else 1) * FIXED.width
    lanes = gl.arange(0, 128, layout=gl.SliceLayout(0, _SUMS))
    weight_row = expert * MATRIX + column + lanes
    if FIXED.gated:
        weight_row = gl.where(lanes < 64, weight_row, weight_row + (FIXED.width - 64))
    if FIXED.static:
        of_rows = gl.load(scales + rows * 0)
    else:
        of_rows = gl.load(scales + rows, mask=inside, other=0.0)
    return of_rows[:, None] * gl.load(w_scales + weight_row)[None, :]


@gluon.jit
def _sums(n, tiles, WHICH: gl.constexpr, FIXED: gl.constexpr):
    """Sums of 64 pairs, ``[64, 128]``, from stage ``n`` on."""
    inputs, weights, ready, empty = tiles
    zeros = gl.full([64, 128], 0.0, gl.float32, layout=_SUMS)
    acc = zeros
    for step in range(FIXED.depth // 128):
        stage = (n + step) % _STAGES
        mbarrier.wait(ready.index(stage), (n + step) // _STAGES & 1)
        pairs = inputs.index(stage).slice(WHICH * 64, 64, dim=0)
        sums = hopper.warpgroup_mma(pairs, weights.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        sums = warpgroup_mma_wait(0, deps=(sums,))
        mbarrier.arrive(empty.index(stage), count=1)
        acc = acc + sums
    return acc


@gluon.jit
def _consume(
    out, scales, w_scales, pairs, table, num_tiles, tiles, WHICH: gl.constexpr, FIXED: gl.constexpr
):  # fmt: skip
    """Consumer ``WHICH``: 64 pairs of every tile, if it has so many."""
    STEPS: gl.constexpr = FIXED.depth // 128
    _inputs, _weights, ready, empty = tiles
    lanes = WHICH * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, _SUMS))
    stored = WHICH * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, STORED))
    n = 0
    expert, first, end = _block_of(table, gl.program_id(0), FIXED)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        # the next tile's, long before they are needed
        next_tile = gl.minimum(tile + gl.num_programs(0), num_tiles - 1)
        next_expert, next_first, next_end = _block_of(table, next_tile, FIXED)
        if first + WHICH * 64 < end:
            column = _column(tile, FIXED)
            places, inside = first + lanes, first + lanes < end
            out_rows, out_inside = first + stored, first + stored < end
            if not FIXED.gated:
                out_rows = gl.load(pairs + out_rows, mask=out_inside, other=0)
            rows = _inputs_of(pairs, places, inside, FIXED)
            acc = _sums(n, tiles, WHICH, FIXED)
            acc = acc * _scales(scales, w_scales, rows, inside, expert, column, FIXED)
            if FIXED.gated:
                store_inside(out, out_rows, silu_mul(acc, 64), out_inside, column, 64, FIXED.width)
            else:
                store_inside(out, out_rows, acc, out_inside, column, 128, FIXED.width)
        else:
            for step in range(STEPS):
                stage = (n + step) % _STAGES
                mbarrier.wait(ready.index(stage), (n + step) // _STAGES & 1)
                mbarrier.arrive(empty.index(stage), count=1)
        n += STEPS
        expert, first, end = next_expert, next_first, next_end


@GluonKernel
def _fp8_experts_hopper_kernel(
    values, scales, w_desc, w_scales, out, pairs, first_place, block_expert, block_first, num_blocks,
    FIXED: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    release(EARLY)
    inputs = gl.allocate_shared_memory(gl.float8e4nv, [_STAGES, 128, 128], _TILE)
    weights = gl.allocate_shared_memory(gl.float8e4nv, [_STAGES, 128, 128], _TILE)
    ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_STAGES):
        mbarrier.init(ready.index(i), count=2)
        mbarrier.init(empty.index(i), count=2)
    wait(EARLY)  # the other parts' warps start when this one's have returned from it
    num_tiles = gl.load(num_blocks) * tiles_across(FIXED.width, FIXED.gated)
    table = (first_place, block_expert, block_first)
    tiles = (inputs, weights, ready, empty)
    if gl.program_id(0) < num_tiles:
        gl.warp_specialize(
            [
                (_consume, (out, scales, w_scales, pairs, table, num_tiles, tiles, 0, FIXED)),
                (_consume, (out, scales, w_scales, pairs, table, num_tiles, tiles, 1, FIXED)),
                (_gather, (values, pairs, table, num_tiles, inputs, ready, empty, FIXED)),
                (_produce, (w_desc, table, num_tiles, weights, ready, empty, FIXED)),
            ],
            [4, 4, 1],
            [_CONSUMER_REGISTERS, _GATHERER_REGISTERS, _PRODUCER_REGISTERS],
        )  # fmt: skip


def takes(down: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel exists for inputs in ``dtype`` of experts of ``down [E, H, I]``: in bfloat16, with H and I
    multiples of 128, on compute capability 9."""
    whole = down.shape[1] % 128 == 0 and down.shape[2] % 128 == 0
    return dtype == torch.bfloat16 and whole and runs_gluon(down.device)


def experts_hopper_product(
    inputs: tuple[Tensor, Tensor], matrices: Fp8Matrix, out: Tensor, grouping: tuple[Tensor, ...], top_k: int
) -> None:
    """One product of all experts that the kernel ``takes``, and with two weight rows for an output, SwiGLU.

    Args:
        inputs: e4m3 values and their scales, by token for the gated product, else by place.
        out: ``[P, I]`` by place for the gated product, else ``[P, H]`` by pair; bfloat16.
        grouping: of ``group_many`` by ``ROWS``.
        top_k: pairs of a token.
    """
    (values, scales), (weight, weight_scale, input_scale, _block) = inputs, matrices
    (num_experts, matrix_rows, depth), width = weight.shape, out.shape[1]
    pairs, first_place, block_expert, block_first, num_blocks = grouping
    fixed = Fixed(depth, width, top_k, input_scale is not None, matrix_rows == 2 * width)
    w_desc = TensorDescriptor(
        weight.view(num_experts * matrix_rows, depth), [num_experts * matrix_rows, depth], [depth, 1], [64, 128],
        _TILE.value,
    )  # fmt: skip
    _fp8_experts_hopper_kernel[(min(MULTIPROCESSORS, len(block_expert) * tiles_across(width, fixed.gated)),)](
        values, scales, w_desc, weight_scale, out.view(torch.int32), pairs, first_place, block_expert, block_first,
        num_blocks, FIXED=fixed, num_warps=4, maxnreg=_ALL_REGISTERS, **early_launch(out.device),
    )  # fmt: skip


def many_pairs(x: Tensor, ids: Tensor, up: Fp8Matrix, down: Fp8Matrix) -> Tensor:
    """Compute the output of every pair's expert for its token, for experts that the kernel ``takes``.

    Args:
        x: ``[T, H]``.
        ids: ``[T, top_k]`` int32; -1 means no expert.
        up, down: ``[E, 2 * I, H]`` (gate rows, then up rows) and ``[E, H, I]``, with a scale for each row.

    Returns:
        ``[T * top_k, H]``; rows of pairs without an expert are not written.
    """
    (num_experts, hidden_size, width), top_k = down.weight.shape, ids.shape[1]
    hidden, out = (torch.empty((ids.numel(), size), dtype=x.dtype, device=x.device) for size in (width, hidden_size))
    inputs = prepare_pass(x, up.input_scale, block=0)
    grouping, _num_blocks = group_many(ids, num_experts, ROWS, inputs)
    experts_hopper_product(inputs.outputs, up, hidden, grouping, top_k)
    experts_hopper_product(quantize_inputs_triton(hidden, down.input_scale, block=0), down, out, grouping, top_k)
    return out
