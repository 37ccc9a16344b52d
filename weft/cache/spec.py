"""The cost of a page and of a state slot of a model: the sum over its layers' specs.

Planning pools and eviction use bytes and FLOPs per page, per slot and per token.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from weft.config import EngineConfig
from weft.config.chunks import CHUNK_SIZE
from weft.config.layer_spec import CacheDtypes, LayerSpec
from weft.config.model import ModelConfig
from weft.config.weights import mlp_weights, router_weights
from weft.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The caches of one rank.

    Attributes:
        layers: the specs of layers with a cache on this rank, by name in the layer table, in model order.
        weights_per_token: weights that one token uses in the whole model: token mixers, and MLPs with the chosen
            experts. The output head is not included, since only the last token of a prompt needs it.
        flops_per_token: FLOPs of one prompt token in the whole model, without attention between tokens and without the
            output head.
        flops_per_pair: FLOPs of attention for one pair of a token and an earlier one, over all layers.
    """

    page_size: int
    layers: Mapping[str, LayerSpec] = field(default_factory=dict)
    weights_per_token: int = 0
    flops_per_token: float = 1.0
    flops_per_pair: float = 0.0

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        """Make the spec of each rank of an engine."""
        return cls.from_model(
            config.model_config,
            page_size=config.page_size,
            dtypes=cache_dtypes(config),
            tp_size=config.tensor_parallel_size,
        )

    @classmethod
    def from_model(cls, model: ModelConfig, *, page_size: int, dtypes: CacheDtypes, tp_size: int = 1) -> Self:
        """Make the spec of each of ``tp_size`` ranks.

        Raises:
            ConfigError: a layer needs pages of another size.
        """
        layers = model.layer_specs(dtypes)
        for name, spec in layers.items():
            if page_size % spec.page_multiple:
                raise ConfigError(f"page_size={page_size} does not fit {name}; give a multiple of {spec.page_multiple}")
        weights = sum(spec.num_weights for spec in layers.values()) + _mlp_weights(model)
        weights += 2 * model.hidden_size**2 * len(model.head_layers)
        return cls(
            page_size=page_size,
            layers={name: spec.on_rank(tp_size) for name, spec in layers.items()},
            weights_per_token=weights,
            flops_per_token=2.0 * weights + sum(spec.flops_per_token for spec in layers.values()),
            flops_per_pair=sum(spec.flops_per_pair for spec in layers.values()),
        )

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(spec.token_bytes for spec in self.layers.values())

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.kv_bytes_per_token

    @property
    def slot_bytes(self) -> int:
        """Bytes of one state slot over all layers; 0 without recurrent layers."""
        return sum(spec.slot_bytes for spec in self.layers.values())

    @property
    def has_states(self) -> bool:
        """Whether any layer keeps a recurrent state, so that requests need a slot."""
        return any(spec.states for spec in self.layers.values())

    @property
    def alignment(self) -> int:
        """Tokens between positions at which a chunk always ends; 1 without recurrent layers."""
        return CHUNK_SIZE if self.has_states else 1

    def prefill_flops(self, start: int, end: int) -> float:
        """FLOPs of computing tokens ``start`` to ``end`` when everything before them is cached."""
        pairs = (end * (end + 1) - start * (start + 1)) / 2
        return self.flops_per_token * (end - start) + self.flops_per_pair * pairs

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


def cache_dtypes(config: EngineConfig) -> CacheDtypes:
    kv = "float8_e4m3fn" if config.kv_cache_dtype == "fp8" else config.dtype
    return CacheDtypes(model=config.dtype, kv=kv, state=config.mamba_ssm_dtype)


def _mlp_weights(model: ModelConfig) -> int:
    """Weights of the MLPs that one token uses: the dense ones, the chosen experts, and the router."""
    return mlp_weights(model, 0 if model.moe is None else model.moe.num_experts_per_tok) + router_weights(model)
