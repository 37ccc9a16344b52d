"""Head norms, rotary embedding and the KV store in one launch.

Job: ``qk_norm_rope`` on the GPU. Owns: how many heads of how many tokens a program takes. Does not know: the
projection, or attention.

A program takes some heads of some tokens: query heads go to the output, key heads to their page, and the program of a
key head stores the value head beside it. Angles and the norms' weights load before the projection has ended.
Arithmetic is float32 from the projection's output to the one rounding.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.backend import launches
from weft.ops.fp8 import E4M3_MAX
from weft.ops.rotary import qk_norm_rope, split_qkv
from weft.ops.triton.early_launch import early_launch, release, wait
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2
from weft.ops.triton.tile_table import choose_tile

_E4M3_MAX = tl.constexpr(E4M3_MAX)


class Tile(NamedTuple):
    """Tokens and heads of a program (heads of 128 dimensions; fewer if wider), warps, and a limit on registers."""

    tokens: int
    heads: int
    warps: int
    max_registers: int | None


# By number of tokens, see benchmarks/kernels/rows.py. Few tokens: many small programs, each with little to wait for.
# Many: more heads per program, which share their token's angles.
TILES = {2048: Tile(2, 8, 4, 96), 1 << 30: Tile(1, 8, 2, None)}


@triton.jit
def _scale(weight, columns, WIDTH: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    """Load the factors of the norm for some columns, ``[1, BLOCK]``."""
    scale = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)[None, :]
    if ZERO_CENTERED:
        scale += 1.0
    return scale


class Fixed(NamedTuple):
    """Compile-time parameters of the kernel.

    Attributes:
        num_heads, num_kv_heads, head_dim: of the layer.
        rotary_dim: so many dimensions turn, the first ones.
        norm, zero_centered: whether heads are normalised, and by ``1 + weight``.
        tokens, heads, kv_heads: that a program takes.
        q_programs: programs of a token's query heads; those after them are its key heads'.
        block_d: a power of two that holds a head.
        scaled: the cache holds keys and values divided by a scale each; queries are multiplied by that of the keys.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    norm: bool
    zero_centered: bool
    tokens: int
    heads: int
    kv_heads: int
    q_programs: int
    block_d: int
    scaled: bool


@triton.jit
def _store(pointers, x, mask):
    """Round and store; what e4m3 cannot hold saturates."""
    if pointers.dtype.element_ty == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x, -_E4M3_MAX), _E4M3_MAX)
    tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def _load_factors(p_angles, mask, weight, FIXED: tl.constexpr):
    """Load the factors of ``_turn_halves`` or ``_turn_part``: cosines, sines, and the norm's scales of a column and of
    its partner. No kernel of the step writes these.

    ``p_angles``: ``[ROWS]`` pointers to each row's cosines and sines.
    """
    ROTARY_DIM: tl.constexpr = FIXED.rotary_dim
    HALF: tl.constexpr = ROTARY_DIM // 2
    ALL: tl.constexpr = FIXED.rotary_dim == FIXED.head_dim
    COLUMNS: tl.constexpr = FIXED.block_d // 2 if ALL else FIXED.block_d
    WIDTH: tl.constexpr = HALF if ALL else FIXED.head_dim
    columns = tl.arange(0, COLUMNS)
    turns = mask[:, None] & (columns < (HALF if ALL else ROTARY_DIM))[None, :]
    p_angles = p_angles[:, None] + (columns if ALL else columns % HALF)[None, :]
    cos = tl.load(p_angles, mask=turns, other=1.0)
    sin = tl.load(p_angles + HALF, mask=turns, other=0.0)
    scale = 1.0
    other_scale = 1.0
    if FIXED.norm:
        scale = _scale(weight, columns, WIDTH, FIXED.zero_centered)
        if ALL:
            other_scale = _scale(weight + HALF, columns, WIDTH, FIXED.zero_centered)
        else:
            partner = tl.where(columns < HALF, columns + HALF, columns - HALF)
            other_scale = _scale(
                weight, tl.where(columns < ROTARY_DIM, partner, 0), WIDTH, FIXED.zero_centered
            )  # fmt: skip
    return cos, sin, scale, other_scale


@triton.jit
def _turn_halves(p_from, p_to, mask, factors, eps, factor, FIXED: tl.constexpr):
    """Normalise heads and turn their halves with one another. ``p_from``, ``p_to``: ``[ROWS]`` pointers to heads."""
    cos, sin, scale_x, scale_y = factors
    HEAD_DIM: tl.constexpr = FIXED.head_dim
    HALF: tl.constexpr = HEAD_DIM // 2
    columns = tl.arange(0, FIXED.block_d // 2)
    inside = mask[:, None] & (columns < HALF)[None, :]
    p_from, p_to = p_from[:, None] + columns[None, :], p_to[:, None] + columns[None, :]
    x = tl.load(p_from, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(p_from + HALF, mask=inside, other=0.0).to(tl.float32)
    if FIXED.norm:
        inverse = tl.rsqrt(tl.sum(x * x + y * y, 1) / HEAD_DIM + eps)[:, None]
        x = x * inverse * scale_x
        y = y * inverse * scale_y
    _store(p_to, (x * cos - y * sin) * factor, inside)
    _store(p_to + HALF, (y * cos + x * sin) * factor, inside)


@triton.jit
def _turn_part(p_from, p_to, mask, factors, eps, factor, FIXED: tl.constexpr):
    """``_turn_halves`` where only the first ``rotary_dim`` dimensions turn: those read their partner as well."""
    cos, sin, scale_x, scale_y = factors
    HEAD_DIM: tl.constexpr = FIXED.head_dim
    ROTARY_DIM: tl.constexpr = FIXED.rotary_dim
    HALF: tl.constexpr = ROTARY_DIM // 2
    columns = tl.arange(0, FIXED.block_d)
    inside = mask[:, None] & (columns < HEAD_DIM)[None, :]
    turns = mask[:, None] & (columns < ROTARY_DIM)[None, :]
    partner = tl.where(columns < HALF, columns + HALF, columns - HALF)
    x = tl.load(p_from[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    y = tl.load(p_from[:, None] + partner[None, :], mask=turns, other=0.0).to(tl.float32)
    if FIXED.norm:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        x = x * inverse * scale_x
        y = y * inverse * scale_y
    x = x * cos + y * tl.where((columns < HALF)[None, :], -sin, sin)
    _store(p_to[:, None] + columns[None, :], x * factor, inside)


@triton.jit
def _norm_rope(p_from, p_to, mask, factors, eps, factor, FIXED: tl.constexpr):
    if FIXED.rotary_dim == FIXED.head_dim:
        _turn_halves(p_from, p_to, mask, factors, eps, factor, FIXED)
    else:
        _turn_part(p_from, p_to, mask, factors, eps, factor, FIXED)


@jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["positions", "slot_mapping"])
def _qk_norm_rope_kernel(
    q, k, v, q_norm, k_norm, cos_sin, positions, slot_mapping, q_out, k_cache, v_cache, k_scale, v_scale, eps,
    num_tokens, stride_qkv,
    FIXED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some query heads, or some key and value heads, of some tokens, as rows."""
    release(EARLY)
    NUM_HEADS: tl.constexpr = FIXED.num_heads
    NUM_KV_HEADS: tl.constexpr = FIXED.num_kv_heads
    HEAD_DIM: tl.constexpr = FIXED.head_dim
    ROTARY_DIM: tl.constexpr = FIXED.rotary_dim
    TOKENS: tl.constexpr = FIXED.tokens
    HEADS: tl.constexpr = FIXED.heads
    KV_HEADS: tl.constexpr = FIXED.kv_heads
    Q_PROGRAMS: tl.constexpr = FIXED.q_programs
    program = tl.program_id(0)
    if program < Q_PROGRAMS:
        row = tl.arange(0, TOKENS * HEADS)
        tokens = (tl.program_id(1) * TOKENS + row // HEADS).to(tl.int64)
        heads = program * HEADS + row % HEADS
        mask = (tokens < num_tokens) & (heads < NUM_HEADS)
        p_angles = cos_sin + tl.load(positions + tokens, mask=mask, other=0) * ROTARY_DIM
        factors = _load_factors(p_angles, mask, q_norm, FIXED)
        wait(EARLY)
        _norm_rope(
            q + tokens * stride_qkv + heads * HEAD_DIM, q_out + (tokens * NUM_HEADS + heads) * HEAD_DIM, mask, factors,
            eps, tl.load(k_scale) if FIXED.scaled else 1.0, FIXED,
        )  # fmt: skip
        return
    row = tl.arange(0, TOKENS * KV_HEADS)
    tokens = (tl.program_id(1) * TOKENS + row // KV_HEADS).to(tl.int64)
    heads = (program - Q_PROGRAMS) * KV_HEADS + row % KV_HEADS
    mask = (tokens < num_tokens) & (heads < NUM_KV_HEADS)
    p_angles = cos_sin + tl.load(positions + tokens, mask=mask, other=0) * ROTARY_DIM
    inside = tokens * stride_qkv + heads * HEAD_DIM
    stored = (tl.load(slot_mapping + tokens, mask=mask, other=0) * NUM_KV_HEADS + heads) * HEAD_DIM
    factors = _load_factors(p_angles, mask, k_norm, FIXED)
    wait(EARLY)
    dims = tl.arange(0, FIXED.block_d)[None, :]
    inner = mask[:, None] & (dims < HEAD_DIM)
    values = tl.load((v + inside)[:, None] + dims, mask=inner, other=0.0)
    k_factor = 1.0 / tl.load(k_scale) if FIXED.scaled else 1.0
    _norm_rope(k + inside, k_cache + stored, mask, factors, eps, k_factor, FIXED)
    v_factor = 1.0 / tl.load(v_scale) if FIXED.scaled else 1.0
    _store((v_cache + stored)[:, None] + dims, values.to(tl.float32) * v_factor, inner)


@launches(qk_norm_rope, invariant={"tile": Tile(2, 8, 4, 96)})
def qk_norm_rope_triton(
    qkv, heads, norms, cos_sin, positions, cache, *, tile: Tile | None = None
) -> tuple[Tensor, Tensor | None]:
    """``qk_norm_rope`` of ``weft/ops/rotary``. ``tile`` overrides that of ``TILES``."""
    num_heads, num_kv_heads, head_dim, _ = heads
    q_norm, k_norm, eps, zero_centered = norms
    k_cache, v_cache, slot_mapping, k_scale, v_scale = cache
    assert (q_norm is None) == (k_norm is None) and qkv.stride(1) == 1
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and cos_sin.is_contiguous()
    q, k, v, gate = split_qkv(qkv, heads)
    q_out = torch.empty((qkv.shape[0], num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    num_tokens, rotary_dim = qkv.shape[0], cos_sin.shape[1]
    tile = tile or choose_tile(TILES, num_tokens)
    block_d = next_power_of_2(head_dim)
    tile_heads = max(1, tile.heads * 128 // block_d)
    q_heads, kv_heads = (min(tile_heads, next_power_of_2(count)) for count in (num_heads, num_kv_heads))
    q_programs = cdiv(num_heads, q_heads)
    fixed = Fixed(
        num_heads, num_kv_heads, head_dim, rotary_dim, q_norm is not None, zero_centered, tile.tokens, q_heads,
        kv_heads, q_programs, block_d, k_scale is not None,
    )  # fmt: skip
    _qk_norm_rope_kernel[(q_programs + cdiv(num_kv_heads, kv_heads), cdiv(num_tokens, tile.tokens))](
        q, k, v, q if q_norm is None else q_norm, q if k_norm is None else k_norm,
        cos_sin, positions, slot_mapping, q_out, k_cache, v_cache, cos_sin if k_scale is None else k_scale,
        cos_sin if v_scale is None else v_scale, eps, num_tokens, qkv.stride(0),
        FIXED=fixed, num_warps=tile.warps, maxnreg=tile.max_registers,
        **early_launch(qkv.device),
    )  # fmt: skip
    return q_out, gate
