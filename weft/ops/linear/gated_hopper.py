"""``silu(x G^T) * (x U^T)`` of many rows in one launch, for Hopper: the gate is the product's epilogue.

Job: ``linearsilu_mul`` in Gluon, and for ``invariant.py`` also ``linear``. Owns: the shape of its tiles, who waits for
whom, and where it pays. Does not know: layers.

A program goes through tiles of 256 rows by 96 outputs, or by 192 without a gate. A *producer* warp requests rows and
weights from the copy engine into a ring of stages, 64 inner elements each. It requests the first weights before the
previous kernel has ended. Two *consumers*, four warps with 128 rows each, multiply and apply the epilogue, while the
producer runs ahead into the next tile. The tile is the largest that the consumers' registers hold.
"""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from weft.ops.triton.early_launch import early_launch, release, wait
from weft.ops.triton.gluon import async_load
from weft.ops.triton.hopper import BOX, GluonKernel, runs_gluon
from weft.ops.triton.hopper_rows import STORED, silu_mul_halves, store_inside
from weft.ops.triton.sizes import MULTIPROCESSORS, cdiv

_INNER = gl.constexpr(64)
_STAGES = gl.constexpr(4)

_ALL_REGISTERS = 168
_CONSUMER_REGISTERS = gl.constexpr(240)
_PRODUCER_REGISTERS = gl.constexpr(24)

_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
_SUMS_64 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))


@gluon.jit
def _new_ring():
    """Barriers of the stages: what has arrived, and what both consumers have read."""
    ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    return ready, empty


@gluon.jit
def _fetch_weights(w_desc, column, k, wide, narrow, ready, WIDTH: gl.constexpr, GATED: gl.constexpr):
    """A step's weights of 96 outputs: 64 rows of the gate and 64 of the up projection, and the next 32 of both. Without
    a gate, of 192 outputs: 128 rows, and the next 64."""
    for part in gl.static_range(2):
        row = column + part * (WIDTH if GATED else 64)
        for half in gl.static_range(2):
            box = wide.slice(part * 64 + half * 32, 32, dim=0)
            async_load(w_desc, [row + half * 32, k], ready, box)
        after = row + 64 if GATED else column + 128 + part * 32
        async_load(w_desc, [after, k], ready, narrow.slice(part * 32, 32, dim=0))


@gluon.jit
def _produce(
    x_desc, w_desc, num_tiles, row_tiles, x_tiles, wide, narrow, ready, empty,
    STEPS: gl.constexpr, WIDTH: gl.constexpr, GATED: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The producer. Tiles that follow one another have the same weights."""
    COLUMNS: gl.constexpr = 96 if GATED else 192
    BYTES: gl.constexpr = (256 + 192) * _INNER * 2
    first = gl.program_id(0)
    for i in gl.static_range(_STAGES):
        mbarrier.expect(ready.index(i), BYTES)
        _fetch_weights(
            w_desc,
            first // row_tiles * COLUMNS,
            i * _INNER,
            wide.index(i),
            narrow.index(i),
            ready.index(i),
            WIDTH,
            GATED,
        )
    wait(EARLY)  # here for all: what the consumers write depends on rows that are fetched behind this
    n = 0
    for tile in range(first, num_tiles, gl.num_programs(0)):
        row, column = tile % row_tiles * 256, tile // row_tiles * COLUMNS
        for step in range(STEPS):
            stage = n % _STAGES
            if n >= _STAGES:
                mbarrier.wait(empty.index(stage), (n // _STAGES & 1) ^ 1)
                mbarrier.expect(ready.index(stage), BYTES)
                _fetch_weights(
                    w_desc, column, step * _INNER, wide.index(stage), narrow.index(stage), ready.index(stage), WIDTH,
                    GATED,
                )  # fmt: skip
            for part in gl.static_range(4):
                async_load(
                    x_desc, [row + part * 64, step * _INNER], ready.index(stage), x_tiles.index(stage * 4 + part)
                )
            n += 1


@gluon.jit
def _finish(out, wide, narrow, row, column, num_rows, WIDTH: gl.constexpr, GATED: gl.constexpr):
    """64 rows of a tile's outputs."""
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, STORED))
    inside = rows < num_rows
    if GATED:
        store_inside(out, rows, silu_mul_halves(wide, 64), inside, column, 64, WIDTH)
        store_inside(out, rows, silu_mul_halves(narrow, 32), inside, column + 64, 32, WIDTH)
    else:
        store_inside(out, rows, wide, inside, column, 128, WIDTH)
        store_inside(out, rows, narrow, inside, column + 128, 64, WIDTH)


@gluon.jit
def _consume(
    out, num_rows, num_tiles, row_tiles, x_tiles, wide, narrow, ready, empty, WHICH: gl.constexpr, STEPS: gl.constexpr,
    WIDTH: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Consumer ``WHICH``: 128 rows of every tile. ``top`` and ``low`` are its first and last 64: the epilogue of one
    does not need registers for both."""
    n = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        top = gl.full([64, 128], 0.0, gl.float32, layout=_SUMS)
        low = gl.full([64, 128], 0.0, gl.float32, layout=_SUMS)
        top_2 = gl.full([64, 64], 0.0, gl.float32, layout=_SUMS_64)
        low_2 = gl.full([64, 64], 0.0, gl.float32, layout=_SUMS_64)
        for step in range(STEPS):
            stage = n % _STAGES
            mbarrier.wait(ready.index(stage), n // _STAGES & 1)
            x_top, x_low = x_tiles.index(stage * 4 + WHICH * 2), x_tiles.index(stage * 4 + WHICH * 2 + 1)
            top = hopper.warpgroup_mma(x_top, wide.index(stage).permute((1, 0)), top, is_async=True)
            low = hopper.warpgroup_mma(x_low, wide.index(stage).permute((1, 0)), low, is_async=True)
            top_2 = hopper.warpgroup_mma(x_top, narrow.index(stage).permute((1, 0)), top_2, is_async=True)
            low_2 = hopper.warpgroup_mma(x_low, narrow.index(stage).permute((1, 0)), low_2, is_async=True)
            top, low, top_2, low_2 = warpgroup_mma_wait(4, deps=(top, low, top_2, low_2))
            if step > 0:
                mbarrier.arrive(empty.index((n - 1) % _STAGES), count=1)
            n += 1
        top, low, top_2, low_2 = warpgroup_mma_wait(0, deps=(top, low, top_2, low_2))
        mbarrier.arrive(empty.index((n - 1) % _STAGES), count=1)
        row, column = tile % row_tiles * 256 + WHICH * 128, tile // row_tiles * (96 if GATED else 192)
        _finish(out, top, top_2, row, column, num_rows, WIDTH, GATED)
        _finish(out, low, low_2, row + 64, column, num_rows, WIDTH, GATED)


@functools.partial(GluonKernel, do_not_specialize=["num_rows"])
def _gated_hopper_kernel(
    x_desc, w_desc, out, num_rows, HIDDEN: gl.constexpr, WIDTH: gl.constexpr, GATED: gl.constexpr, EARLY: gl.constexpr
):  # fmt: skip
    release(EARLY)
    COLUMNS: gl.constexpr = 96 if GATED else 192
    row_tiles = (num_rows + 255) // 256
    num_tiles = row_tiles * ((WIDTH + COLUMNS - 1) // COLUMNS)
    STEPS: gl.constexpr = HIDDEN // _INNER
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [_STAGES * 4, 64, _INNER], BOX)
    wide = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, 128, _INNER], BOX)
    narrow = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, 64, _INNER], BOX)
    ready, empty = _new_ring()
    gl.warp_specialize(
        [
            (_consume, (out, num_rows, num_tiles, row_tiles, x_tiles, wide, narrow, ready, empty, 0, STEPS, WIDTH,
                       GATED)),
            (_consume, (out, num_rows, num_tiles, row_tiles, x_tiles, wide, narrow, ready, empty, 1, STEPS, WIDTH,
                       GATED)),
            (_produce, (x_desc, w_desc, num_tiles, row_tiles, x_tiles, wide, narrow, ready, empty, STEPS, WIDTH, GATED,
                       EARLY)),
        ],
        [4, 1],
        [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )  # fmt: skip


LEAST_FILLED = 0.92
"""Least work for this kernel. With less the matrix library, which has smaller tiles, is as fast or faster
(``kernels-gated-linear-h200.json``)."""


def filled(num_rows: int, width: int, columns: int = 96) -> float:
    """The part of the tiles of ``columns``, over all waves of programs, that so many rows and outputs fill."""
    tiles = cdiv(num_rows, 256) * cdiv(width, columns)
    return num_rows * width / (256 * columns * MULTIPROCESSORS * cdiv(tiles, MULTIPROCESSORS))


def takes_gated(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel exists for ``x [T, K]`` and ``weight [2 * I, K]``, and is faster."""
    return takes(x, weight, gated=True) and filled(x.shape[0], weight.shape[0] // 2) >= LEAST_FILLED


def takes(x: Tensor, weight: Tensor, *, gated: bool) -> bool:
    """Whether the kernel exists for ``x [T, K]`` and ``weight [N, K]``. It needs bfloat16 on compute capability 9, K a
    multiple of 64 that fills a ring, outputs a multiple of 32, and operands aligned to 16 bytes."""
    width, inner = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    aligned = x.stride(0) % 8 == x.storage_offset() % 8 == weight.storage_offset() % 8 == 0
    return (
        runs_gluon(x.device)
        and x.dtype == weight.dtype == torch.bfloat16
        and inner % _INNER.value == 0
        and inner >= _STAGES.value * _INNER.value
        and width % 32 == 0
        and x.stride(1) == 1
        and weight.is_contiguous()
        and aligned
    )


def gated_linear_hopper(x: Tensor, weight: Tensor, *, gated: bool = True) -> Tensor:
    """``linearsilu_mul`` without a bias, of tensors that the kernel ``takes``: ``[T, I]``; ``linear`` if not
    ``gated``."""
    num_rows, width = x.shape[0], weight.shape[0] // (2 if gated else 1)
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    x_desc = TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [64, 64], BOX.value)
    w_desc = TensorDescriptor(weight, list(weight.shape), [weight.shape[1], 1], [32, 64], BOX.value)
    programs = min(MULTIPROCESSORS, cdiv(num_rows, 256) * cdiv(width, 96 if gated else 192))
    _gated_hopper_kernel[(programs,)](
        x_desc, w_desc, out.view(torch.int32), num_rows, HIDDEN=x.shape[1], WIDTH=width, GATED=gated,
        num_warps=4, maxnreg=_ALL_REGISTERS, **early_launch(x.device),
    )  # fmt: skip
    return out
