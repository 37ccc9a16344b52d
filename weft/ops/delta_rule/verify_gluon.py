"""States of the delta rule through a few tokens, in Gluon, for few sequences: two threads have a column.

Job: what ``verify.py`` and ``decode.py`` do after the convolutions, in a launch of its own. Owns: who holds
what of a state. Does not know: convolutions, gates, who asks for the tokens.

Few sequences leave each program alone with the time that a token takes it. Here a sum over the rows of the state is one
of additions in two neighbouring threads: nobody waits for other warps before the output's norm. The state is requested
before the kernel before this one has ended.

Graph-safe: the grid is the padded number of sequences; sequences with slot 0 leave.
"""

import functools

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from weft.ops.delta_rule.vectors import StatesFixed, Vectors
from weft.ops.triton.early_launch import early_launch, release, wait
from weft.ops.triton.gluon import thread_barrier
from weft.ops.triton.hopper import GluonKernel, runs_gluon
from weft.ops.triton.sizes import MULTIPROCESSORS

_DIM = gl.constexpr(128)
_ROWS = gl.constexpr(16)
"""Rows of the state that are updated at a time."""
_BLOCK = gl.constexpr(gl.BlockedLayout([8, 1], [2, 16], [1, 8], [1, 0]))
_VECTOR = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _token(states, keys, value, decay, beta, p_after, is_kept):
    """Apply one token; return the states after the token, as stored, and its output ``[V]``.

    Without ``decay`` one for each channel stands behind query and key in ``keys``."""
    faded = ()
    from_k = value * 0.0
    for i in gl.static_range(_DIM // _ROWS):
        b_k = keys.slice(_DIM + i * _ROWS, _ROWS).load(gl.SliceLayout(1, _BLOCK))
        fade = decay
        if decay is None:
            fade = keys.slice(2 * _DIM + i * _ROWS, _ROWS).load(gl.SliceLayout(1, _BLOCK))[:, None]
        block = states[i].to(gl.float32) * fade
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
    """Compute one sequence and value head."""
    release(EARLY)
    T: gl.constexpr = FIXED.num_tokens
    HV: gl.constexpr = FIXED.num_v_heads
    GROUP: gl.constexpr = HV // FIXED.num_k_heads
    PER_CHANNEL: gl.constexpr = FIXED.vectors.channels > 1
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
        p_vectors = vectors + (i_seq * FIXED.num_k_heads + head // GROUP) * (T * FIXED.vectors.size)
        KEYS: gl.constexpr = (4 if PER_CHANNEL else 2) * _DIM  # a power of two
        keys = gl.allocate_shared_memory(gl.float32, [T, KEYS], _FLAT)
        for t in gl.static_range(T):
            p_token = p_vectors + t * FIXED.vectors.size
            token_keys = keys.index(t)
            token_keys.slice(0, 2 * _DIM).store(gl.load(p_token + gl.arange(0, 2 * _DIM, layout=_VECTOR)))
            if PER_CHANNEL:
                decays = gl.load(p_token + FIXED.vectors.decays + gl.arange(0, _DIM, layout=_VECTOR))
                token_keys.slice(2 * _DIM, _DIM).store(decays)
        thread_barrier()
        for t in range(T):
            p_token = p_vectors + t * FIXED.vectors.size
            p_decay = p_token + FIXED.vectors.decays + in_group
            value = gl.load(p_token + FIXED.vectors.values + in_group * _DIM + o_v)
            gate = gl.load(p_token + FIXED.vectors.gates + in_group * _DIM + o_v)
            after = gl.load(slots + i_seq * T + t).to(gl.int64)
            p_after = state + (after * HV + head) * (_DIM * _DIM)
            decay = None if PER_CHANNEL else gl.load(p_decay)
            beta = gl.load(p_token + FIXED.vectors.betas + in_group)
            states, output = _token(states, keys.index(t), value, decay, beta, p_after, after > 0)
            normed = output * gl.rsqrt(gl.sum(output * output, 0) / _DIM + eps) * gate
            p_out = out + (i_seq * T + t) * (HV * _DIM) + head * _DIM
            gl.store(p_out + o_v, normed.to(out.dtype.element_ty))


def takes(state: Tensor, num_seqs: int) -> bool:
    """Whether the kernel exists for these states ``[slots, HV, K, V]``, and serves so few sequences faster (measured on
    an H200: up to 8 with 32 heads in bfloat16)."""
    few = num_seqs * state.shape[1] * state.element_size() <= 4 * MULTIPROCESSORS
    return few and runs_gluon(state.device) and tuple(state.shape[2:]) == (_DIM.value, _DIM.value)


def launch_verify_states(
    vectors: Tensor, state: Tensor, state_slots: Tensor, slots: Tensor, out: Tensor, eps: float, places: Vectors
) -> None:
    """States after each token, and outputs.

    Args:
        vectors: ``[S, HK, T, places.size]`` float32: what the launch before left of the tokens, where ``places`` says.
        state: ``[slots, HV, K, V]``.
        state_slots, slots, eps: as of ``gdn_verify``.
        out: ``[S * T, HV * V]``; rows of sequences without a slot are left as they are.
    """
    (num_seqs, num_tokens), num_heads = slots.shape, state.shape[1]
    fixed = StatesFixed(num_tokens, vectors.shape[1], num_heads, places)
    _verify_states_kernel[(num_heads, num_seqs)](
        vectors, state, state_slots, slots, out, eps, FIXED=fixed, num_warps=8, **early_launch(state.device)
    )
