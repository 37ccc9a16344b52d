"""``kda_decode`` on the GPU: the decode step of Kimi Delta Attention in one launch, or in two.

As ``gdn_decode.py``, but queries, keys and values have the same heads, so a program serves one row and one head, and a
state decays by a number per key channel. Where it takes less time the states have a launch of their own, that of Gated
DeltaNet (``gdn_verify.py``).

Graph-safe: the grid is the padded number of rows; rows with slot 0 write zeros, or nothing, and leave.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from weft.config.kimi import KimiDeltaConfig
from weft.ops.triton.conv_update import convolve, load_columns, store_inputs
from weft.ops.triton.delta_vectors import Vectors, vectors_of
from weft.ops.triton.early_launch import ALWAYS, early_launch, release, wait
from weft.ops.triton.elementwise import sigmoid, softplus
from weft.ops.triton.gated_delta_rule import l2_normalize
from weft.ops.triton.gdn_decode import Shape, step_head
from weft.ops.triton.gdn_verify import launch_of_states
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import next_power_of_2

_FEW_PROGRAMS = 1024
"""Up to so many, 32 rows of 32 heads, a program hides its own latency best (measured on an H200)."""


_FEW_TO_RELEASE = tl.constexpr(512)
"""Up to so many, 16 rows of 32 heads, a step gains from the next kernel's early start; with more it loses, because that
kernel's programs take places (measured on an H200)."""


def choose_shape(num_programs: int) -> Shape:
    """Few programs load the next tile ahead; of many, three share a multiprocessor."""
    return Shape(64, 4, True, None) if num_programs <= _FEW_PROGRAMS else Shape(64, 4, False, 160)


_CONVOLUTIONS = Shape(1, 4, False, None)
"""Of programs that read no states."""


class Fixed(NamedTuple):
    """What the kernel is compiled for.

    Attributes:
        num_heads, head_dim, conv_kernel: of the layer, as in ``KimiDeltaConfig``.
        block_k, block_v: of a tile of the state.
        vectors: what a program leaves of the token before it reads states.
        keep_padding: leave the output of rows with slot 0 as it is.
        prefetch: see ``Shape``.
        has_states: the states are taken through the token here; else by a launch of its own.
    """

    num_heads: int
    head_dim: int
    conv_kernel: int
    block_k: int
    block_v: int
    vectors: Vectors
    keep_padding: bool
    prefetch: bool
    has_states: bool


@jit(do_not_specialize_on_alignment=["state_slots"])
def _kda_decode_kernel(
    projected, f, gate, conv_weight, A_log, dt_bias, norm_weight, conv_state, state, state_slots, vectors, out,
    stride_row, stride_f, stride_gate, eps, FIXED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row and head."""
    if FIXED.has_states:
        release(EARLY, _FEW_TO_RELEASE)
    else:
        release(EARLY, ALWAYS)  # the states are requested meanwhile
    H: tl.constexpr = FIXED.num_heads
    K: tl.constexpr = FIXED.head_dim
    W: tl.constexpr = FIXED.conv_kernel
    BLOCK_K: tl.constexpr = FIXED.block_k
    BLOCK_V: tl.constexpr = FIXED.block_v
    PREFETCH: tl.constexpr = FIXED.prefetch
    head, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_k, o_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    mask = o_k < K
    slot = tl.load(state_slots + i_row).to(tl.int64)
    p_out = out + (i_row * H + head) * K
    if slot == 0:
        wait(EARLY)
        if not FIXED.keep_padding:
            tl.store(p_out + o_k, tl.zeros([BLOCK_K], out.dtype.element_ty), mask=mask)
        return
    p_state = state + (slot * H + head) * K * K + o_k[:, None] * K + o_v[None, :]
    if FIXED.has_states:
        b_next = tl.load(p_state, mask=mask[:, None] & (o_v < K)[None, :], other=0.0)  # under way during all of this
    row, p_conv = projected + i_row * stride_row, conv_state + slot * 3 * H * K * (W - 1)
    channels = head * K + o_k
    k_channels, v_channels = H * K + channels, 2 * H * K + channels
    q_kept, q_taps = load_columns(p_conv, channels, mask, W - 1), load_columns(conv_weight, channels, mask, W)
    k_kept, k_taps = load_columns(p_conv, k_channels, mask, W - 1), load_columns(conv_weight, k_channels, mask, W)
    v_kept, v_taps = load_columns(p_conv, v_channels, mask, W - 1), load_columns(conv_weight, v_channels, mask, W)
    rate = tl.exp(tl.load(A_log + head).to(tl.float32))
    forget = tl.load(dt_bias + channels, mask=mask, other=0.0).to(tl.float32)
    norm = tl.load(norm_weight + o_k, mask=mask, other=0.0).to(tl.float32)
    wait(EARLY)  # what is loaded until here are weights, and states that no kernel of this step has written
    b_q, q_kept = convolve(row, q_taps, q_kept, channels, mask, W)
    b_k, k_kept = convolve(row, k_taps, k_kept, k_channels, mask, W)
    b_v, v_kept = convolve(row, v_taps, v_kept, v_channels, mask, W)
    beta = sigmoid(tl.load(row + 3 * H * K + head).to(tl.float32))
    forget += tl.load(f + i_row * stride_f + channels, mask=mask, other=0.0).to(tl.float32)
    b_gate = sigmoid(tl.load(gate + i_row * stride_gate + channels, mask=mask, other=0.0).to(tl.float32)) * norm
    p_query = vectors + (i_row * H + head) * FIXED.vectors.size
    p_key, p_decays = p_query + K, p_query + FIXED.vectors.decays
    p_values, p_gates = p_query + FIXED.vectors.values, p_query + FIXED.vectors.gates
    tl.store(p_query + o_k, l2_normalize(b_q) * (K**-0.5), mask=mask)
    tl.store(p_key + o_k, l2_normalize(b_k), mask=mask)
    tl.store(p_values + o_k, b_v, mask=mask)
    tl.store(p_gates + o_k, b_gate, mask=mask)
    tl.store(p_decays + o_k, tl.exp(-rate * softplus(forget)), mask=mask)
    if not FIXED.has_states:
        tl.store(p_query + FIXED.vectors.betas, beta)
    tl.debug_barrier()  # the vectors are written, and all convolution states read
    store_inputs(p_conv, q_kept, channels, mask, W)
    store_inputs(p_conv, k_kept, k_channels, mask, W)
    store_inputs(p_conv, v_kept, v_channels, mask, W)
    if FIXED.has_states:
        b_q = tl.load(p_query + o_k, mask=mask, other=0.0)
        b_k = tl.load(p_key + o_k, mask=mask, other=0.0)
        decay = tl.load(p_decays + o_k, mask=mask, other=0.0)
        step_head(
            p_state, b_next, b_q, b_k, decay[:, None], beta, p_values, p_gates, p_out + o_v, mask, o_v, eps,
            K, K, BLOCK_V, PREFETCH, True, True,
        )  # fmt: skip


def kda_decode_triton(
    projected: Tensor,
    f: Tensor,
    gate: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    conv_state: Tensor,
    state: Tensor,
    state_slots: Tensor,
    geometry: KimiDeltaConfig,
    *,
    out: Tensor | None = None,
    shape: Shape | None = None,
) -> Tensor:
    """``kda_decode`` of ``weft/ops/kda.py``. ``shape`` overrides that of ``choose_shape`` (tests and measurements)."""
    heads, dim, num_rows = geometry.num_heads, geometry.head_dim, projected.shape[0]
    assert projected.stride(1) == f.stride(1) == gate.stride(1) == 1
    assert state.is_contiguous() and conv_state.is_contiguous() and conv_weight.is_contiguous()
    assert out is None or out.is_contiguous()
    launch_states = launch_of_states(state, projected.dtype, num_rows, 1) if out is None and shape is None else None
    keep, out = out is not None, projected.new_empty(num_rows, geometry.width) if out is None else out
    if num_rows:
        if shape is None:
            shape = _CONVOLUTIONS if launch_states is not None else choose_shape(num_rows * heads)
        block = next_power_of_2(dim)
        places = vectors_of(1, dim, dim, channels=dim)
        vectors = projected.new_empty(num_rows, heads, places.size, dtype=torch.float32)
        fixed = Fixed(
            heads, dim, geometry.conv_kernel, block, min(shape.block_v, block), places, keep, shape.prefetch,
            launch_states is None,
        )  # fmt: skip
        _kda_decode_kernel[(heads, num_rows)](
            projected, f, gate, conv_weight, A_log, dt_bias, norm_weight, conv_state, state, state_slots, vectors, out,
            projected.stride(0), f.stride(0), gate.stride(0), eps,
            FIXED=fixed, num_warps=shape.warps, maxnreg=shape.max_registers, **early_launch(projected.device),
        )  # fmt: skip
        if launch_states is not None:
            launch_states(vectors, state, state_slots, state_slots[:, None], out, eps, places)
    return out
