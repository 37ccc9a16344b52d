"""FP8 experts of very few tokens: every (token, expert) pair by itself, its inputs quantised as they arrive.

Job: the up and the down product of ``fp8_experts.py`` where pairs hardly share experts: nothing is grouped, and no pass
over the inputs comes first. Does not know: routing, the sum over a token's experts (``combine.py``).

A program multiplies some weight rows of one expert with one row of inputs. Its groups of 128 inputs are the rows of a
matrix that is quantised once and stays in registers. A tensor core takes 16 rows at a time anyway, so a step multiplies
all groups with 128 columns of weights. The step keeps the row of the group that belongs to these columns. Scales are
applied once, at the end, when these rows are added up in float32.
"""

import triton
import triton.language as tl
from torch import Tensor

from weft.ops.fp8 import Fp8Matrix
from weft.ops.fp8.quantize import scale_of, to_e4m3
from weft.ops.linear.few_rows import load_inner, rows_of_block
from weft.ops.moe import ExpertExtras
from weft.ops.moe.blocks import Tile, gated_activation
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2


@triton.jit
def _row_product(
    inputs, input_scale, weight, weight_scale, rows,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr, STATIC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``[ROWS]`` float32: some weight rows times ``inputs [GROUPS, 128]``, zero beyond ``DEPTH``."""
    STEPS: tl.constexpr = (DEPTH + 127) // 128
    GROUPS: tl.constexpr = inputs.shape[0]
    group = tl.arange(0, GROUPS)
    inner = tl.arange(0, 128)
    wide = inputs.to(tl.float32)
    if BLOCK:
        scale_at = (rows // BLOCK * STEPS)[None, :] + tl.minimum(group, STEPS - 1)[:, None]
        of_weights = tl.load(weight_scale + scale_at)
    else:
        of_weights = tl.load(weight_scale + rows)[None, :]
    if STATIC:
        of_inputs = tl.load(input_scale) + tl.zeros([GROUPS], dtype=tl.float32)
    elif BLOCK:
        of_inputs = scale_of(tl.max(tl.abs(wide), 1))
    else:
        of_inputs = scale_of(tl.max(tl.abs(wide))) + tl.zeros([GROUPS], dtype=tl.float32)
    values = to_e4m3(wide, of_inputs[:, None])
    weight_rows = weight + rows.to(tl.int64)[:, None] * DEPTH
    sums = tl.zeros([GROUPS, rows.shape[0]], dtype=tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        columns = step * 128 + inner
        tile = load_inner(weight_rows + columns[None, :], (columns < DEPTH)[None, :], DEPTH % 128 == 0)
        sums = tl.where(group[:, None] == step, tl.dot(values, tl.trans(tile)), sums)
    return tl.sum(sums * of_inputs[:, None] * of_weights, 0)


@jit
def _fp8_pairs_kernel(
    inputs, input_scale, weight, weight_scale, out, ids, stride_inputs, alpha, limit, up_offset, gate_cap, up_cap,
    SHARED_BY: tl.constexpr, GATED: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    STATIC: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some outputs of one pair. ``SHARED_BY``: consecutive pairs that have the same inputs."""
    enter(EARLY)
    pair = tl.program_id(1)
    expert = tl.load(ids + pair).to(tl.int64)
    row = inputs + (pair // SHARED_BY).to(tl.int64) * stride_inputs
    k = tl.arange(0, GROUPS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    arrived = tl.load(row + k, mask=k < DEPTH, other=0.0)  # does not wait for the expert
    if expert >= 0:
        MATRIX: tl.constexpr = 2 * WIDTH if GATED else WIDTH
        SCALES: tl.constexpr = (MATRIX + BLOCK - 1) // BLOCK * ((DEPTH + 127) // 128) if BLOCK else MATRIX
        result = _row_product(
            arrived, input_scale, weight + expert * (MATRIX * DEPTH), weight_scale + expert * SCALES,
            rows_of_block(tl.program_id(0), WIDTH, ROWS, GATED), DEPTH, BLOCK, STATIC, STAGES,
        )  # fmt: skip
        OUTPUTS: tl.constexpr = ROWS // 2 if GATED else ROWS
        if GATED:
            gate, up = tl.split(tl.reshape(result, [OUTPUTS, 2]))
            result = gated_activation(gate, up, alpha, limit, up_offset, gate_cap, up_cap)
        columns = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        stored = result.to(out.dtype.element_ty)
        tl.store(out + pair.to(tl.int64) * WIDTH + columns, stored, mask=columns < WIDTH)


def pairs_product(
    inputs: Tensor, matrices: Fp8Matrix, out: Tensor, ids: Tensor, tile: Tile, extras: ExpertExtras
) -> None:
    """``out[pair] = weight[ids[pair]] inputs``, of a gated product the activation included.

    Args:
        inputs: ``[T, K]``, a row for each token, or ``[T * top_k, K]``, one for each pair.
        matrices: ``[E, N, K]``, or ``[E, 2 * N, K]``: gate rows, then up rows.
        out: ``[T * top_k, N]``; rows of pairs without an expert (id -1) are left as they are.
        ids: ``[T, top_k]`` int32.
        tile: of which ``columns``, ``warps`` and ``stages`` count.
        extras: the activation.
    """
    weight, weight_scale, input_scale, block = matrices
    width, depth = out.shape[1], weight.shape[2]
    gated = weight.shape[1] == 2 * width
    _fp8_pairs_kernel[(cdiv(width, tile.columns), ids.numel())](
        inputs, inputs if input_scale is None else input_scale, weight, weight_scale, out, ids, inputs.stride(0),
        *extras.activation,
        SHARED_BY=ids.numel() // inputs.shape[0], GATED=gated, DEPTH=depth, WIDTH=width, BLOCK=block,
        STATIC=input_scale is not None, GROUPS=max(16, next_power_of_2(cdiv(depth, 128))),
        ROWS=2 * tile.columns if gated else tile.columns, STAGES=tile.stages, num_warps=tile.warps,
        **early_launch(ids.device),
    )  # fmt: skip
