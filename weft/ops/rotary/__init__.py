"""Rotary position embedding (RoFormer, arXiv 2104.09864), alone and fused with the other operations before attention.

Job: frequencies with the length scalings of the supported models, the cos/sin table, and the rotation of queries and
keys. Pairing is "rotate half": dimension i turns with dimension ``i + rotary_dim / 2``. ``qk_norm_rope`` fuses head
norms, rotation and the write to the KV cache into one launch. Owns: the formulas, and
the layout of the merged projection's output (queries, gate, keys, values). Does not know: which layers are rotated, the
projection, or attention.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.config.rope import SUPPORTED_SCALINGS, RopeConfig
from weft.errors import UnsupportedModelError
from weft.ops.attention import store_kv
from weft.ops.backend import Backend, with_kernel
from weft.ops.norm import rms_norm_reference
from weft.ops.rows import by_row


def inverse_frequencies(rope: RopeConfig, max_position_embeddings: int) -> tuple[Tensor, float]:
    """Angle per position of each rotated pair, and the factor for cos and sin.

    Args:
        rope: geometry and scaling.
        max_position_embeddings: the model's context; YaRN derives its factor from it where the checkpoint names none.

    Returns:
        ``[rotary_dim / 2]`` float32 on the CPU, and the attention factor (1.0 but for YaRN).

    Raises:
        UnsupportedModelError: a scaling that is not in ``SUPPORTED_SCALINGS``.
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    inv_freq = 1.0 / rope.theta**exponents
    parameters: dict[str, Any] = dict(rope.parameters)
    match rope.scaling:
        case "default":
            return inv_freq, 1.0
        case "none":
            return torch.zeros_like(inv_freq), 1.0
        case "linear":
            return inv_freq / parameters["factor"], 1.0
        case "proportional":
            inv_freq[parameters["angles"] :] = 0.0
            return inv_freq / parameters["factor"], 1.0
        case "llama3":
            return _llama3(inv_freq, parameters), 1.0
        case "yarn":
            return _yarn(inv_freq, rope, parameters, max_position_embeddings)
    raise UnsupportedModelError(
        f"rope scaling {rope.scaling!r} is not supported; supported: {', '.join(SUPPORTED_SCALINGS)}"
    )


def _llama3(inv_freq: Tensor, parameters: dict[str, Any]) -> Tensor:
    """Llama 3.1: long wavelengths are slowed by ``factor``, short ones kept, those between interpolated."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - keep) * inv_freq / parameters["factor"] + keep * inv_freq


def _yarn(
    inv_freq: Tensor, rope: RopeConfig, parameters: dict[str, Any], max_position_embeddings: int
) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071), "NTK by parts": fast pairs extrapolate, slow pairs interpolate, a ramp between."""
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or max_position_embeddings / original
    low = _yarn_dimension(parameters.get("beta_fast") or 32, rope, original)
    high = _yarn_dimension(parameters.get("beta_slow") or 1, rope, original)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return inv_freq / factor * ramp + inv_freq * (1.0 - ramp), _yarn_attention_factor(factor, parameters)


def _yarn_dimension(turns: float, rope: RopeConfig, original_length: int) -> float:
    """The (real-valued) pair that makes ``turns`` full turns over the original context."""
    return rope.rotary_dim * math.log(original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _yarn_attention_factor(factor: float, parameters: dict[str, Any]) -> float:
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    numerator, denominator = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if numerator and denominator:
        return mscale(numerator) / mscale(denominator)
    return mscale(1.0)


def rotary_table(rope: RopeConfig, max_position_embeddings: int, max_len: int, device: torch.device | str) -> Tensor:
    """Cosines and sines of every position.

    Returns:
        ``[max_len, rotary_dim]`` float32 on ``device``: ``rotary_dim / 2`` cosines, then as many sines; the attention
        factor is folded in.
    """
    inv_freq, attention_factor = inverse_frequencies(rope, max_position_embeddings)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inv_freq
    table = torch.cat([angles.cos(), angles.sin()], dim=-1) * attention_factor
    return table.to(device)


def apply_rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first ``rotary_dim`` dimensions of every head, as torch operations; the others pass through. Part of
    ``qk_norm_rope``.

    Args:
        q: ``[T, Hq, D]``.
        k: ``[T, Hkv, D]``, same dtype.
        positions: ``[T]`` int64, each below ``cos_sin``'s length.
        cos_sin: ``[max_len, rotary_dim]`` float32 from ``rotary_table``; ``rotary_dim`` is at most D.

    Returns:
        The rotated ``(q, k)``, computed in float32 and rounded once to q's dtype. The inputs are not modified; the
        results need not be contiguous.
    """
    rotary_dim = cos_sin.shape[-1]
    num_q_heads = q.shape[1]
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    x = torch.cat([q, k], dim=1)  # queries and keys turn by the same angles: one pass over both
    rotated = x[..., :rotary_dim].float()
    first, second = rotated.chunk(2, dim=-1)
    out = torch.empty_like(x)
    half = rotary_dim // 2
    out[..., :half] = (first * cos).addcmul_(second, sin, value=-1.0)
    out[..., half:rotary_dim] = (second * cos).addcmul_(first, sin)
    if rotary_dim < x.shape[-1]:
        out[..., rotary_dim:] = x[..., rotary_dim:]
    return out[:, :num_q_heads], out[:, num_q_heads:]


class QkvHeads(NamedTuple):
    """Parts of a merged projection's output: queries, the output gate if ``gated``, keys, values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    gated: bool


class HeadNorms(NamedTuple):
    """RMSNorm of every query head and every key head (see ``rms_norm``); weights ``[D]``, or both None: no norm."""

    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    zero_centered: bool


class CacheSlots(NamedTuple):
    """The slots of a paged cache that receive a step's keys and values.

    Attributes:
        k_cache, v_cache: ``[num_pages, page_size, Hkv, D]`` in the inputs' dtype or e4m3, written in place.
        slot_mapping: ``[T]`` int64; padding tokens name a slot of page 0.
        k_scale, v_scale: ``[1]`` float32, or both None. Keys and values are divided by their scale when stored. Queries
            are multiplied by ``k_scale``, so that scores do not change; ``paged_attention`` multiplies by ``v_scale``.
    """

    k_cache: Tensor
    v_cache: Tensor
    slot_mapping: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


@with_kernel("weft.ops.rotary.kernels", by_row("qkv", "positions", "cache.slot_mapping"))
def qk_norm_rope(
    qkv: Tensor,
    heads: QkvHeads,
    norms: HeadNorms,
    cos_sin: Tensor,
    positions: Tensor,
    cache: CacheSlots,
    *,
    backend: Backend,
) -> tuple[Tensor, Tensor | None]:
    """Split a merged projection, normalise and rotate queries and keys, and store keys and values in their pages.

    Args:
        qkv: ``[T, (Hq + Hq if gated + 2 * Hkv) * D]``: queries, gate, keys, values, one after the other.
        cos_sin: ``[max_len, rotary_dim]`` float32 from ``rotary_table``; the first rotary_dim dimensions turn.
        positions: ``[T]`` int64.

    Returns:
        ``q [T, Hq, D]`` in qkv's dtype, and the gate ``[T, Hq * D]``, a view of ``qkv`` (None unless ``gated``).
    """
    q, k, v, gate = split_qkv(qkv, heads)
    if norms.q_weight is not None and norms.k_weight is not None:
        q = rms_norm_reference(q, norms.q_weight, norms.eps, zero_centered=norms.zero_centered)
        k = rms_norm_reference(k, norms.k_weight, norms.eps, zero_centered=norms.zero_centered)
        assert isinstance(q, Tensor) and isinstance(k, Tensor)
    q, k = apply_rotary(q, k, positions, cos_sin)
    k_cache, v_cache, slot_mapping, k_scale, v_scale = cache
    if k_scale is not None and v_scale is not None:
        q, k, v = ((x.float() * scale).to(x.dtype) for x, scale in ((q, k_scale), (k, 1 / k_scale), (v, 1 / v_scale)))
    store_kv(k, v, k_cache, v_cache, slot_mapping)
    return q, gate


def split_qkv(qkv: Tensor, heads: QkvHeads) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Views ``q [T, Hq, D]``, ``k`` and ``v [T, Hkv, D]``, and the output gate ``[T, Hq * D]`` or None."""
    num_heads, num_kv_heads, head_dim, gated = heads
    q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
    sizes = [q_size, q_size, kv_size, kv_size] if gated else [q_size, kv_size, kv_size]
    parts = list(qkv.split(sizes, dim=-1))
    gate = parts.pop(1) if gated else None
    q, k, v = (part.view(*part.shape[:-1], part.shape[-1] // head_dim, head_dim) for part in parts)
    return q, k, v, gate
