"""FP8 products of many pairs of each expert, for Hopper, in Gluon: operands arrive while others are multiplied.

Job: what ``fp8_experts.py`` does up to the sum, where experts have many pairs. Owns: the shape of its tiles, and who
waits for whom. Does not know: routing, how pairs are grouped or summed.

A program goes through tiles of 128 pairs of one expert by two *halves* of its weights' rows: outputs, or the gate and
the up rows of some hidden values. With a scale for each row a half has 64 rows, and a consumer multiplies with both at
once. With scales by block it has 128, which share a scale, and is multiplied with by itself. A ring of stages holds 128
inner elements of both operands each. Four warps, the *gatherers*, copy inputs, whose rows lie where the tokens are.
Another warp, the *producer*, requests weights from the copy engine. Two *consumers*, four warps with 64 pairs each,
multiply. Sums of 128 products are added up in float32: while one consumer adds, the products of the other run.
Gatherers and producer run ahead into the next tile.

Who waits for whom, by barriers of every stage::

    ready   the gatherers, when their copies have arrived, and the copy engine  ->  the consumers
    empty   both consumers                                                      ->  gatherers and producer
"""

import functools
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
from weft.ops.triton.hopper_rows import STORED, silu_mul, silu_mul_halves, store_inside
from weft.ops.triton.sizes import MULTIPROCESSORS

ROWS = 128
"""Pairs of a block."""

_ALL_REGISTERS = 128
_CONSUMER_REGISTERS = gl.constexpr(216)
_GATHERER_REGISTERS = gl.constexpr(56)
_PRODUCER_REGISTERS = gl.constexpr(24)

_TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
_COPIED = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))


class Fixed(NamedTuple):
    """Compile-time parameters of a product.

    Attributes:
        depth: inner elements.
        block: inner elements and weight rows that share a scale, or 0: a scale for each row.
        width: outputs of an expert; with ``gated``, hidden values, each of two weight rows.
        top_k: pairs of a token.
        static: one scale of all inputs is given.
        gated: the up product, of inputs by token. Else inputs are in the order of places, and outputs in that of pairs.
    """

    depth: int
    block: int
    width: int
    top_k: int
    static: bool
    gated: bool


@gluon.constexpr_function
def half_of(block):
    """Weight rows of half a tile."""
    return block or 64


@gluon.constexpr_function
def stages_of(block):
    """Stages of the ring. Half of them may be under way when the gatherers hand over an earlier one."""
    return 4 if block else 6


@gluon.constexpr_function
def columns_of(block, gated):
    """Outputs of a tile."""
    return half_of(block) * (1 if gated else 2)


@gluon.jit
def _block_of(table, tile, FIXED: gl.constexpr):
    """The expert of a tile, and the places of its pairs: from the first one up to the end of all of the expert's."""
    first_place, block_expert, block_first = table
    block = tile // (FIXED.width // columns_of(FIXED.block, FIXED.gated))
    expert = gl.load(block_expert + block)
    return expert, gl.load(block_first + block), gl.load(first_place + expert + 1)


@gluon.jit
def _column(tile, FIXED: gl.constexpr):
    """The first output of a tile."""
    COLUMNS: gl.constexpr = columns_of(FIXED.block, FIXED.gated)
    return tile % (FIXED.width // COLUMNS) * COLUMNS


@gluon.jit
def _inputs_of(pairs, places, inside, FIXED: gl.constexpr):
    """The rows of the inputs at some places."""
    rows = places
    if FIXED.gated:
        rows = gl.load(pairs + places, mask=inside, other=0) // FIXED.top_k
    return rows


@gluon.jit
def _hand_over(ready, n, UNDER_WAY: gl.constexpr, STAGES: gl.constexpr):
    """Tell the consumers that the inputs of stage ``n`` are there, once they are."""
    wait_group(UNDER_WAY)
    fence_async_shared()  # the matrix units read by another path than these copies take
    mbarrier.arrive(ready.index(n % STAGES), count=1)


@gluon.jit
def _gather(values, pairs, table, num_tiles, inputs, ready, empty, FIXED: gl.constexpr):
    """The gatherers."""
    STAGES: gl.constexpr = stages_of(FIXED.block)
    UNDER_WAY: gl.constexpr = STAGES // 2
    lanes = gl.arange(0, 128, layout=gl.SliceLayout(1, _COPIED))
    inner = gl.arange(0, 128, layout=gl.SliceLayout(0, _COPIED))[None, :]
    n = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        _expert, first, end = _block_of(table, tile, FIXED)
        inside = first + lanes < end
        rows = _inputs_of(pairs, first + lanes, inside, FIXED).to(gl.int64) * FIXED.depth
        for step in range(FIXED.depth // 128):
            stage = n % STAGES
            mbarrier.wait(empty.index(stage), (n // STAGES & 1) ^ 1)
            threads_load(inputs.index(stage), values + (rows[:, None] + (step * 128 + inner)), inside[:, None])
            commit_group()
            if n >= UNDER_WAY:
                _hand_over(ready, n - UNDER_WAY, UNDER_WAY, STAGES)
            n += 1
    for left in gl.static_range(UNDER_WAY, 0, -1):
        if n >= left:
            _hand_over(ready, n - left, left - 1, STAGES)


@gluon.jit
def _produce(w_desc, table, num_tiles, weights, ready, empty, FIXED: gl.constexpr):
    """The producer."""
    STAGES: gl.constexpr = stages_of(FIXED.block)
    HALF: gl.constexpr = half_of(FIXED.block)
    MATRIX: gl.constexpr = (2 if FIXED.gated else 1) * FIXED.width
    BEHIND: gl.constexpr = FIXED.width if FIXED.gated else HALF
    n = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, _first, _end = _block_of(table, tile, FIXED)
        row = expert * MATRIX + _column(tile, FIXED)
        for step in range(FIXED.depth // 128):
            stage = n % STAGES
            mbarrier.wait(empty.index(stage), (n // STAGES & 1) ^ 1)
            mbarrier.expect(ready.index(stage), 2 * HALF * 128)
            box = weights.index(stage)
            async_load(w_desc, [row, step * 128], ready.index(stage), box.slice(0, HALF, dim=0))
            async_load(w_desc, [row + BEHIND, step * 128], ready.index(stage), box.slice(HALF, HALF, dim=0))
            n += 1


@gluon.jit
def _scales(scales, w_scales, rows, inside, expert, column, FIXED: gl.constexpr):
    """The products of scales that a consumer's sums are multiplied by, ``[64, 128]``, with a scale for each row."""
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
def _wait_for(ready, n, STAGES: gl.constexpr):
    """The stage of step ``n``, once its operands are there."""
    stage = n % STAGES
    mbarrier.wait(ready.index(stage), n // STAGES & 1)
    return stage


@gluon.jit
def _multiply(inputs, weights):
    """``[64, 128]``: 64 pairs by 128 weight rows and inner elements."""
    zeros = gl.full([64, 128], 0.0, gl.float32, layout=_SUMS)
    sums = hopper.warpgroup_mma(inputs, weights.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=(sums,))


@gluon.jit
def _row_sums(n, tiles, WHICH: gl.constexpr, FIXED: gl.constexpr):
    """Sums of 64 pairs, ``[64, 128]``, from stage ``n`` on, with a scale for each row."""
    STAGES: gl.constexpr = stages_of(FIXED.block)
    inputs, weights, ready, empty = tiles
    acc = gl.full([64, 128], 0.0, gl.float32, layout=_SUMS)
    for step in range(FIXED.depth // 128):
        stage = _wait_for(ready, n + step, STAGES)
        sums = _multiply(inputs.index(stage).slice(WHICH * 64, 64, dim=0), weights.index(stage))
        mbarrier.arrive(empty.index(stage), count=1)
        acc = acc + sums
    return acc


@gluon.jit
def _step_scales(scales, w_scales, rows, inside, expert, column, step, stride_group, FIXED: gl.constexpr):
    """Scales by block of one step: of the inputs, ``[64]``, and of both halves of the weight rows."""
    BLOCKS: gl.constexpr = (2 if FIXED.gated else 1) * FIXED.width // 128
    BEHIND: gl.constexpr = FIXED.width // 128 if FIXED.gated else 1
    STEPS: gl.constexpr = FIXED.depth // 128
    of_weights = w_scales + ((expert * BLOCKS + column // 128) * STEPS + step)
    of_rows = gl.load(scales + (step * stride_group + rows), mask=inside, other=0.0)
    return of_rows, gl.load(of_weights), gl.load(of_weights + BEHIND * STEPS)


@gluon.jit
def _block_sums(
    n, tiles, scales, w_scales, rows, inside, expert, column, stride_group, WHICH: gl.constexpr, FIXED: gl.constexpr
):  # fmt: skip
    """Scaled sums of 64 pairs by each half of the weight rows, ``[64, 128]``, with scales by block."""
    STAGES: gl.constexpr = stages_of(FIXED.block)
    STEPS: gl.constexpr = FIXED.depth // 128
    inputs, weights, ready, empty = tiles
    one = gl.full([64, 128], 0.0, gl.float32, layout=_SUMS)
    two = gl.full([64, 128], 0.0, gl.float32, layout=_SUMS)
    of_next = _step_scales(scales, w_scales, rows, inside, expert, column, 0, stride_group, FIXED)
    for step in range(STEPS):
        of_rows, of_one, of_two = of_next
        next_step = gl.minimum(step + 1, STEPS - 1)  # long before they are needed
        of_next = _step_scales(scales, w_scales, rows, inside, expert, column, next_step, stride_group, FIXED)
        stage = _wait_for(ready, n + step, STAGES)
        pairs = inputs.index(stage).slice(WHICH * 64, 64, dim=0)
        sums = _multiply(pairs, weights.index(stage).slice(0, 128, dim=0))
        one = one + sums * (of_rows * of_one)[:, None]
        sums = _multiply(pairs, weights.index(stage).slice(128, 128, dim=0))
        mbarrier.arrive(empty.index(stage), count=1)
        two = two + sums * (of_rows * of_two)[:, None]
    return one, two


@gluon.jit
def _consume(
    out, scales, w_scales, pairs, table, num_tiles, tiles, stride_group, WHICH: gl.constexpr, FIXED: gl.constexpr
):  # fmt: skip
    """Consumer ``WHICH``: 64 pairs of every tile, if it has so many."""
    STAGES: gl.constexpr = stages_of(FIXED.block)
    STEPS: gl.constexpr = FIXED.depth // 128
    WIDTH: gl.constexpr = FIXED.width
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
            if FIXED.block:
                one, two = _block_sums(
                    n, tiles, scales, w_scales, rows, inside, expert, column, stride_group, WHICH, FIXED
                )  # fmt: skip
                if FIXED.gated:
                    store_inside(out, out_rows, silu_mul(one, two), out_inside, column, 128, WIDTH)
                else:
                    store_inside(out, out_rows, one, out_inside, column, 128, WIDTH)
                    store_inside(out, out_rows, two, out_inside, column + 128, 128, WIDTH)
            else:
                acc = _row_sums(n, tiles, WHICH, FIXED)
                acc = acc * _scales(scales, w_scales, rows, inside, expert, column, FIXED)
                if FIXED.gated:
                    store_inside(out, out_rows, silu_mul_halves(acc, 64), out_inside, column, 64, WIDTH)
                else:
                    store_inside(out, out_rows, acc, out_inside, column, 128, WIDTH)
        else:
            for step in range(STEPS):
                mbarrier.arrive(empty.index(_wait_for(ready, n + step, STAGES)), count=1)
        n += STEPS
        expert, first, end = next_expert, next_first, next_end


@functools.partial(GluonKernel, do_not_specialize=["stride_group"])
def _fp8_experts_hopper_kernel(
    values, scales, w_desc, w_scales, out, pairs, first_place, block_expert, block_first, num_blocks, stride_group,
    FIXED: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = stages_of(FIXED.block)
    release(EARLY)
    inputs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], _TILE)
    weights = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 2 * half_of(FIXED.block), 128], _TILE)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=2)
        mbarrier.init(empty.index(i), count=2)
    wait(EARLY)  # the other parts' warps start when this one's have returned from it
    num_tiles = gl.load(num_blocks) * (FIXED.width // columns_of(FIXED.block, FIXED.gated))
    table = (first_place, block_expert, block_first)
    tiles = (inputs, weights, ready, empty)
    if gl.program_id(0) < num_tiles:
        gl.warp_specialize(
            [
                (_consume, (out, scales, w_scales, pairs, table, num_tiles, tiles, stride_group, 0, FIXED)),
                (_consume, (out, scales, w_scales, pairs, table, num_tiles, tiles, stride_group, 1, FIXED)),
                (_gather, (values, pairs, table, num_tiles, inputs, ready, empty, FIXED)),
                (_produce, (w_desc, table, num_tiles, weights, ready, empty, FIXED)),
            ],
            [4, 4, 1],
            [_CONSUMER_REGISTERS, _GATHERER_REGISTERS, _PRODUCER_REGISTERS],
        )  # fmt: skip


def takes(down: Tensor, block: int, dtype: torch.dtype) -> bool:
    """Whether the kernel exists for inputs in ``dtype`` of experts of ``down [E, H, I]``: in bfloat16, if I is a
    multiple of 128 and H one of a tile's outputs, on compute capability 9."""
    whole = down.shape[1] % columns_of(block, gated=False) == 0 and down.shape[2] % 128 == 0
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
    (values, scales), (weight, weight_scale, input_scale, block) = inputs, matrices
    (num_experts, matrix_rows, depth), width = weight.shape, out.shape[1]
    pairs, first_place, block_expert, block_first, num_blocks = grouping
    fixed = Fixed(depth, block, width, top_k, input_scale is not None, matrix_rows == 2 * width)
    most_tiles = len(block_expert) * (width // columns_of(block, fixed.gated))
    w_desc = TensorDescriptor(
        weight.view(num_experts * matrix_rows, depth), [num_experts * matrix_rows, depth], [depth, 1],
        [half_of(block), 128], _TILE.value,
    )  # fmt: skip
    _fp8_experts_hopper_kernel[(min(MULTIPROCESSORS, most_tiles),)](
        values, scales, w_desc, weight_scale, out.view(torch.int32), pairs, first_place, block_expert, block_first,
        num_blocks, scales.stride(-1), FIXED=fixed, num_warps=4, maxnreg=_ALL_REGISTERS, **early_launch(out.device),
    )  # fmt: skip


def many_pairs(x: Tensor, ids: Tensor, up: Fp8Matrix, down: Fp8Matrix) -> Tensor:
    """Compute the output of every pair's expert for its token, for experts that the kernel ``takes``.

    Args:
        x: ``[T, H]``.
        ids: ``[T, top_k]`` int32; -1 means no expert.
        up, down: ``[E, 2 * I, H]`` (gate rows, then up rows) and ``[E, H, I]``.

    Returns:
        ``[T * top_k, H]``; rows of pairs without an expert are not written.
    """
    (num_experts, hidden_size, width), top_k, block = down.weight.shape, ids.shape[1], down.block
    hidden, out = (torch.empty((ids.numel(), size), dtype=x.dtype, device=x.device) for size in (width, hidden_size))
    work = prepare_pass(x, up.input_scale, block=block)
    grouping, _num_blocks = group_many(ids, num_experts, ROWS, work)
    experts_hopper_product(work.outputs, up, hidden, grouping, top_k)
    inputs = quantize_inputs_triton(hidden, down.input_scale, block=block)
    experts_hopper_product(inputs, down, out, grouping, top_k)
    return out
