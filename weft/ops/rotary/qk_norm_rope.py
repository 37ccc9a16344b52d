"""Between QKV projection and attention: head norms, rotary embedding, and the write to the KV cache.

Job: one operation for the steps that touch each query, key and value once, so that the GPU does them in one launch.
Owns: the layout of the merged projection's output (queries, gate, keys, values). Does not know: the projection, or
attention.
"""

from __future__ import annotations

from torch import Tensor

from weft.ops.attention.kv_cache import store_kv
from weft.ops.backend import Backend, with_kernel
from weft.ops.norm import rms_norm_reference
from weft.ops.rotary import apply_rotary


@with_kernel("weft.ops.rotary.kernels")
def qk_norm_rope(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    zero_centered: bool,
    cos_sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    gated: bool,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: Backend,
) -> tuple[Tensor, Tensor | None]:
    """Split a merged projection, normalise and rotate queries and keys, and store keys and values in their pages.

    Args:
        qkv: ``[T, (Hq + Hq if gated + 2 * Hkv) * D]``: queries, gate, keys, values, one after the other.
        q_norm, k_norm: ``[D]`` RMSNorm weights of every head, or both None.
        eps, zero_centered: as for ``rms_norm``.
        cos_sin: ``[max_len, rotary_dim]`` float32 from ``rotary_table``; the first rotary_dim dimensions turn.
        positions: ``[T]`` int64.
        k_cache, v_cache: ``[num_pages, page_size, Hkv, D]`` in qkv's dtype or e4m3, written in place.
        slot_mapping: ``[T]`` int64; padding tokens name a slot of page 0.
        gated: whether ``qkv`` holds an output gate.
        k_scale, v_scale: ``[1]`` float32, or both None: the caches get keys and values divided by these, and queries
            are multiplied by ``k_scale``, so that scores are what they were; ``paged_attention`` takes ``v_scale``.

    Returns:
        ``q [T, Hq, D]`` in qkv's dtype, and the gate ``[T, Hq * D]``, a view of ``qkv`` (None unless ``gated``).
    """
    q, k, v, gate = split_qkv(qkv, num_heads, num_kv_heads, head_dim, gated)
    if q_norm is not None and k_norm is not None:
        q = rms_norm_reference(q, q_norm, eps, zero_centered=zero_centered)
        k = rms_norm_reference(k, k_norm, eps, zero_centered=zero_centered)
        assert isinstance(q, Tensor) and isinstance(k, Tensor)
    q, k = apply_rotary(q, k, positions, cos_sin)
    if k_scale is not None and v_scale is not None:
        q, k, v = ((x.float() * scale).to(x.dtype) for x, scale in ((q, k_scale), (k, 1 / k_scale), (v, 1 / v_scale)))
    store_kv(k, v, k_cache, v_cache, slot_mapping)
    return q, gate


def split_qkv(
    qkv: Tensor, num_heads: int, num_kv_heads: int, head_dim: int, gated: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Views ``q [T, Hq, D]``, ``k`` and ``v [T, Hkv, D]``, and the output gate ``[T, Hq * D]`` or None."""
    q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
    sizes = [q_size, q_size, kv_size, kv_size] if gated else [q_size, kv_size, kv_size]
    parts = list(qkv.split(sizes, dim=-1))
    gate = parts.pop(1) if gated else None
    q, k, v = (part.view(*part.shape[:-1], part.shape[-1] // head_dim, head_dim) for part in parts)
    return q, k, v, gate
