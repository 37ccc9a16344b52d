"""The states of Gated DeltaNet through a few tokens, in Gluon, for few sequences: two threads have a column.

Job: what ``gdn_verify.py`` does after the convolutions, in a launch of its own. Owns: who holds what of a state. Does
not know: convolutions, gates, who asks for the tokens.

Few sequences leave each program alone with the time that a token takes it. Here a sum over the rows of the state is one
of additions in two neighbouring threads: nobody waits for other warps before the output's norm. The state is requested
before the kernel before this one has ended.

Graph-safe: the grid is the padded number of sequences; sequences with slot 0 leave.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from weft.config.gated_delta_net import GatedDeltaNetConfig
from weft.ops.triton.early_launch import early_launch, release, wait
from weft.ops.triton.gluon import thread_barrier
from weft.ops.triton.hopper_tiles import GluonKernel, is_hopper
from weft.ops.triton.sizes import MULTIPROCESSORS

_DIM = gl.constexpr(128)
_ROWS = gl.constexpr(16)
"""Of the state at a time."""
_BLOCK = gl.constexpr(gl.BlockedLayout([8, 1], [2, 16], [1, 8], [1, 0]))
_VECTOR = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


class Fixed(NamedTuple):
    """What the kernel is compiled for: tokens of each sequence; the layer's heads."""

    num_tokens: int
    num_k_heads: int
    num_v_heads: int


@gluon.jit
def _token(states, keys, value, decay, beta, p_after, is_kept):
    """One token of the rule: the states after it, as they are stored, and its output ``[V]``."""
    faded = ()
    from_k = value * 0.0
    for i in gl.static_range(_DIM // _ROWS):
        b_k = keys.slice(_DIM + i * _ROWS, _ROWS).load(gl.SliceLayout(1, _BLOCK))
        block = states[i].to(gl.float32) * decay
        from_k += gl.sum(block * b_k[:, None], 0)
        faded = faded + (block,)  # noqa: RUF005 (kernels cannot unpack)
    delta = (value - from_k) * beta
    stored = ()
    output = value * 0.0
    for i in gl.static_range(_DIM // _ROWS):
        b_q = keys.slice(i * _ROWS, _ROWS).load(gl.SliceLayout(1, _BLOCK))
        b_k = keys.slice(_DIM + i * _ROWS, _ROWS).load(gl.SliceLayout(1, _BLOCK))
        block = faded[i] + b_k[:, None] * delta[None, :]
        output += gl.sum(block * b_q[:, None], 0)
        rounded = block.to(p_after.dtype.element_ty)
        rows = i * _ROWS + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, _BLOCK))
        columns = gl.arange(0, _DIM, layout=gl.SliceLayout(0, _BLOCK))
        gl.store(p_after + rows[:, None] * _DIM + columns[None, :], rounded, mask=is_kept)
        stored = stored + (rounded,)  # noqa: RUF005
    return stored, output


@functools.partial(GluonKernel, do_not_specialize_on_alignment=["state_slots", "slots"])
def _verify_states_kernel(
    vectors, state, state_slots, slots, out, eps, FIXED: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """One sequence and value head."""
    release(EARLY)
    T: gl.constexpr = FIXED.num_tokens
    HV: gl.constexpr = FIXED.num_v_heads
    GROUP: gl.constexpr = HV // FIXED.num_k_heads
    VECTORS: gl.constexpr = 2 * _DIM + 2 * GROUP * _DIM + 2 * GROUP
    head = gl.program_id(0)
    i_seq = gl.program_id(1).to(gl.int64)
    slot = gl.load(state_slots + i_seq).to(gl.int64)
    if slot == 0:
        wait(EARLY)
    else:
        o_k = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, _BLOCK))
        o_v = gl.arange(0, _DIM, layout=gl.SliceLayout(0, _BLOCK))
        p_state = state + (slot * HV + head) * (_DIM * _DIM)
        states = ()
        for i in gl.static_range(_DIM // _ROWS):
            rows = i * _ROWS + o_k
            block = gl.load(p_state + rows[:, None] * _DIM + o_v[None, :])
            states = states + (block,)  # type: ignore[assignment]  # noqa: RUF005
        wait(EARLY)  # what is loaded until here no kernel of this step has written
        in_group = head % GROUP
        p_vectors = vectors + (i_seq * FIXED.num_k_heads + head // GROUP) * (T * VECTORS)
        keys = gl.allocate_shared_memory(gl.float32, [T, 2 * _DIM], _FLAT)
        for t in gl.static_range(T):
            keys.index(t).store(gl.load(p_vectors + t * VECTORS + gl.arange(0, 2 * _DIM, layout=_VECTOR)))
        thread_barrier()
        for t in range(T):
            p_values = p_vectors + t * VECTORS + 2 * _DIM
            p_decay = p_values + 2 * GROUP * _DIM + in_group
            value = gl.load(p_values + in_group * _DIM + o_v)
            gate = gl.load(p_values + (GROUP + in_group) * _DIM + o_v)
            after = gl.load(slots + i_seq * T + t).to(gl.int64)
            p_after = state + (after * HV + head) * (_DIM * _DIM)
            states, output = _token(
                states, keys.index(t), value, gl.load(p_decay), gl.load(p_decay + GROUP), p_after, after > 0
            )
            normed = output * gl.rsqrt(gl.sum(output * output, 0) / _DIM + eps) * gate
            p_out = out + (i_seq * T + t) * (HV * _DIM) + head * _DIM
            gl.store(p_out + o_v, normed.to(out.dtype.element_ty))


def takes(state: Tensor, num_seqs: int) -> bool:
    """Whether the kernel exists for these states ``[slots, HV, K, V]``, and serves so few sequences faster (measured on
    an H200: up to 8 with 32 heads in bfloat16)."""
    few = num_seqs * state.shape[1] * state.element_size() <= 4 * MULTIPROCESSORS
    return few and is_hopper(state.device) and tuple(state.shape[2:]) == (_DIM.value, _DIM.value)


def launch_verify_states(
    vectors: Tensor, state: Tensor, state_slots: Tensor, slots: Tensor, out: Tensor, eps: float,
    geometry: GatedDeltaNetConfig,
) -> None:  # fmt: skip
    """States after each token and outputs ``[S * T, HV * V]`` from what ``gdn_verify.py`` leaves of the tokens.

    Args:
        vectors: ``[S, HK, T, 2 K + 2 G V + 2 G]`` float32: query, key, values and gates of the G heads of a group,
            their decays and write strengths.
        state, state_slots, slots, eps, geometry: as of ``gdn_verify``.
    """
    num_seqs, num_tokens = slots.shape
    fixed = Fixed(num_tokens, geometry.num_k_heads, geometry.num_v_heads)
    _verify_states_kernel[(geometry.num_v_heads, num_seqs)](
        vectors, state, state_slots, slots, out, eps, FIXED=fixed, num_warps=8, **early_launch(state.device)
    )
