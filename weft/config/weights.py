"""The size of a model's weights in bytes, from its geometry alone.

``weft config`` and the roofline use it before anything is loaded. Norms, convolutions, biases and the scales of FP8 are
left out; they are less than a hundredth. If a checkpoint has several forms, a module counts in the form of its first
projection, by the names that most checkpoints have.
"""

from collections.abc import Iterator

from weft.config.layer_spec import DTYPE_BYTES, CacheDtypes
from weft.config.model import ModelConfig, layer_name

_MIXER = ("q_proj", "qkv_proj", "qkv_proj.q_proj", "q_a_proj", "in_proj", "in_proj_qkvz", "in_proj_qkv")
_EXPERTS, _SHARED = ("experts.0.gate_proj",), ("shared_expert.gate_proj", "shared_experts.gate_proj")
_DENSE = ("gate_proj", "up_proj")
"""The first projections of modules, as checkpoints name them."""


def linear_weight_bytes(model: ModelConfig, dtype: str) -> float:
    """Bytes of one weight of a linear layer or an expert, on average; ``dtype`` is the computing dtype."""
    return sum(_linear_bytes(model, dtype)) / max(1, _linear_weights(model))


def _module_bytes(model: ModelConfig, dtype: str, module: str, projections: tuple[str, ...]) -> float:
    """Bytes of one weight of a module, whose text model may be a part of the checkpoint's."""
    if model.quantization is None:
        return DTYPE_BYTES[dtype]
    stored = module, module.replace("model.", "model.language_model.", 1)
    scheme = model.quantization.scheme(f"{name}.{part}" for name in stored for part in projections)
    return DTYPE_BYTES[dtype] if scheme is None else scheme.bytes_per_weight


def router_weights(model: ModelConfig) -> int:
    """Weights of all routers, which are never quantised."""
    return 0 if model.moe is None else model.num_sparse_mlps * model.moe.router_weights(model.hidden_size)


def rank_weight_bytes(model: ModelConfig, dtype: str, ranks: int) -> int:
    """Bytes of weights on one of ``ranks``: its share, and the whole vision tower."""
    tower = tower_bytes(model, dtype)
    return (weight_bytes(model, dtype) - tower) // ranks + tower


def tower_bytes(model: ModelConfig, dtype: str) -> int:
    return model.vision.num_weights * DTYPE_BYTES[dtype] if model.runs_vision and model.vision is not None else 0


def weight_bytes(model: ModelConfig, dtype: str) -> int:
    """Bytes of all weights, each counted once."""
    tables = (1 if model.tie_word_embeddings else 2) * model.vocab_size * model.hidden_size
    tables += sum(spec.num_table_weights for spec in model.layer_specs(CacheDtypes()).values())
    plain = (tables + router_weights(model) + _stream_weights(model)) * DTYPE_BYTES[dtype]
    return tower_bytes(model, dtype) + plain + round(sum(_linear_bytes(model, dtype)))


def _stream_weights(model: ModelConfig) -> int:
    """Weights of the connections of all blocks with the residual streams, which are never quantised."""
    if model.streams is None:
        return 0
    num_connections = 2 * model.num_hidden_layers + 1 + (3 if model.returns_streams else 0)
    return num_connections * model.streams.num_weights(model.hidden_size)


def _linear_weights(model: ModelConfig) -> float:
    """Weights of all linear layers and experts, without tables, routers and connections of streams."""
    mixers = sum(spec.num_own_weights for spec in model.layer_specs(CacheDtypes()).values())
    joint = 2 * model.hidden_size**2 * len(model.head_layers)
    return mixers + joint + mlp_weights(model, 0 if model.moe is None else model.moe.num_experts)


def _linear_bytes(model: ModelConfig, dtype: str) -> Iterator[float]:
    """Bytes of the linear layers and experts, module by module."""
    for name, spec in model.layer_specs(CacheDtypes()).items():
        plain = spec.num_plain_weights
        yield plain * DTYPE_BYTES[dtype]
        yield (spec.num_own_weights - plain) * _module_bytes(model, dtype, name, _MIXER)
    for index in sorted({*range(model.num_hidden_layers)} - model.layers_without_mlp):
        yield _mlp_bytes(model, dtype, f"{layer_name(index)}.mlp", model.is_sparse(index))
    for name in model.head_layers:
        yield _mlp_bytes(model, dtype, f"{name}.mlp", model.moe is not None and not model.mtp_chain)
        joint = ("fc_embedding", "fc_hidden") if model.returns_streams else ("fc", "input_proj")
        owner = name.rpartition(".")[0] if model.mtp_chain else "mtp"
        yield 2 * model.hidden_size**2 * _module_bytes(model, dtype, owner, joint)


def _mlp_bytes(model: ModelConfig, dtype: str, name: str, sparse: bool) -> float:
    """Bytes of a dense MLP, or of all experts of a layer and the shared one."""
    if not sparse or model.moe is None:
        weights = model.mlp_matrices * model.hidden_size * model.intermediate_size
        return weights * _module_bytes(model, dtype, name, _DENSE)
    experts = model.moe.num_experts * model.expert_weights * _module_bytes(model, dtype, name, _EXPERTS)
    return experts + model.shared_moe_weights * _module_bytes(model, dtype, name, _SHARED)


def mlp_weights(model: ModelConfig, num_experts: int) -> int:
    """Weights of the dense MLPs, of ``num_experts`` routed experts in each layer that has some, and of shared ones."""
    dense = model.num_dense_mlps * model.mlp_matrices * model.hidden_size * model.intermediate_size
    return dense + model.num_sparse_mlps * (num_experts * model.expert_weights + model.shared_moe_weights)
