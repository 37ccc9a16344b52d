"""Linear attention of one token with one decay per head and token, in one launch. The decode operations of Mamba-2 and
lightning attention share this kernel. The state is read once and written once.
"""

from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from weft.ops.triton.chunk_scan import check_rows
from weft.ops.triton.early_launch import ALWAYS, early_launch, release, wait
from weft.ops.triton.elementwise import softplus
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import MULTIPROCESSORS, cdiv, next_power_of_2
from weft.ops.triton.slot_rows import last_row, row_programs


class StepFixed(NamedTuple):
    """Compile-time parameters of the step.

    Attributes:
        num_groups, num_heads, head_k_dim, head_v_dim: G, H, K and V.
        block_k, block_v: of a tile of the state.
        split: a program has one tile of a head's state; otherwise all, one after the other.
        time_steps: decays and write strengths come from Mamba-2's time steps; otherwise from constants of the heads.
    """

    num_groups: int
    num_heads: int
    head_k_dim: int
    head_v_dim: int
    block_k: int
    block_v: int
    split: bool
    time_steps: bool


@jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["state_slots"])
def _step_kernel(
    q, k, v, dt, rate, dt_bias, skip, state, state_slots, out, num_rows,
    stride_q, stride_k, stride_v, stride_dt, dt_low, dt_high,
    FIXED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one head of one row, or of a share of ``num_rows`` rows. ``rate [H]``: log of A with time steps, else the
    log decay."""
    release(EARLY, ALWAYS)
    H: tl.constexpr = FIXED.num_heads
    K: tl.constexpr = FIXED.head_k_dim
    V: tl.constexpr = FIXED.head_v_dim
    GROUP: tl.constexpr = FIXED.num_heads // FIXED.num_groups
    BLOCK_V: tl.constexpr = FIXED.block_v
    TILES: tl.constexpr = 1 if FIXED.split else (V + BLOCK_V - 1) // BLOCK_V
    i_head, i_row, programs = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    o_k, o_v = tl.arange(0, FIXED.block_k), tl.arange(0, BLOCK_V)
    if FIXED.split:
        o_v += tl.program_id(2) * BLOCK_V
    k_mask = o_k < K
    count = 1 if num_rows is None else last_row(state_slots, num_rows, i_row, programs, EARLY)
    for _ in range(count):
        slot = tl.load(state_slots + i_row).to(tl.int64)
        p_out = out + (i_row * H + i_head) * V + o_v
        if slot != 0:
            p_state = state + (slot * H + i_head) * K * V + o_k[:, None] * V + o_v[None, :]
            b_state = tl.load(p_state, mask=k_mask[:, None] & (o_v < V)[None, :], other=0.0).to(tl.float32)
            g = tl.load(rate + i_head).to(tl.float32)
            own = 0.0
            if FIXED.time_steps:
                bias = tl.load(dt_bias + i_head)
                own = tl.load(skip + i_head).to(tl.float32)
            wait(EARLY)  # what is loaded until here are weights, and a state that no kernel of this step has written
            columns = (i_head // GROUP) * K + o_k
            b_q = tl.load(q + i_row * stride_q + columns, mask=k_mask, other=0.0).to(tl.float32)
            b_k = tl.load(k + i_row * stride_k + columns, mask=k_mask, other=0.0).to(tl.float32)
            if FIXED.time_steps:
                step = softplus(tl.load(dt + i_row * stride_dt + i_head).to(tl.float32) + bias)
                step = tl.minimum(tl.maximum(step, dt_low), dt_high)
                g = -tl.exp(g) * step
                b_k *= step
            decay = tl.exp(g)
            for j in tl.static_range(TILES):
                values = j * BLOCK_V + o_v
                v_mask = values < V
                state_mask = k_mask[:, None] & v_mask[None, :]
                if j > 0:
                    b_state = tl.load(p_state + j * BLOCK_V, mask=state_mask, other=0.0).to(tl.float32)
                b_v = tl.load(v + i_row * stride_v + i_head * V + values, mask=v_mask, other=0.0).to(tl.float32)
                b_state = b_state * decay + b_k[:, None] * b_v[None, :]
                tl.store(p_state + j * BLOCK_V, b_state.to(state.dtype.element_ty), mask=state_mask)
                b_out = tl.sum(b_state * b_q[:, None], 0) + own * b_v
                tl.store(p_out + j * BLOCK_V, b_out.to(out.dtype.element_ty), mask=v_mask)
        elif num_rows is None:
            wait(EARLY)
            for j in tl.static_range(TILES):
                zeros = tl.zeros([BLOCK_V], out.dtype.element_ty)
                tl.store(p_out + j * BLOCK_V, zeros, mask=j * BLOCK_V + o_v < V)
        i_row += programs


class StepTile(NamedTuple):
    """Columns of the state per tile, warps, and whether each tile has a program of its own."""

    block_v: int
    warps: int
    split: bool = False


def choose_step_tile(head_k_dim: int, head_v_dim: int, num_heads: int) -> StepTile:
    """The step's tile (``recurrent-shapes-steps-h200.json``). A thread holds at most 128 numbers of the state at a
    time. States of K up to 256 are read in 64 columns, which are whole lines of memory. Tiles have programs of their
    own while multiprocessors are free. ``num_heads``: of all rows."""
    warps = 2 if head_k_dim <= 128 else 4
    widest = max(1, 4096 * warps // next_power_of_2(head_k_dim))
    block_v = min(widest, next_power_of_2(head_v_dim))
    return StepTile(block_v, warps, block_v < head_v_dim and num_heads <= 2 * MULTIPROCESSORS)


class TimeSteps(NamedTuple):
    """Mamba-2's time steps, from which decays and write strengths come.

    Attributes:
        dt: ``[N, H]`` before bias and softplus, rows may be strided.
        bias, skip: ``[H]`` float32; ``skip`` is D.
        limit: least and greatest time step.
    """

    dt: Tensor
    bias: Tensor
    skip: Tensor
    limit: tuple[float, float]


def linear_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rate: Tensor,
    state: Tensor,
    state_slots: Tensor,
    *,
    steps: TimeSteps | None = None,
    out: Tensor | None = None,
    tile: StepTile | None = None,
) -> Tensor:
    """``linear_attention_step_reference`` in one launch; rows with slot 0 are zero, or left as they are in ``out``.

    Args:
        q, k: ``[N, G, K]``, rows may be strided. v: ``[N, H, V]``, as well.
        rate: ``[H]`` float32: the log of A with time ``steps``, else the log decay of each head.
        out: ``[N, H, V]`` or ``[N, H * V]`` to write to, contiguous, optional.
        tile: overrides the choice of ``choose_step_tile`` (tests and measurements).
    """
    (num_rows, num_heads, head_v_dim), (_, num_groups, head_k_dim) = v.shape, k.shape
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_rows(name, x)
    dt, dt_bias, skip, limit = (None, None, None, (0.0, 0.0)) if steps is None else steps
    assert state.is_contiguous() and state_slots.is_contiguous() and (dt is None or dt.stride(1) == 1)
    keep, out = out is not None, v.new_empty(v.shape) if out is None else out
    assert out.is_contiguous(), "out must be contiguous"
    if num_rows:
        tile = tile or choose_step_tile(head_k_dim, head_v_dim, num_rows * num_heads)
        fixed = StepFixed(
            num_groups, num_heads, head_k_dim, head_v_dim, next_power_of_2(head_k_dim), tile.block_v,
            tile.split, dt is not None,
        )  # fmt: skip
        tiles = cdiv(head_v_dim, tile.block_v) if tile.split else 1
        programs, rows = row_programs(num_rows, num_heads * tiles, keep=keep)
        _step_kernel[(num_heads, programs, tiles)](
            q, k, v, dt, rate, dt_bias, skip, state, state_slots, out, rows,
            q.stride(0), k.stride(0), v.stride(0), 0 if dt is None else dt.stride(0), *limit,
            FIXED=fixed, num_warps=tile.warps, **early_launch(q.device),
        )  # fmt: skip
    return out
