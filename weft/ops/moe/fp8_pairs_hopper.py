"""FP8 experts of very few tokens on Hopper, in Gluon: the launches of ``fp8_pairs.py``.

Job: the up and the down product, pair by pair, with the parts of ``linear/fp8_few_rows_hopper.py``. Does not know:
routing, the sum over a token's experts.

The down product's weights are loaded before the up product has ended. Its programs need the ids of their experts, which
a kernel of this step has written. The ids are visible because the up product lets these programs start only after its
own wait (``pass_on`` of ``early_launch.py``).
"""

from torch import Tensor
from triton.experimental.gluon import language as gl

from weft.ops.fp8 import Fp8Matrix
from weft.ops.linear.fp8_few_rows import HopperRows
from weft.ops.linear.fp8_few_rows_hopper import (
    Fixed,
    arrival_layout,
    load_inputs,
    load_scales,
    load_weights,
    quantized_product,
    registers_hold,
    store_outputs,
)
from weft.ops.triton.early_launch import ALWAYS, early_launch, pass_on, release, wait
from weft.ops.triton.hopper import GluonKernel, runs_gluon
from weft.ops.triton.sizes import cdiv

UP = HopperRows(16, 8, None)
DOWN = HopperRows(32, 4, None)


@GluonKernel
def _fp8_pairs_hopper_kernel(
    inputs, input_scale, weight, weight_scale, out, ids, stride_inputs,
    FIXED: gl.constexpr, SHARED_BY: gl.constexpr, WIDTH: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Some outputs of one pair. ``SHARED_BY``: consecutive pairs that have the same inputs."""
    FIRST: gl.constexpr = FIXED.gated
    if FIRST:
        pass_on(EARLY, ALWAYS)
    else:
        release(EARLY, ALWAYS)
    block, pair = gl.program_id(0), gl.program_id(1)
    expert = gl.load(ids + pair, cache_modifier=".cg").to(gl.int64)
    if expert >= 0:
        MATRIX: gl.constexpr = 2 * WIDTH if FIRST else WIDTH
        SCALES: gl.constexpr = (
            (MATRIX + FIXED.block - 1) // FIXED.block * (FIXED.depth // 128) if FIXED.block else MATRIX
        )
        weights = load_weights(weight + expert * (MATRIX * FIXED.depth), block, WIDTH, FIXED, FIRST, False)
        scales = load_scales(weight_scale + expert * SCALES, block, WIDTH, FIXED)
        if not FIRST:
            wait(EARLY)
        row = inputs + (pair // SHARED_BY).to(gl.int64) * stride_inputs
        tiles = load_inputs(row, 1, 0, FIXED, arrival_layout(1, FIXED.warps))
        total = quantized_product(weights, scales, tiles, input_scale, FIXED)
        store_outputs(total, out, out + pair.to(gl.int64) * WIDTH, block, 1, WIDTH, 0, FIXED, FIRST)
    elif not FIRST:
        wait(EARLY)


def takes_pairs(down: Tensor) -> bool:
    """Whether the kernel exists for experts of ``down [E, H, I]``."""
    _num_experts, hidden_size, width = down.shape
    held = registers_hold(UP.rows, UP.warps, hidden_size) and registers_hold(DOWN.rows, DOWN.warps, width)
    return held and runs_gluon(down.device)


def pairs_hopper_product(inputs: Tensor, matrices: Fp8Matrix, out: Tensor, ids: Tensor) -> None:
    """``pairs_product`` of ``fp8_pairs.py``. The gated product is launched after a kernel that waits, the down product
    directly after the gated one."""
    weight, weight_scale, input_scale, block = matrices
    width, depth = out.shape[1], weight.shape[2]
    gated = weight.shape[1] == 2 * width
    config = UP if gated else DOWN
    fixed = Fixed(depth, config.rows, config.warps, 1, block, input_scale is not None, gated)
    _fp8_pairs_hopper_kernel[(cdiv(width, config.rows // 2 if gated else config.rows), ids.numel())](
        inputs, inputs if input_scale is None else input_scale, weight, weight_scale, out, ids, inputs.stride(0),
        FIXED=fixed, SHARED_BY=ids.numel() // inputs.shape[0], WIDTH=width, num_warps=config.warps,
        maxnreg=config.max_registers, **early_launch(ids.device),
    )  # fmt: skip
