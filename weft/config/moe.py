"""Mixture of experts: geometry, routing, and keys in ``config.json``."""

from dataclasses import dataclass

from weft.config.json_object import JsonObject
from weft.errors import ConfigError, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class SigmoidRouting:
    """Routing in which each expert scores with a sigmoid, without a softmax over all (DeepSeek-V3, arXiv 2412.19437).

    Attributes:
        correction_bias: a learned bias affects the choice of experts, but not their weights.
        num_groups, top_groups: number of equal groups of experts, and of groups that take part. A group's score is the
            sum of its two best experts.
        scale: factor of the weights (``routed_scaling_factor``).
        epsilon: a number added to the sum by which weights are divided.
    """

    correction_bias: bool
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    epsilon: float = 1e-20


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """The activation ``gate * sigmoid(alpha * gate) * (up + up_offset)``. ``gate`` is clamped to at most ``limit``,
    ``up`` to between ``-limit`` and ``limit``. In gpt-oss the offset is 1."""

    alpha: float
    limit: float
    up_offset: float = 1.0


@dataclass(frozen=True, slots=True)
class SoftcappedSwiGLU:
    """The activation ``cap(gate) * sigmoid(gate) * cap(up)``, where ``cap(y) = c * tanh(y / c)`` (Inkling 2)."""

    gate_cap: float
    up_cap: float


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Geometry of a mixture of experts.

    Attributes:
        norm_topk_prob: the weights of the chosen experts are divided by their sum.
        shared_expert_intermediate_size: width of an expert that sees every token; None without such an expert.
        sparse_layers: layers that have experts. The others have a dense MLP.
        shared_expert_gate: a sigmoid gate per token weighs the shared expert.
        sigmoid: sigmoid routing; None: scores are a softmax over all experts.
        biases: whether the router and every projection of the experts have a bias.
        clamped, softcapped: the experts' activation if it differs from the model's.
        latent_size: width of the vectors that routed experts read and write, if it is not the model's (Nemotron-H).
        interleaved: checkpoints store the experts' matrices transposed, with gate and up columns in turn.
        router_size: width of an MLP that routes (ZAYA1, ``layers/mlp_router.py``); None: the router is one matrix.
        num_always: so many of the experts, the last ones, are chosen for every token (Inkling).
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    norm_topk_prob: bool
    shared_expert_intermediate_size: int | None
    sparse_layers: frozenset[int]
    shared_expert_gate: bool = True
    sigmoid: SigmoidRouting | None = None
    biases: bool = False
    clamped: ClampedSwiGLU | None = None
    interleaved: bool = False
    latent_size: int | None = None
    router_size: int | None = None
    num_always: int = 0
    softcapped: SoftcappedSwiGLU | None = None

    @property
    def num_classes(self) -> int:
        """Number of outputs of the router. An MLP has one more, which stands for no expert."""
        return self.num_experts + (self.router_size is not None)

    @property
    def has_correction_bias(self) -> bool:
        """Whether a learned bias affects the choice of experts, but not their weights."""
        return self.router_size is not None or (self.sigmoid is not None and self.sigmoid.correction_bias)

    def router_weights(self, hidden_size: int) -> int:
        """Number of weights of one router."""
        if (size := self.router_size) is None:
            return hidden_size * self.num_experts
        return size * (hidden_size + 2 * size + self.num_classes)


def read_moe(
    text: JsonObject, num_layers: int, *, shared_expert: bool = False, always_renormalise: bool = False
) -> MoeConfig | None:
    """Read a mixture of experts with Qwen's keys. Returns None if ``num_experts`` is 0: every layer is dense.

    Args:
        shared_expert: the architecture has a gated shared expert.
        always_renormalise: the chosen experts' weights are renormalised and every layer has experts, whatever the
            config says.

    Raises:
        ConfigError, UnsupportedModelError: see ``config/checkpoint.py``.
    """
    if not (always_renormalise or text.integer("num_experts", low=0)):
        return None
    num_experts, top_k = read_experts(text)
    renormalise = text.boolean("norm_topk_prob", True)
    if always_renormalise and not renormalise:
        raise UnsupportedModelError(
            f"{text.where}: norm_topk_prob=false is not supported for this architecture, which always renormalises; "
            "leave it out"
        )
    shared = text.integer("shared_expert_intermediate_size") if shared_expert else None
    sparse = frozenset(range(num_layers)) if always_renormalise else _sparse_layers(text, num_layers)
    return MoeConfig(num_experts, top_k, text.integer("moe_intermediate_size"), renormalise, shared, sparse)


def read_renormalised_moe(text: JsonObject, num_layers: int) -> MoeConfig | None:
    """Read the experts of Qwen3-VL-MoE. Some layers may be dense; the chosen experts' weights are always
    renormalised."""
    moe = read_moe(text, num_layers)
    return moe if moe is None or moe.norm_topk_prob else read_moe(text, num_layers, always_renormalise=True)


def read_lfm2_moe(text: JsonObject, num_layers: int) -> MoeConfig:
    """Read the experts of LFM2-MoE. The first ``num_dense_layers`` layers are dense."""
    num_experts, top_k = read_experts(text)
    return MoeConfig(
        num_experts,
        top_k,
        text.integer("moe_intermediate_size"),
        text.boolean("norm_topk_prob", True),
        shared_expert_intermediate_size=None,
        sparse_layers=frozenset(range(text.integer("num_dense_layers", 2, low=0), num_layers)),
        sigmoid=SigmoidRouting(
            correction_bias=text.boolean("use_expert_bias", True),
            scale=text.number("routed_scaling_factor", 1.0),
            epsilon=1e-6,
        ),
    )


def read_gpt_oss_moe(text: JsonObject, num_layers: int) -> MoeConfig:
    """Read the experts of gpt-oss. Every layer has experts; weights are a softmax over the scores of the chosen
    experts."""
    num_experts, top_k = read_experts(text)
    return MoeConfig(
        num_experts,
        top_k,
        text.integer("intermediate_size"),
        norm_topk_prob=True,
        shared_expert_intermediate_size=None,
        sparse_layers=frozenset(range(num_layers)),
        biases=True,
        clamped=ClampedSwiGLU(text.number("swiglu_alpha", 1.702), text.number("swiglu_limit", 7.0)),
        interleaved=True,
    )


def read_kimi_moe(text: JsonObject, num_layers: int) -> MoeConfig:
    """Read the experts of Kimi-Linear: grouped sigmoid routing. Shared experts have no gate and are read as one wider
    expert."""
    _refuse_other_routing(text)
    num_experts, top_k = read_experts(text)
    groups, top_groups = text.integer("n_group", 1), text.integer("topk_group", 1)
    if num_experts % groups or top_groups > groups or top_k > num_experts // groups * top_groups:
        raise ConfigError(
            f"{text.where}: num_experts={num_experts} cannot be routed in num_expert_group={groups} groups, of which "
            f"topk_group={top_groups} take part, with num_experts_per_token={top_k}"
        )
    shared, width = text.integer("n_shared_experts", 1, low=0), text.integer("moe_intermediate_size")
    return MoeConfig(
        num_experts,
        top_k,
        width,
        text.boolean("norm_topk_prob", True),
        shared_expert_intermediate_size=shared * width or None,
        sparse_layers=_kimi_sparse_layers(text, num_layers),
        shared_expert_gate=False,
        sigmoid=SigmoidRouting(True, groups, top_groups, text.number("routed_scaling_factor")),
    )


def read_inkling_moe(text: JsonObject, num_layers: int) -> MoeConfig | None:
    """Read the experts of Inkling. Shared experts are experts that the router scores, and that every token has."""
    if not text.boolean("shared_expert_sink", True):
        raise text.unsupported("shared_expert_sink", " for this architecture; supported is true")
    sparse = _kimi_sparse_layers(text, num_layers)
    if not sparse:
        return None
    (num_experts, top_k), shared = read_experts(text), text.integer("n_shared_experts")
    width = "intermediate_size" if text.given("dense_intermediate_size") else "moe_intermediate_size"
    return MoeConfig(
        num_experts + shared,
        top_k + shared,
        text.integer(width),
        norm_topk_prob=True,
        shared_expert_intermediate_size=None,
        sparse_layers=sparse,
        sigmoid=SigmoidRouting(True, scale=text.number("route_scale")),
        num_always=shared,
    )


def _refuse_other_routing(text: JsonObject) -> None:
    for key, value in (("moe_router_activation_func", "sigmoid"), ("moe_layer_freq", 1)):
        if text.given(key) and text.raw(key) != value:
            raise text.unsupported(key, f" for this architecture; supported is {value!r}")


def _kimi_sparse_layers(text: JsonObject, num_layers: int) -> frozenset[int]:
    """The sparse layers: ``mlp_layer_types`` (transformers), or all from ``first_k_dense_replace`` on (published
    files)."""
    types = text.raw("mlp_layer_types")
    if types is None:
        return frozenset(range(text.integer("first_k_dense_replace", 1, low=0), num_layers))
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= {"dense", "sparse"}:
        raise text.wrong("mlp_layer_types", f"'dense' or 'sparse' for each of {num_layers} layers")
    return frozenset(i for i, kind in enumerate(types) if kind == "sparse")


def read_experts(text: JsonObject) -> tuple[int, int]:
    """Read the number of experts, and the number that a token uses."""
    num_experts, top_k = text.integer("num_experts"), text.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise ConfigError(f"{text.where}: num_experts_per_tok={top_k} is greater than num_experts={num_experts}")
    return num_experts, top_k


def _sparse_layers(text: JsonObject, num_layers: int) -> frozenset[int]:
    dense, step = set(text.integers("mlp_only_layers")), text.integer("decoder_sparse_step", 1)
    if any(layer >= num_layers for layer in dense):
        raise text.wrong("mlp_only_layers", f"layer indices below num_hidden_layers={num_layers}")
    return frozenset(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)
