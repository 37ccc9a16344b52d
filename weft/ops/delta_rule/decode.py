"""The decode steps of Gated DeltaNet and of Kimi Delta Attention as one kernel.

Job: ``gdn_decode`` and ``kda_decode`` on the GPU, in one launch. On Hopper a second launch updates the states where
that is faster (``launch_of_states`` in ``verify.py``). That is so with few rows, and for bfloat16 states unless the
programs fill the device just once (9 to 16 rows of 32 heads). ``gdn_decode`` is then a verification of one token. Owns:
who reads and writes which convolution channels. Does not know: layers.

A program serves one row and one *key* head, with the group's value heads (a single one in Kimi Delta Attention).
No other program reads or shifts the convolution states of these heads, so the shift in place is safe. The program holds
whole value heads, so the output norm needs no second launch. The recurrent state is read once and written once: its
tiles, ``[K, BLOCK_V]``, pass through float32 registers with V along the lanes.

Queries, keys, values, gates and decays are computed first, with all loads in flight together. They go through a small
float32 buffer that stays in the L1 cache, and are read back in the layout of the state's tile. Computing them in that
layout would repeat every load in every warp.

Graph-safe: the grid is the padded number of rows; rows with slot 0 write zeros and leave.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.config.gated_delta_net import GatedDeltaNetConfig
from weft.ops.convolution.decode import convolve, load_columns, store_inputs
from weft.ops.delta_rule import DeltaWeights
from weft.ops.delta_rule.gdn_prefill import delta_rule_step, l2_normalize
from weft.ops.delta_rule.vectors import Vectors
from weft.ops.delta_rule.verify import Inputs, places_in
from weft.ops.triton.early_launch import ALWAYS, early_launch, release, wait
from weft.ops.triton.elementwise import kda_log_decay, sigmoid, softplus
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import MULTIPROCESSORS, next_power_of_2


class Shape(NamedTuple):
    """Columns of the state per step, warps, whether the next step's columns load meanwhile, and a register limit."""

    block_v: int
    warps: int
    prefetch: bool
    max_registers: int | None


def choose_shape(num_programs: int, state_dtype: torch.dtype, *, is_wide: bool = False) -> Shape:
    """Choose the shape by the number of programs. A few programs hide their own latency, and so do more of them where
    states are in float32. With many others, four share a multiprocessor and hide the latency of each other.

    ``is_wide``: heads have more than 128 columns, and many programs may sum in another order than few.
    """
    if num_programs <= 2 * MULTIPROCESSORS or state_dtype == torch.float32:
        return Shape(64, 4, True, None)
    return Shape(64, 2, True, None) if is_wide else Shape(64, 4, False, 128)


_FEW_PROGRAMS = 1024
"""Most programs (32 rows of 32 heads) that hide their own latency best (measured on an H200)."""


def choose_kda_shape(num_programs: int) -> Shape:
    """Few programs load the next tile ahead; of many, three share a multiprocessor."""
    return Shape(64, 4, True, None) if num_programs <= _FEW_PROGRAMS else Shape(64, 4, False, 160)


@triton.jit
def _step_head(
    p_state, p_after, b_next, b_q, b_k, decay, beta, p_value, p_gate, p_out, k_mask, o_v, eps,
    K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, PREFETCH: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    """Compute one value head: the delta rule over its state, column tile by column tile, then the output norm and its
    gate.

    Args:
        p_state: first tile of the head's state; the next head's state follows it.
        p_after: where the first tile goes.
        b_next: a tile that has been loaded: the first, if PREFETCH or FIRST.
        decay: of the state, a number or ``[K, 1]``.
        p_value, p_gate: ``[V]`` float32 each, the gate with the norm's weight.
        p_out: the head's output, from column ``o_v [BLOCK_V]`` on.
        FIRST, LAST: whether it is the program's first or last head.

    Returns: with PREFETCH, the next head's first tile.
    """
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    outputs = ()
    square_sum = 0.0
    for j in tl.static_range(TILES):
        columns = j * BLOCK_V + o_v
        v_mask = columns < V
        state_mask = k_mask[:, None] & v_mask[None, :]
        b_state = b_next
        if not PREFETCH and not (FIRST and j == 0):
            b_state = tl.load(p_state + j * BLOCK_V, mask=state_mask, other=0.0)
        if PREFETCH and not (LAST and j == TILES - 1):
            ahead = (j + 1) % TILES * BLOCK_V
            mask = k_mask[:, None] & (ahead + o_v < V)[None, :]
            b_next = tl.load(p_state + (j + 1) // TILES * K * V + ahead, mask=mask, other=0.0)
        b_v = tl.load(p_value + columns, mask=v_mask, other=0.0)
        b_out, new_state = delta_rule_step(b_state.to(tl.float32), b_q, b_k, b_v, decay, beta)
        tl.store(p_after + j * BLOCK_V, new_state.to(p_state.dtype.element_ty), mask=state_mask)
        square_sum += tl.sum(b_out * b_out, 0)
        outputs = outputs + (b_out,)  # type: ignore[assignment]  # noqa: RUF005
    scale = tl.rsqrt(square_sum / V + eps)
    for j in tl.static_range(TILES):
        v_mask = j * BLOCK_V + o_v < V
        normed = outputs[j] * scale * tl.load(p_gate + j * BLOCK_V + o_v, mask=v_mask, other=0.0)
        tl.store(p_out + j * BLOCK_V, normed.to(p_out.dtype.element_ty), mask=v_mask)
    return b_next


class Fixed(NamedTuple):
    """Compile-time parameters of the kernel.

    Attributes:
        num_k_heads, num_v_heads, head_k_dim, head_v_dim, conv_kernel: of the layer, as in ``GatedDeltaNetConfig``.
        block_k, block_v: of a tile of the state.
        block_g, block_h: powers of two that hold a group's values, and its value heads.
        vectors: what a program leaves of the token before it reads states. With a decay for each channel the layer is
            one of Kimi Delta Attention, and a group one value head.
        keep_padding: leave the output of rows with slot 0 as it is.
        prefetch: see ``Shape``.
        negative_eigenvalues, sigmoid_gate: as in ``GatedDeltaNetConfig``.
        gate_floor: as in ``KimiDeltaConfig``.
        has_states: the states are taken through the token here; else by a launch of its own.
        most_to_release: with up to so many programs the next kernel's may start early. Those of Gated DeltaNet fill
            multiprocessors unevenly; whatever started beside them would be spread badly.
    """

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel: int
    block_k: int
    block_v: int
    block_g: int
    block_h: int
    vectors: Vectors
    keep_padding: bool
    prefetch: bool
    negative_eigenvalues: bool
    sigmoid_gate: bool
    has_states: bool
    most_to_release: int
    gate_floor: float


@jit(do_not_specialize_on_alignment=["state_slots", "after_slots"])
def _gdn_decode_kernel(
    projected, f, gate, conv_weight, A_log, dt_bias, norm_weight, conv_state, state, state_slots, after_slots, vectors,
    out, stride_row, stride_f, stride_gate, stride_slots, stride_after, stride_out, eps,
    FIXED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one row and key head. ``f`` and ``gate`` are arguments of ``kda_decode``; Gated DeltaNet has both in
    ``projected``. ``after_slots``: where the states go."""
    release(EARLY, FIXED.most_to_release)
    HK: tl.constexpr = FIXED.num_k_heads
    HV: tl.constexpr = FIXED.num_v_heads
    K: tl.constexpr = FIXED.head_k_dim
    V: tl.constexpr = FIXED.head_v_dim
    W: tl.constexpr = FIXED.conv_kernel
    BLOCK_V: tl.constexpr = FIXED.block_v
    PER_CHANNEL: tl.constexpr = FIXED.vectors.channels > 1
    i_key_head, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    GROUP: tl.constexpr = HV // HK
    KEY_DIM: tl.constexpr = HK * K
    VALUE_DIM: tl.constexpr = HV * V
    C: tl.constexpr = 2 * KEY_DIM + VALUE_DIM
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    o_k, o_v = tl.arange(0, FIXED.block_k), tl.arange(0, BLOCK_V)
    k_mask = o_k < K
    slot = tl.load(state_slots + i_row * stride_slots).to(tl.int64)
    after = tl.load(after_slots + i_row * stride_after).to(tl.int64)
    p_out = out + i_row * stride_out + i_key_head * GROUP * V + o_v
    if slot == 0:
        wait(EARLY)
        if FIXED.keep_padding:
            return
        for i in tl.static_range(GROUP):
            for j in tl.static_range(TILES):
                zeros = tl.zeros([BLOCK_V], out.dtype.element_ty)
                tl.store(p_out + i * V + j * BLOCK_V, zeros, mask=j * BLOCK_V + o_v < V)
        return
    inside = (i_key_head * GROUP) * K * V + o_k[:, None] * V + o_v[None, :]
    p_state = state + slot * HV * K * V + inside
    if FIXED.has_states:  # under way during all of this
        b_next = tl.load(p_state, mask=k_mask[:, None] & (o_v < V)[None, :], other=0.0)
    p_conv = conv_state + slot * C * (W - 1)
    o_g, o_h = tl.arange(0, FIXED.block_g), tl.arange(0, FIXED.block_h)
    g_mask, h_mask = o_g < GROUP * V, o_h < GROUP
    q_channels = i_key_head * K + o_k
    k_channels = KEY_DIM + q_channels
    v_channels = 2 * KEY_DIM + i_key_head * GROUP * V + o_g
    heads = i_key_head * GROUP + o_h
    q_kept, q_taps = load_columns(p_conv, q_channels, k_mask, W - 1), load_columns(conv_weight, q_channels, k_mask, W)
    k_kept, k_taps = load_columns(p_conv, k_channels, k_mask, W - 1), load_columns(conv_weight, k_channels, k_mask, W)
    v_kept, v_taps = load_columns(p_conv, v_channels, g_mask, W - 1), load_columns(conv_weight, v_channels, g_mask, W)
    if PER_CHANNEL:
        rate = tl.exp(tl.load(A_log + i_key_head).to(tl.float32))
        b_a = tl.load(dt_bias + q_channels, mask=k_mask, other=0.0).to(tl.float32)
    else:
        rate = tl.exp(tl.load(A_log + heads, mask=h_mask, other=0.0).to(tl.float32))
        b_a = tl.load(dt_bias + heads, mask=h_mask, other=0.0).to(tl.float32)
    norm = tl.load(norm_weight + o_g % V, mask=g_mask, other=0.0).to(tl.float32)
    wait(EARLY)  # what is loaded until here are weights, and states that no kernel of this step has written
    row = projected + i_row * stride_row
    b_q, q_kept = convolve(row, q_taps, q_kept, q_channels, k_mask, W)
    b_k, k_kept = convolve(row, k_taps, k_kept, k_channels, k_mask, W)
    b_v, v_kept = convolve(row, v_taps, v_kept, v_channels, g_mask, W)
    if PER_CHANNEL:
        b_beta = sigmoid(tl.load(row + C + i_key_head).to(tl.float32))
        b_a += tl.load(f + i_row * stride_f + q_channels, mask=k_mask, other=0.0).to(tl.float32)
        b_gate = tl.load(gate + i_row * stride_gate + i_key_head * V + o_g, mask=g_mask, other=0.0).to(tl.float32)
        b_gate = sigmoid(b_gate) * norm
    else:
        b_beta = tl.load(row + C + VALUE_DIM + heads, mask=h_mask, other=0.0).to(tl.float32)
        b_a += tl.load(row + C + VALUE_DIM + HV + heads, mask=h_mask, other=0.0).to(tl.float32)
        b_gate = tl.load(row + C + i_key_head * GROUP * V + o_g, mask=g_mask, other=0.0).to(tl.float32)
        factor = tl.sigmoid(b_gate) * norm
        b_gate = factor if FIXED.sigmoid_gate else b_gate * factor

    p_vectors = vectors + (i_row * HK + i_key_head) * FIXED.vectors.size
    p_values, p_gates = p_vectors + FIXED.vectors.values, p_vectors + FIXED.vectors.gates
    tl.store(p_vectors + o_k, l2_normalize(b_q) * (K**-0.5), mask=k_mask)
    tl.store(p_vectors + K + o_k, l2_normalize(b_k), mask=k_mask)
    tl.store(p_values + o_g, b_v, mask=g_mask)
    tl.store(p_gates + o_g, b_gate, mask=g_mask)
    p_decays = p_vectors + FIXED.vectors.decays
    p_betas = p_vectors + FIXED.vectors.betas
    if PER_CHANNEL:
        tl.store(p_decays + o_k, tl.exp(kda_log_decay(rate, b_a, FIXED.gate_floor)), mask=k_mask)
        if not FIXED.has_states:
            tl.store(p_betas, b_beta)
    else:
        tl.store(p_decays + o_h, tl.exp(-rate * softplus(b_a)), mask=h_mask)
        b_beta = tl.sigmoid(b_beta)
        if FIXED.negative_eigenvalues:
            b_beta *= 2.0
        tl.store(p_betas + o_h, b_beta, mask=h_mask)
    tl.debug_barrier()  # the vectors are written, and all convolution states read
    p_conv = conv_state + after * C * (W - 1)
    store_inputs(p_conv, q_kept, q_channels, k_mask, W)
    store_inputs(p_conv, k_kept, k_channels, k_mask, W)
    store_inputs(p_conv, v_kept, v_channels, g_mask, W)

    b_q = tl.load(p_vectors + o_k, mask=k_mask, other=0.0)
    b_k = tl.load(p_vectors + K + o_k, mask=k_mask, other=0.0)
    for i in tl.static_range(GROUP if FIXED.has_states else 0):
        if PER_CHANNEL:
            decay, beta = tl.load(p_decays + o_k, mask=k_mask, other=0.0)[:, None], b_beta
        else:
            decay, beta = tl.load(p_decays + i), tl.load(p_betas + i)
        b_next = _step_head(
            p_state + i * K * V, state + after * HV * K * V + inside + i * K * V, b_next, b_q, b_k, decay, beta,
            p_values + i * V, p_gates + i * V, p_out + i * V, k_mask, o_v, eps,
            K, V, BLOCK_V, FIXED.prefetch, i == 0, i == GROUP - 1,
        )  # fmt: skip


_FEW_TO_RELEASE = 512
"""Most programs (16 rows of 32 heads) with which a step gains from the next kernel's early start. With more programs
the step loses, because the next kernel's programs take places (measured on an H200)."""


def launch_rows(
    inputs: Inputs, weights: DeltaWeights, states: tuple[Tensor, Tensor], slots: tuple[Tensor, Tensor],
    g: GatedDeltaNetConfig, shape: Shape, out: Tensor, keep: bool, *, early: bool = True,
    launch_states: Callable[..., None] | None = None,
) -> None:  # fmt: skip
    """One token of each row. ``slots``: where the states are, and where they go. ``launch_states`` updates them, if
    given."""
    num_rows, group, has_states = inputs.projected.shape[0], g.num_v_heads // g.num_k_heads, launch_states is None
    if not num_rows:
        return
    conv_weight, A_log, dt_bias, norm_weight, eps = weights
    assert conv_weight.is_contiguous() and all(state.is_contiguous() for state in states)
    places = places_in(inputs, g)
    vectors = inputs.projected.new_empty(num_rows, g.num_k_heads, places.size, dtype=torch.float32)
    most_to_release = 0 if inputs.f is None else _FEW_TO_RELEASE
    fixed = Fixed(
        g.num_k_heads, g.num_v_heads, g.head_k_dim, g.head_v_dim, g.conv_kernel,
        next_power_of_2(g.head_k_dim), min(shape.block_v, next_power_of_2(g.head_v_dim)),
        next_power_of_2(group * g.head_v_dim), next_power_of_2(group), places, keep, shape.prefetch,
        g.negative_eigenvalues, g.sigmoid_gate, has_states,
        most_to_release if has_states else ALWAYS.value,  # else the launch of states is what starts early
        inputs.gate_floor,
    )  # fmt: skip
    _gdn_decode_kernel[(g.num_k_heads, num_rows)](
        *inputs.tensors, conv_weight, A_log, dt_bias, norm_weight, *states, *slots, vectors, out,
        *inputs.strides, slots[0].stride(0), slots[1].stride(0), out.stride(0), eps,
        FIXED=fixed, num_warps=shape.warps, maxnreg=shape.max_registers,
        **(early_launch(out.device) if early else {"EARLY": False}),
    )  # fmt: skip
    if launch_states is not None:
        launch_states(vectors, states[1], slots[0], slots[1][:, None], out, eps, places)
