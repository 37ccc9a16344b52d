"""Queries, keys, values and the output gate as views of the merged QKV projection's output ``q | gate | k | v``."""

from __future__ import annotations

from torch import Tensor


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
