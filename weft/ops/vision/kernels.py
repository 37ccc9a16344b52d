"""Kernels of vision towers, and of their features in the decoder; see ``weft/ops/vision``."""

from math import isqrt

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.backend import launches
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.elementwise import LOG2_E
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2, precision
from weft.ops.vision import (
    add_layer_norm,
    add_media_features,
    bounded_attention,
    grid_positions,
    norm_rotate_patches,
    rotate_patches,
)

_HIDDEN = tl.constexpr(-1e30)
"""Score of a key that a patch does not see; finite, so that a patch that sees none stays finite."""


@jit(do_not_specialize=["num_patches", "stride_bounds"], do_not_specialize_on_alignment=["bounds"])
def _bounded_attention_kernel(
    qkv, bounds, out, num_patches, stride_bounds, scale_log2,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PATCHES: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    enter(EARLY)
    patch = tl.program_id(0) * PATCHES + tl.arange(0, PATCHES)
    column = tl.arange(0, BLOCK_DIM)
    inside = (column < HEAD_DIM)[None, :]
    valid = patch < num_patches
    low = tl.load(bounds + patch * stride_bounds, mask=valid, other=num_patches)
    high = tl.load(bounds + patch * stride_bounds + 1, mask=valid, other=0)
    p_head = qkv + tl.program_id(1) * HEAD_DIM + column[None, :]
    row = 3 * HEADS * HEAD_DIM
    q = tl.load(p_head + patch.to(tl.int64)[:, None] * row, mask=valid[:, None] & inside, other=0.0)
    acc = tl.zeros([PATCHES, BLOCK_DIM], dtype=tl.float32)
    row_sum = tl.zeros([PATCHES], dtype=tl.float32)
    row_max = tl.full([PATCHES], _HIDDEN, dtype=tl.float32)
    for start in tl.range(tl.min(low), tl.max(high), KEYS):
        key = start + tl.arange(0, KEYS)
        mask = (key < num_patches)[:, None] & inside
        p_key = p_head + key.to(tl.int64)[:, None] * row + HEADS * HEAD_DIM
        k = tl.load(p_key, mask=mask, other=0.0)
        v = tl.load(p_key + HEADS * HEAD_DIM, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        visible = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
        scores = tl.where(visible, scores, _HIDDEN)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shrink = tl.exp2(row_max - new_max)
        p = tl.exp2(scores - new_max[:, None])
        row_sum = row_sum * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        row_max = new_max
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    p_out = out + patch.to(tl.int64)[:, None] * (HEADS * HEAD_DIM) + tl.program_id(1) * HEAD_DIM + column[None, :]
    tl.store(p_out, acc.to(out.dtype.element_ty), mask=valid[:, None] & inside)


@launches(bounded_attention, invariant={})
def bounded_attention_triton(qkv, bounds) -> Tensor:
    """Some patches of one head over the keys that any of them sees, softmax online."""
    num_patches, _, heads, head_dim = qkv.shape
    assert qkv.is_contiguous() and bounds.stride(1) == 1 and bounds.dtype == torch.int32
    out = torch.empty(num_patches, heads * head_dim, dtype=qkv.dtype, device=qkv.device)
    exact = qkv.dtype == torch.float32
    patches = 32 if exact else 64
    _bounded_attention_kernel[(cdiv(num_patches, patches), heads)](
        qkv, bounds, out, num_patches, bounds.stride(0), LOG2_E.value * head_dim**-0.5,
        HEADS=heads, HEAD_DIM=head_dim, BLOCK_DIM=max(16, next_power_of_2(head_dim)), PATCHES=patches,
        KEYS=32 if exact else 64, PRECISION=precision(qkv), num_warps=4, num_stages=3,
        **early_launch(qkv.device),
    )  # fmt: skip
    return out


@triton.jit
def _point(place, last, SIDE: tl.constexpr, CENTRED: tl.constexpr):
    """The grid line before a place, the one behind it, and the share of the latter."""
    if CENTRED:
        exact = (place.to(tl.float32) + 0.5) * SIDE / (last + 1).to(tl.float32) - 0.5
        exact = tl.minimum(tl.maximum(exact, 0.0), SIDE - 1)
    else:
        exact = place.to(tl.float32) * (SIDE - 1) / tl.maximum(last, 1).to(tl.float32)
    low = tl.floor(exact)
    line = low.to(tl.int32)
    return line, tl.minimum(line + 1, SIDE - 1), exact - low


@triton.jit
def _share(weight, point, share, column, SIZE: tl.constexpr):
    """Load the share of one point of the grid."""
    return tl.load(weight + point * SIZE + column, mask=column < SIZE, other=0.0).to(tl.float32) * share


@jit
def _grid_positions_kernel(
    weight, places, out,
    SIZE: tl.constexpr, SIDE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, CENTRED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    enter(EARLY)
    patch = tl.program_id(0).to(tl.int64)
    place = places + patch * COLUMNS
    top, bottom, down = _point(tl.load(place), tl.load(place + 2), SIDE, CENTRED)
    left, right, across = _point(tl.load(place + 1), tl.load(place + 3), SIDE, CENTRED)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    value = _share(weight, top * SIDE + left, (1 - down) * (1 - across), column, SIZE)
    value += _share(weight, top * SIDE + right, (1 - down) * across, column, SIZE)
    value += _share(weight, bottom * SIDE + left, down * (1 - across), column, SIZE)
    value += _share(weight, bottom * SIDE + right, down * across, column, SIZE)
    tl.store(out + patch * SIZE + column, value.to(out.dtype.element_ty), mask=inside)


@launches(grid_positions, invariant={})
def grid_positions_triton(weight, places, *, centred) -> Tensor:
    """A program has one patch."""
    count, columns = places.shape
    assert weight.is_contiguous() and places.is_contiguous() and places.dtype == torch.int32
    size = weight.shape[1]
    out = torch.empty(count, size, dtype=weight.dtype, device=weight.device)
    _grid_positions_kernel[(count,)](
        weight, places, out, SIZE=size, SIDE=isqrt(len(weight)), COLUMNS=columns, BLOCK=next_power_of_2(size),
        CENTRED=centred, num_warps=4, **early_launch(weight.device),
    )  # fmt: skip
    return out


@jit
def _rotate_kernel(
    qkv, cos_sin, stride_patch,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_HALF: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    enter(EARLY)
    patch = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_HALF)
    half = HEAD_DIM // 2
    inside = column < half
    cos = tl.load(cos_sin + patch * HEAD_DIM + column, mask=inside, other=0.0)[None, :]
    sin = tl.load(cos_sin + patch * HEAD_DIM + half + column, mask=inside, other=0.0)[None, :]
    mask = (row < ROWS)[:, None] & inside[None, :]
    place = qkv + patch * stride_patch + row[:, None] * HEAD_DIM + column[None, :]
    first = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(place + half, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, (first * cos - second * sin).to(qkv.dtype.element_ty), mask=mask)
    tl.store(place + half, (second * cos + first * sin).to(qkv.dtype.element_ty), mask=mask)


@launches(rotate_patches, invariant={})
def rotate_patches_triton(qkv, cos_sin) -> Tensor:
    """One program turns all queries and keys of one patch."""
    num_patches, _, heads, head_dim = qkv.shape
    assert qkv.is_contiguous() and cos_sin.is_contiguous() and cos_sin.shape == (num_patches, head_dim)
    rows = 2 * heads  # queries and keys stand one after the other
    _rotate_kernel[(num_patches,)](
        qkv, cos_sin, qkv.stride(0), ROWS=rows, HEAD_DIM=head_dim,
        BLOCK_ROWS=next_power_of_2(rows), BLOCK_HALF=next_power_of_2(head_dim // 2), num_warps=4,
        **early_launch(qkv.device),
    )  # fmt: skip
    return qkv


@jit
def _norm_rotate_kernel(
    qkv, q_weight, k_weight, cos_sin, stride_patch, eps,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_HALF: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    enter(EARLY)
    patch = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, BLOCK_ROWS)[:, None], tl.arange(0, BLOCK_HALF)[None, :]
    half = HEAD_DIM // 2
    inside = column < half
    mask = (row < 2 * HEADS) & inside
    place = qkv + patch * stride_patch + row * HEAD_DIM + column
    first = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(place + half, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(first * first + second * second, 1) / HEAD_DIM + eps)[:, None]
    is_query = (row < HEADS) & inside
    is_key = (row >= HEADS) & mask
    w = tl.load(q_weight + column + row * 0, mask=is_query, other=0.0).to(tl.float32)
    w += tl.load(k_weight + column + row * 0, mask=is_key, other=0.0).to(tl.float32)
    first = first * scale * w
    w = tl.load(q_weight + half + column + row * 0, mask=is_query, other=0.0).to(tl.float32)
    w += tl.load(k_weight + half + column + row * 0, mask=is_key, other=0.0).to(tl.float32)
    second = second * scale * w
    cos = tl.load(cos_sin + patch * HEAD_DIM + column, mask=inside, other=0.0)
    sin = tl.load(cos_sin + patch * HEAD_DIM + half + column, mask=inside, other=0.0)
    tl.store(place, (first * cos - second * sin).to(qkv.dtype.element_ty), mask=mask)
    tl.store(place + half, (second * cos + first * sin).to(qkv.dtype.element_ty), mask=mask)


@launches(norm_rotate_patches, invariant={})
def norm_rotate_patches_triton(qkv, q_weight, k_weight, eps, cos_sin) -> Tensor:
    """One program has all queries and keys of one patch."""
    num_patches, _, heads, head_dim = qkv.shape
    assert qkv.is_contiguous() and cos_sin.is_contiguous() and cos_sin.shape == (num_patches, head_dim)
    _norm_rotate_kernel[(num_patches,)](
        qkv, q_weight, k_weight, cos_sin, qkv.stride(0), eps, HEADS=heads, HEAD_DIM=head_dim,
        BLOCK_ROWS=next_power_of_2(2 * heads), BLOCK_HALF=next_power_of_2(head_dim // 2), num_warps=4,
        **early_launch(qkv.device),
    )  # fmt: skip
    return qkv


@jit
def _add_layer_norm_kernel(
    x, y, weight, bias, total, out, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    enter(EARLY)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    place = tl.program_id(0).to(tl.int64) * SIZE + column
    both = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    both += tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
    rounded = both.to(total.dtype.element_ty)
    tl.store(total + place, rounded, mask=inside)
    values = rounded.to(tl.float32)
    mean = tl.sum(values, 0) / SIZE
    centred = tl.where(inside, values - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / SIZE + eps)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, (centred * scale * w + b).to(out.dtype.element_ty), mask=inside)


@launches(add_layer_norm, invariant={})
def add_layer_norm_triton(x, y, weight, bias, eps) -> tuple[Tensor, Tensor]:
    """A program has one row."""
    rows, size = x.shape
    assert x.is_contiguous() and y.is_contiguous() and x.shape == y.shape
    total, out = torch.empty_like(x), torch.empty_like(x)
    block = next_power_of_2(size)
    _add_layer_norm_kernel[(rows,)](
        x, y, weight, bias, total, out, eps, SIZE=size, BLOCK=block, num_warps=4 if block <= 2048 else 8,
        **early_launch(x.device),
    )  # fmt: skip
    return total, out


@jit(do_not_specialize=["first_id"])
def _add_kernel(
    x, ids, features, out, first_id,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some columns of one token."""
    enter(EARLY)
    token = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    row = tl.load(ids + token) - first_id
    value = tl.load(x + token * HIDDEN + columns, mask=inside, other=0.0).to(tl.float32)
    has_features = inside & (row >= 0)
    value += tl.load(features + row * HIDDEN + columns, mask=has_features, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + columns, value.to(out.dtype.element_ty), mask=inside)


@launches(add_media_features, invariant={})
def add_media_features_triton(x, ids, features, first_id) -> Tensor:
    """Features are read only for the tokens that have some."""
    num_tokens, hidden_size = x.shape
    assert x.is_contiguous() and features.is_contiguous()
    out = torch.empty_like(x)
    block = min(1024, next_power_of_2(hidden_size))
    _add_kernel[(cdiv(hidden_size, block), num_tokens)](
        x, ids, features, out, first_id, HIDDEN=hidden_size, BLOCK=block, num_warps=4, **early_launch(x.device),
    )  # fmt: skip
    return out
