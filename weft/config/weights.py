"""The size of a model's weights in bytes, from its geometry alone.

``weft config`` and the roofline use it before anything is loaded. Norms, convolutions, biases and the scales of FP8 are
left out; they are less than a hundredth. If a checkpoint has several forms, its main form counts for all linear layers.
"""

from weft.config.layer_spec import DTYPE_BYTES, CacheDtypes
from weft.config.model import ModelConfig


def linear_weight_bytes(model: ModelConfig, dtype: str) -> float:
    """Bytes of one weight of a linear layer or an expert; ``dtype`` is the computing dtype."""
    return DTYPE_BYTES[dtype] if model.quantization is None else model.quantization.main.bytes_per_weight


def router_weights(model: ModelConfig) -> int:
    """Weights of all routers, which are never quantised."""
    return 0 if model.moe is None else model.num_sparse_mlps * model.hidden_size * model.moe.num_experts


def rank_weight_bytes(model: ModelConfig, dtype: str, ranks: int) -> int:
    """Bytes of weights on one of ``ranks``: its share, and the whole vision tower."""
    tower = tower_bytes(model, dtype)
    return (weight_bytes(model, dtype) - tower) // ranks + tower


def tower_bytes(model: ModelConfig, dtype: str) -> int:
    """Bytes of the vision tower, if it runs."""
    return model.vision.num_weights * DTYPE_BYTES[dtype] if model.runs_vision and model.vision is not None else 0


def weight_bytes(model: ModelConfig, dtype: str) -> int:
    """Bytes of all weights, each counted once."""
    mixers = sum(spec.num_weights for spec in model.layer_specs(CacheDtypes()).values())
    tables = (1 if model.tie_word_embeddings else 2) * model.vocab_size * model.hidden_size
    plain = (tables + router_weights(model)) * DTYPE_BYTES[dtype]
    joint = 2 * model.hidden_size**2 if model.runs_mtp else 0
    linear = (mixers + joint + _mlp_weights(model)) * linear_weight_bytes(model, dtype)
    return tower_bytes(model, dtype) + plain + round(linear)


def _mlp_weights(model: ModelConfig) -> int:
    """Weights of the dense MLPs, of all experts and of the shared ones."""
    return mlp_weights(model, 0 if model.moe is None else model.moe.num_experts)


def mlp_weights(model: ModelConfig, num_experts: int) -> int:
    """Weights of the dense MLPs, of ``num_experts`` routed experts in each layer that has some, and of shared ones."""
    dense = model.num_dense_mlps * model.mlp_matrices * model.hidden_size * model.intermediate_size
    return dense + model.num_sparse_mlps * (num_experts * model.expert_weights + model.shared_moe_weights)
