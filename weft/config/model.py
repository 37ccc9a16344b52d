"""The geometry of a model, in one vocabulary for every architecture that Weft supports.

Job: the frozen ``ModelConfig`` that layers, caches, loaders and planners read. Owns: field names and derived sizes.
Does not know: checkpoints (``config/checkpoint.py`` fills it from ``config.json``), devices, tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

LayerType = Literal["full_attention", "linear_attention"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, arXiv 2104.09864).

    ``rotary_dim`` leading dimensions of each head are rotated (``head_dim * partial_rotary_factor``).
    ``scaling`` is ``"default"``, ``"linear"``, ``"yarn"`` or ``"llama3"``; ``parameters`` are the checkpoint's numbers
    for it, under its names.
    """

    theta: float
    rotary_dim: int
    scaling: str = "default"
    parameters: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LinearAttentionConfig:
    """Geometry of the Gated DeltaNet layers (arXiv 2412.06464): HV value heads share HK key heads in groups."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel: int

    @property
    def key_dim(self) -> int:
        return self.num_k_heads * self.head_k_dim

    @property
    def value_dim(self) -> int:
        return self.num_v_heads * self.head_v_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the short convolution: queries, keys and values, concatenated in that order."""
        return 2 * self.key_dim + self.value_dim


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Mixture of experts. ``sparse_layers`` are the layers that have experts; the others have a dense MLP."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    norm_topk_prob: bool
    shared_expert_intermediate_size: int | None
    sparse_layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model's geometry. Sizes are those of the whole model, before tensor-parallel sharding.

    Attributes:
        architecture: the class name in the checkpoint, for example ``Qwen3NextForCausalLM``.
        layer_types: one entry per layer.
        attn_output_gate: attention output is gated by a sigmoid of a second half of ``q_proj`` (Qwen3-Next, Qwen3.5).
        qk_norm: RMSNorm on each query and key head.
        zero_centered_norm: RMSNorm scales by ``1 + weight`` (all norms but the gated one).
        dtype: the checkpoint's own dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``.
        state_dtype: dtype of the recurrent state if the checkpoint names one (``mamba_ssm_dtype``), else None.
        eos_token_ids: from ``config.json``; ``generation_config.json`` goes first where it names some.
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    layer_types: tuple[LayerType, ...]
    rope: RopeConfig
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attn_output_gate: bool = False
    zero_centered_norm: bool = False
    linear: LinearAttentionConfig | None = None
    moe: MoeConfig | None = None
    dtype: str = "float32"
    state_dtype: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def is_hybrid(self) -> bool:
        """True if any layer is recurrent."""
        return "linear_attention" in self.layer_types

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "full_attention")

    @property
    def linear_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "linear_attention")
