"""Cache specs for tests that need no model."""

from __future__ import annotations

from weft.cache.spec import CacheSpec
from weft.config.attention import AttentionConfig
from weft.config.gated_delta_net import GatedDeltaNetConfig
from weft.config.layer_spec import CacheDtypes, LayerSpec
from weft.config.rope import RopeConfig


def make_spec(
    *,
    page_size: int = 4,
    attention: int = 1,
    linear: int = 1,
    kv_heads: int = 1,
    head_dim: int = 4,
    geometry: GatedDeltaNetConfig | None = None,
    dtypes: CacheDtypes | None = None,
    flops_per_token: float = 1.0,
    flops_per_pair: float = 0.0,
) -> CacheSpec:
    """``attention`` layers of softmax attention and ``linear`` layers of Gated DeltaNet, with made-up costs."""
    dtypes = dtypes or CacheDtypes()
    geometry = geometry or GatedDeltaNetConfig(1, 1, 4, 4, 2)
    heads = AttentionConfig(kv_heads, kv_heads, head_dim, RopeConfig(1e4, head_dim))
    layers: dict[str, LayerSpec] = {}
    for i in range(attention):
        layers[f"attention.{i}"] = heads.layer_spec(8, dtypes)
    for i in range(linear):
        layers[f"linear.{i}"] = geometry.layer_spec(8, dtypes)
    return CacheSpec(page_size, layers, flops_per_token=flops_per_token, flops_per_pair=flops_per_pair)
