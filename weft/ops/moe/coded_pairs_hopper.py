"""INT4 experts of very few tokens on Hopper, in Gluon: pair by pair.

Job: the up and the down product with the parts of ``linear/coded_few_rows_hopper.py``. Does not know: routing, the sum
over a token's experts.

The down product's words are loaded before the up product has ended. Its programs need the ids of their experts, which
a kernel of this step has written. ``fp8_pairs_hopper.py`` says why these are visible.
"""

from torch import Tensor
from triton.experimental.gluon import language as gl

from weft.ops.codes import CodedMatrix
from weft.ops.linear.coded_few_rows_hopper import (
    TOKENS,
    Fixed,
    few_rows_product,
    inputs_layout,
    request,
    store,
    takes,
)
from weft.ops.linear.few_rows import CodedRows
from weft.ops.triton.early_launch import ALWAYS, early_launch, pass_on, release, wait
from weft.ops.triton.hopper import GluonKernel, runs_gluon
from weft.ops.triton.sizes import cdiv

UP = CodedRows(32, 4, 3)
DOWN = CodedRows(32, 1, 2)


@GluonKernel
def _coded_pairs_hopper_kernel(
    inputs, words, weight_scale, out, ids, stride_inputs,
    FIXED: gl.constexpr, SHARED_BY: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Some outputs of one pair. ``SHARED_BY``: consecutive pairs that have the same inputs."""
    if FIXED.gated:
        pass_on(EARLY, ALWAYS)
    else:
        release(EARLY, ALWAYS)
    column, pair = gl.program_id(0), gl.program_id(1)
    expert = gl.load(ids + pair, cache_modifier=".cg").to(gl.int64)
    if expert >= 0:
        WIDTH: gl.constexpr = FIXED.width // 2 if FIXED.gated else FIXED.width
        words += expert * (FIXED.chunks * FIXED.width * 16)
        weight_scale += expert * (FIXED.chunks // FIXED.group * FIXED.width)
        requested = request(words, weight_scale, column, 0, FIXED.chunks, FIXED)
        if not FIXED.gated:
            wait(EARLY)
        lanes = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, gl.SliceLayout(2, inputs_layout(TOKENS, FIXED.warps))))
        x_rows = (pair // SHARED_BY + lanes * 0).to(gl.int64) * stride_inputs
        total = few_rows_product(words, weight_scale, requested, inputs, x_rows, 0, FIXED.chunks, FIXED)
        store(total, out, out + pair.to(gl.int64) * WIDTH, column, 1, 0, WIDTH, FIXED.gated, FIXED)
    elif not FIXED.gated:
        wait(EARLY)


def takes_pairs(gate_up: CodedMatrix, down: CodedMatrix) -> bool:
    """Whether the kernel exists for gated experts with these matrices."""
    gated = gate_up.words.shape[2] == 2 * down.columns
    return gated and takes(gate_up) and takes(down) and runs_gluon(down.words.device)


def pairs_hopper_product(inputs: Tensor, matrix: CodedMatrix, out: Tensor, ids: Tensor, config: CodedRows) -> None:
    """Write ``out[pair]``, the product of the matrix of the pair's expert. The gated product is launched after a kernel
    that waits, and the down product directly after the gated one."""
    _experts, chunks, rows, _ = matrix.words.shape
    gated = rows == 2 * out.shape[1]
    group = (matrix.group or matrix.columns) // 128
    fixed = Fixed(chunks, rows, config.rows, config.warps, config.held, 1, group, gated)
    _coded_pairs_hopper_kernel[(cdiv(out.shape[1], config.rows // 2 if gated else config.rows), ids.numel())](
        inputs, matrix.words, matrix.scales, out, ids, inputs.stride(0),
        FIXED=fixed, SHARED_BY=ids.numel() // inputs.shape[0], num_warps=config.warps, **early_launch(ids.device),
    )  # fmt: skip
