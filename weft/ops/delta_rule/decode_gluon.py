"""States of the delta rule in bfloat16 through one token, in Gluon, for more than a few rows.

Job: the state update of ``verify.py`` for one token of each sequence, and of ``kda_decode``, in a separate launch.
Owns: who holds what of a state. Does not know: convolutions, gates, who asks for the token.

The step is bound by memory. A program has one head of one row. Its four warps request the whole state before the
previous kernel has ended, whole rows at a time. They hold the state as it is stored, two numbers in a word. Numbers are
widened for the products with key and query, and once more for the update; kept as float32 they would leave room for
half as many programs.

Graph-safe: the grid is the padded number of rows; rows with slot 0 leave.
"""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from weft.ops.delta_rule.vectors import StatesFixed, Vectors
from weft.ops.triton.early_launch import ALWAYS, early_launch, release, wait
from weft.ops.triton.hopper import GluonKernel, pack, runs_gluon
from weft.ops.triton.sizes import MULTIPROCESSORS

_DIM = gl.constexpr(128)
_PAIRS = gl.constexpr(64)
_ROWS = gl.constexpr(8)
"""Rows of the state at a time: a warp has two, 16 bytes to a thread."""
_BLOCK = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))
_VECTOR = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))


@gluon.jit
def unpack(pairs):
    """The lower and the upper numbers in bfloat16 of some words, float32."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
        "=f,=f,r", [pairs], dtype=(gl.float32, gl.float32), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def update(pairs, decay, k, low, high):
    """``pairs * decay + k * (low, high)``, rounded. Other instructions than those of ``unpack`` widen, lest the
    assembler keep its results all the time between."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 low, high;
        .reg .f32 new_low, new_high;
        prmt.b32 low, $1, 0, 0x1044;
        prmt.b32 high, $1, 0, 0x3244;
        mul.f32 new_low, $3, $4;
        mul.f32 new_high, $3, $5;
        fma.rn.f32 new_low, low, $2, new_low;
        fma.rn.f32 new_high, high, $2, new_high;
        cvt.rn.bf16x2.f32 $0, new_high, new_low;
        }""",
        "=r,r,f,f,f,f", [pairs, decay, k, low, high], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _add(a, b, c, d, other_a, other_b, other_c, other_d):
    return a + other_a, b + other_b, c + other_c, d + other_d


@functools.partial(GluonKernel, do_not_specialize_on_alignment=["state_slots", "slots"])
def _decode_states_kernel(
    vectors, state, state_slots, slots, out, eps, FIXED: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Compute one row and value head. ``state`` and ``out`` are words of two numbers, of even and odd columns."""
    release(EARLY, ALWAYS)
    HV: gl.constexpr = FIXED.num_v_heads
    GROUP: gl.constexpr = HV // FIXED.num_k_heads
    PER_CHANNEL: gl.constexpr = FIXED.vectors.channels > 1
    STATE: gl.constexpr = _DIM * _PAIRS
    head = gl.program_id(0)
    row = gl.program_id(1).to(gl.int64)
    slot = gl.load(state_slots + row).to(gl.int64)
    if slot == 0:
        wait(EARLY)
    else:
        o_k = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, _BLOCK))
        o_pair = gl.arange(0, _PAIRS, layout=gl.SliceLayout(0, _BLOCK))
        inside = o_k[:, None] * _PAIRS + o_pair[None, :]
        p_state = state + (slot * HV + head) * STATE + inside
        states = ()
        for i in gl.static_range(_DIM // _ROWS):
            states = states + (gl.load(p_state + i * (_ROWS * _PAIRS)),)  # type: ignore[assignment]  # noqa: RUF005
        after = gl.load(slots + row).to(gl.int64)
        wait(EARLY)  # what is loaded until here no kernel of this step has written
        in_group = head % GROUP
        p_query = vectors + (row * FIXED.num_k_heads + head // GROUP) * FIXED.vectors.size
        p_key = p_query + _DIM
        p_value = p_query + FIXED.vectors.values + in_group * _DIM + 2 * o_pair
        p_gate = p_query + FIXED.vectors.gates + in_group * _DIM + 2 * o_pair
        p_decay = p_query + FIXED.vectors.decays + in_group * FIXED.vectors.channels
        decay = 1.0 if PER_CHANNEL else gl.load(p_decay)  # of sums over channels
        beta = gl.load(p_query + FIXED.vectors.betas + in_group)
        o_dim = gl.arange(0, _DIM, layout=_VECTOR)
        query_key = gl.sum(gl.load(p_query + o_dim) * gl.load(p_key + o_dim), 0)
        keys = ()
        k_low = gl.zeros([_ROWS, _PAIRS], gl.float32, layout=_BLOCK)
        k_high = k_low
        q_low = k_low
        q_high = k_low
        for i in gl.static_range(_DIM // _ROWS):
            q = gl.load(p_query + i * _ROWS + o_k)[:, None]
            k = gl.load(p_key + i * _ROWS + o_k)[:, None]
            keys = keys + (k,)  # type: ignore[assignment]  # noqa: RUF005
            if PER_CHANNEL:
                fade = gl.load(p_decay + i * _ROWS + o_k)[:, None]
                q = q * fade
                k = k * fade
            low, high = unpack(states[i])
            k_low = k_low + low * k  # not in place: all four begin as one
            k_high = k_high + high * k
            q_low = q_low + low * q
            q_high = q_high + high * q
        k_low, k_high, q_low, q_high = gl.reduce((k_low, k_high, q_low, q_high), 0, _add)
        delta_low = (gl.load(p_value) - k_low * decay) * beta
        delta_high = (gl.load(p_value + 1) - k_high * decay) * beta
        if after > 0:
            p_after = state + (after * HV + head) * STATE + inside
            for i in gl.static_range(_DIM // _ROWS):
                fade = decay
                if PER_CHANNEL:  # read again: there is no room to keep them
                    fade = gl.load(p_decay + i * _ROWS + o_k)[:, None]
                new = update(states[i], fade, keys[i], delta_low[None, :], delta_high[None, :])
                gl.store(p_after + i * (_ROWS * _PAIRS), new)
        out_low = q_low * decay + query_key * delta_low
        out_high = q_high * decay + query_key * delta_high
        scale = gl.rsqrt(gl.sum(out_low * out_low + out_high * out_high, 0) / _DIM + eps)
        normed = pack(out_low * scale * gl.load(p_gate), out_high * scale * gl.load(p_gate + 1))
        gl.store(out + (row * HV + head) * _PAIRS + o_pair, normed)


def takes(state: Tensor, out_dtype: torch.dtype, num_rows: int) -> bool:
    """Whether the kernel exists for these states ``[slots, HV, K, V]`` and outputs, and serves so many rows faster: not
    where its programs fill an H200 just once, four to a multiprocessor."""
    is_known = state.dtype == out_dtype == torch.bfloat16 and tuple(state.shape[2:]) == (_DIM.value, _DIM.value)
    fills_once = 2 * MULTIPROCESSORS < num_rows * state.shape[1] <= 4 * MULTIPROCESSORS
    return is_known and runs_gluon(state.device) and not fills_once


def launch_decode_states(
    vectors: Tensor, state: Tensor, state_slots: Tensor, slots: Tensor, out: Tensor, eps: float, places: Vectors
) -> None:
    """Take states through one token of each sequence; see ``launch_verify_states`` of ``verify_gluon.py``."""
    fixed = StatesFixed(1, vectors.shape[1], state.shape[1], places)
    words = state.view(torch.int32), state_slots, slots, out.view(torch.int32)
    _decode_states_kernel[(state.shape[1], slots.shape[0])](
        vectors, *words, eps, FIXED=fixed, num_warps=4, **early_launch(state.device)
    )
