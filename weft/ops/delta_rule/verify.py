"""A few tokens of Gated DeltaNet or Kimi Delta Attention per sequence, with the state after each, as one kernel.

Job: ``gdn_verify`` and ``kda_verify`` on the GPU, in one launch. A second launch (``verify_gluon.py`` or
``decode_gluon.py``) updates the states where that is faster: with few sequences, or one token of each
(``launch_of_states``). Owns: in which order a program walks tokens and tiles of the state. Does not know: layers.

A program serves one sequence and one key head with all value heads of its group, like the decode kernel. It computes
queries, keys, values, gates and decays of all tokens first, all their loads before the first store, and leaves them in
a small float32 buffer. Then the state of every value head is read once, updated by all tokens in registers, and stored
after each token. The memory traffic of T tokens is T + 1 times the state; T decode steps cost 2 T times. A program
holds whole value heads, so an output is normalised where it is made.

Graph-safe: the grid is the padded number of sequences; sequences with slot 0 write zeros and leave.
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
from weft.ops.delta_rule.vectors import Vectors, vectors_of
from weft.ops.triton.early_launch import ALWAYS, early_launch, release, wait
from weft.ops.triton.elementwise import kda_log_decay, sigmoid, softplus
from weft.ops.triton.gluon import GLUON_IS_KNOWN
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import next_power_of_2

if GLUON_IS_KNOWN:
    from weft.ops.delta_rule import decode_gluon as gdn_decode_gluon
    from weft.ops.delta_rule import verify_gluon as gdn_verify_gluon


def choose_warps(state_size: int) -> int:
    """Choose the fewest warps that can hold the state, because every token is summed over all warps. On an H200 four
    were fastest for any number of sequences, by a third and more for few (``kernels-verify-h200.json``).

    Args:
        state_size: numbers in the state of one value head, which lie in the registers of one program.
    """
    return min(16, max(4, state_size // 4096))


class Fixed(NamedTuple):
    """Compile-time parameters of the kernel.

    Attributes:
        num_tokens: of each sequence.
        num_k_heads, num_v_heads, head_k_dim, head_v_dim, conv_kernel, negative_eigenvalues, sigmoid_gate: of the
            layer, as in ``GatedDeltaNetConfig``.
        block_k, block_v: powers of two that hold a state's rows and columns.
        block_g, block_h: powers of two that hold a group's values, and its value heads.
        vectors: what a program leaves of a token before it reads states. With a decay for each channel the layer is
            one of Kimi Delta Attention, and a group one value head.
        has_states: the states are taken through the tokens here; else by a launch of its own.
        gate_floor: as in ``KimiDeltaConfig``.
    """

    num_tokens: int
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel: int
    negative_eigenvalues: bool
    sigmoid_gate: bool
    block_k: int
    block_v: int
    block_g: int
    block_h: int
    vectors: Vectors
    has_states: bool
    gate_floor: float


@triton.jit
def _gates(row, A_log, dt_bias, heads, mask, C: tl.constexpr, VALUE_DIM: tl.constexpr, FIXED: tl.constexpr):
    """Decays and write strengths of some value heads."""
    beta = tl.sigmoid(tl.load(row + C + VALUE_DIM + heads, mask=mask, other=0.0).to(tl.float32))
    if FIXED.negative_eigenvalues:
        beta *= 2.0
    b_a = tl.load(row + C + VALUE_DIM + FIXED.num_v_heads + heads, mask=mask, other=0.0).to(tl.float32)
    b_a += tl.load(dt_bias + heads, mask=mask, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(A_log + heads, mask=mask, other=0.0).to(tl.float32))
    return tl.exp(-rate * softplus(b_a)), beta


@triton.jit
def _channel_gates(row, p_f, A_log, dt_bias, heads, mask, channels, k_mask, C: tl.constexpr, FIXED: tl.constexpr):
    """Decays per channel ``[K]`` of a head of Kimi Delta Attention, and its write strength."""
    beta = sigmoid(tl.load(row + C + heads, mask=mask, other=0.0).to(tl.float32))
    b_f = tl.load(dt_bias + channels, mask=k_mask, other=0.0).to(tl.float32)
    b_f += tl.load(p_f + channels, mask=k_mask, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(A_log + tl.program_id(0)).to(tl.float32))
    return tl.exp(kda_log_decay(rate, b_f, FIXED.gate_floor)), beta


@triton.jit
def _load_vectors(p_token, head, o_k, o_v, k_mask, v_mask, FIXED: tl.constexpr):
    """Load query, key, value, gate, decay and beta of one token for one value ``head`` of the group."""
    V: tl.constexpr = FIXED.head_v_dim
    query = tl.load(p_token + o_k, mask=k_mask, other=0.0)
    key = tl.load(p_token + FIXED.head_k_dim + o_k, mask=k_mask, other=0.0)
    value = tl.load(p_token + FIXED.vectors.values + head * V + o_v, mask=v_mask, other=0.0)
    b_gate = tl.load(p_token + FIXED.vectors.gates + head * V + o_v, mask=v_mask, other=0.0)
    if FIXED.vectors.channels > 1:
        decay = tl.load(p_token + FIXED.vectors.decays + o_k, mask=k_mask, other=0.0)[:, None]
    else:
        decay = tl.load(p_token + FIXED.vectors.decays + head)
    return query, key, value, b_gate, decay, tl.load(p_token + FIXED.vectors.betas + head)


@jit(do_not_specialize_on_alignment=["state_slots", "slots"])
def _gdn_verify_kernel(
    projected, f, gate, conv_weight, A_log, dt_bias, norm_weight, conv_state, state, state_slots, slots, vectors, out,
    stride_row, stride_f, stride_gate, eps, FIXED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one sequence and key head. ``f`` and ``gate`` are arguments of ``kda_verify``; Gated DeltaNet has both in
    ``projected``."""
    if not FIXED.has_states:
        release(EARLY, ALWAYS)  # the states are requested meanwhile
    T: tl.constexpr = FIXED.num_tokens
    HK: tl.constexpr = FIXED.num_k_heads
    HV: tl.constexpr = FIXED.num_v_heads
    K: tl.constexpr = FIXED.head_k_dim
    V: tl.constexpr = FIXED.head_v_dim
    W: tl.constexpr = FIXED.conv_kernel
    BLOCK_G: tl.constexpr = FIXED.block_g
    PER_CHANNEL: tl.constexpr = FIXED.vectors.channels > 1
    i_key_head, i_seq = tl.program_id(0), tl.program_id(1).to(tl.int64)
    GROUP: tl.constexpr = HV // HK
    KEY_DIM: tl.constexpr = HK * K
    VALUE_DIM: tl.constexpr = HV * V
    C: tl.constexpr = 2 * KEY_DIM + VALUE_DIM
    o_k, o_v = tl.arange(0, FIXED.block_k), tl.arange(0, FIXED.block_v)
    o_g, o_h = tl.arange(0, BLOCK_G), tl.arange(0, FIXED.block_h)
    k_mask, v_mask, g_mask, h_mask = o_k < K, o_v < V, o_g < GROUP * V, o_h < GROUP
    slot = tl.load(state_slots + i_seq).to(tl.int64)
    p_out = out + i_seq * T * VALUE_DIM + i_key_head * GROUP * V
    if slot == 0:
        wait(EARLY)
        for t in range(T):
            tl.store(p_out + t * VALUE_DIM + o_g, tl.zeros([BLOCK_G], out.dtype.element_ty), mask=g_mask)
        return
    p_slots = slots + i_seq * T
    tile = i_key_head * GROUP * K * V + o_k[:, None] * V + o_v[None, :]
    tile_mask = k_mask[:, None] & v_mask[None, :]
    p_state = state + slot * HV * K * V + tile
    p_conv = conv_state + slot * C * (W - 1)
    p_vectors = vectors + (i_seq * HK + i_key_head) * T * FIXED.vectors.size
    row = projected + i_seq * T * stride_row
    q_channels = i_key_head * K + o_k
    k_channels = KEY_DIM + q_channels
    v_channels = 2 * KEY_DIM + i_key_head * GROUP * V + o_g
    q_kept, q_taps = load_columns(p_conv, q_channels, k_mask, W - 1), load_columns(conv_weight, q_channels, k_mask, W)
    k_kept, k_taps = load_columns(p_conv, k_channels, k_mask, W - 1), load_columns(conv_weight, k_channels, k_mask, W)
    v_kept, v_taps = load_columns(p_conv, v_channels, g_mask, W - 1), load_columns(conv_weight, v_channels, g_mask, W)
    norm = tl.load(norm_weight + o_g % V, mask=g_mask, other=0.0).to(tl.float32)
    wait(EARLY)  # what is loaded until here are weights, and states that no kernel of this step has written
    computed = ()
    states = ()
    for t in tl.static_range(T):
        b_q, q_kept = convolve(row, q_taps, q_kept, q_channels, k_mask, W)
        b_k, k_kept = convolve(row, k_taps, k_kept, k_channels, k_mask, W)
        b_v, v_kept = convolve(row, v_taps, v_kept, v_channels, g_mask, W)
        if PER_CHANNEL:
            i_token = i_seq * T + t
            p_f, p_gate = f + i_token * stride_f, gate + i_token * stride_gate + i_key_head * V
            heads = i_key_head + o_h
            decay, beta = _channel_gates(row, p_f, A_log, dt_bias, heads, h_mask, q_channels, k_mask, C, FIXED)
            b_gates = sigmoid(tl.load(p_gate + o_g, mask=g_mask, other=0.0).to(tl.float32)) * norm
        else:
            decay, beta = _gates(row, A_log, dt_bias, i_key_head * GROUP + o_h, h_mask, C, VALUE_DIM, FIXED)
            b_gates = tl.load(row + C + i_key_head * GROUP * V + o_g, mask=g_mask, other=0.0).to(tl.float32)
            factor = tl.sigmoid(b_gates) * norm
            b_gates = factor if FIXED.sigmoid_gate else b_gates * factor
        computed = computed + ((b_q, b_k, b_v, b_gates, decay, beta),)  # type: ignore[assignment]  # noqa: RUF005
        states = states + ((q_kept, k_kept, v_kept),)  # type: ignore[assignment]  # noqa: RUF005
        row += stride_row
    for t in tl.static_range(T):
        b_q, b_k, b_v, b_gates, decay, beta = computed[t]
        p_token = p_vectors + t * FIXED.vectors.size
        tl.store(p_token + o_k, l2_normalize(b_q) * (K**-0.5), mask=k_mask)
        tl.store(p_token + K + o_k, l2_normalize(b_k), mask=k_mask)
        tl.store(p_token + FIXED.vectors.values + o_g, b_v, mask=g_mask)
        tl.store(p_token + FIXED.vectors.gates + o_g, b_gates, mask=g_mask)
        if PER_CHANNEL:
            tl.store(p_token + FIXED.vectors.decays + o_k, decay, mask=k_mask)
        else:
            tl.store(p_token + FIXED.vectors.decays + o_h, decay, mask=h_mask)
        tl.store(p_token + FIXED.vectors.betas + o_h, beta, mask=h_mask)
    tl.debug_barrier()  # the vectors of all tokens are written, and all convolution states read
    for t in tl.static_range(T):
        q_kept, k_kept, v_kept = states[t]
        after = tl.load(p_slots + t).to(tl.int64)
        p_after = conv_state + after * C * (W - 1)
        store_inputs(p_after, q_kept, q_channels, k_mask & (after > 0), W)
        store_inputs(p_after, k_kept, k_channels, k_mask & (after > 0), W)
        store_inputs(p_after, v_kept, v_channels, g_mask & (after > 0), W)

    for i in tl.static_range(GROUP if FIXED.has_states else 0):
        b_state = tl.load(p_state + i * K * V, mask=tile_mask, other=0.0).to(tl.float32)
        for t in range(T):
            query, key, value, b_gate, fade, strength = _load_vectors(
                p_vectors + t * FIXED.vectors.size, i, o_k, o_v, k_mask, v_mask, FIXED
            )
            b_out, new_state = delta_rule_step(b_state, query, key, value, fade, strength)
            stored = new_state.to(state.dtype.element_ty)
            after = tl.load(p_slots + t).to(tl.int64)
            tl.store(state + after * HV * K * V + i * K * V + tile, stored, mask=tile_mask & (after > 0))
            normed = b_out * tl.rsqrt(tl.sum(b_out * b_out, 0) / V + eps) * b_gate
            tl.store(p_out + t * VALUE_DIM + i * V + o_v, normed.to(out.dtype.element_ty), mask=v_mask)
            b_state = stored.to(tl.float32)


def launch_of_states(
    state: Tensor, out_dtype: torch.dtype, num_seqs: int, num_tokens: int
) -> Callable[..., None] | None:
    """The launch that takes states through the tokens, where one of its own takes less time (measured on an H200)."""
    if not GLUON_IS_KNOWN:
        return None
    if gdn_verify_gluon.takes(state, num_seqs if num_tokens > 1 else 2 * num_seqs):
        return gdn_verify_gluon.launch_verify_states
    is_taken = num_tokens == 1 and gdn_decode_gluon.takes(state, out_dtype, num_seqs)
    return gdn_decode_gluon.launch_decode_states if is_taken else None


def serves_decodes(state: Tensor, out_dtype: torch.dtype, num_rows: int) -> bool:
    """Whether one token of each row takes less time here than in the decode kernel."""
    return num_rows > 0 and launch_of_states(state, out_dtype, num_rows, 1) is not None


class Inputs(NamedTuple):
    """Projections of some tokens, which are rows.

    Attributes:
        projected: as of ``gdn_decode`` or ``kda_decode``.
        f, gate, gate_floor: as of ``kda_decode`` and its geometry; None: of Gated DeltaNet, whose gates are in
            ``projected``.
    """

    projected: Tensor
    f: Tensor | None = None
    gate: Tensor | None = None
    gate_floor: float = 0.0

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self[:3]

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the rows of each tensor; a constant where there is none."""
        assert all(x is None or x.stride(1) == 1 for x in self.tensors), "rows must be dense"
        return tuple(1 if x is None else x.stride(0) for x in self.tensors)

    def every(self, first: int, step: int) -> "Inputs":
        """Every ``step``-th token from ``first`` on."""
        f, gate = (None if x is None else x[first::step] for x in (self.f, self.gate))
        return self._replace(projected=self.projected[first::step], f=f, gate=gate)


def places_in(inputs: Inputs, geometry: GatedDeltaNetConfig) -> Vectors:
    """The layout of a key head's vectors."""
    channels = 1 if inputs.f is None else geometry.head_k_dim
    return vectors_of(geometry.num_v_heads // geometry.num_k_heads, geometry.head_k_dim, geometry.head_v_dim, channels)


def launch_verify(
    inputs: Inputs,
    weights: DeltaWeights,
    conv_state: Tensor,
    state: Tensor,
    state_slots: Tensor,
    slots: Tensor,
    geometry: GatedDeltaNetConfig,
    num_warps: int | None = None,
) -> Tensor:
    """Triton kernel of ``gdn_verify`` and ``kda_verify``; all arithmetic in float32, rounded at the stores only.

    ``num_warps`` overrides ``choose_warps`` (measurements).
    """
    (num_seqs, num_tokens), g, projected = slots.shape, geometry, inputs.projected
    conv_weight, A_log, dt_bias, norm_weight, eps = weights
    assert conv_weight.is_contiguous() and conv_state.is_contiguous() and state.is_contiguous()
    assert state_slots.is_contiguous() and slots.is_contiguous()
    out = projected.new_empty(num_seqs * num_tokens, g.value_dim)
    group, places = g.num_v_heads // g.num_k_heads, places_in(inputs, g)
    vectors = projected.new_empty(num_seqs, g.num_k_heads, num_tokens, places.size, dtype=torch.float32)
    if num_seqs:
        launch_states = launch_of_states(state, out.dtype, num_seqs, num_tokens)
        block_k, block_v = next_power_of_2(g.head_k_dim), next_power_of_2(g.head_v_dim)
        fixed = Fixed(
            num_tokens, g.num_k_heads, g.num_v_heads, g.head_k_dim, g.head_v_dim, g.conv_kernel, g.negative_eigenvalues,
            g.sigmoid_gate, block_k, block_v, next_power_of_2(group * g.head_v_dim), next_power_of_2(group), places,
            launch_states is None, inputs.gate_floor,
        )  # fmt: skip
        _gdn_verify_kernel[(g.num_k_heads, num_seqs)](
            *inputs.tensors, conv_weight, A_log, dt_bias, norm_weight, conv_state, state, state_slots, slots, vectors,
            out, *inputs.strides, eps,
            FIXED=fixed, num_warps=num_warps or choose_warps(block_k * block_v), **early_launch(projected.device),
        )  # fmt: skip
        if launch_states is not None:
            launch_states(vectors, state, state_slots, slots, out, eps, places)
    return out
