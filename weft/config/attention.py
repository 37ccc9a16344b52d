"""Softmax attention as a kind of layer: geometry, keys in ``config.json``, cache."""

from dataclasses import dataclass

from weft.config.json_object import JsonObject
from weft.config.layer_spec import CacheDtypes, CacheTensor, LayerSpec
from weft.config.rope import RopeConfig, read_rope
from weft.config.sharding import divide, head_range
from weft.errors import ConfigError, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Geometry of grouped-query attention in the whole model.

    Attributes:
        rope: the rotary embedding; None if queries and keys are not rotated.
        qkv_bias, output_bias: whether the three input projections, and the output projection, have a bias.
        qk_norm: RMSNorm on each query and key head.
        qk_norm_spans_heads: one norm spans all query heads, and one all key heads (OLMo 2).
        output_gate: the output is gated by a sigmoid of a second half of ``q_proj`` (Qwen3-Next, Qwen3.5).
        scale: the factor of the scores; None: ``head_dim ** -0.5``.
        sinks: every query head has a learned score that takes part in the softmax and has no value (gpt-oss).
        head_gate: the output of each head is gated by a sigmoid of the hidden states (LFM3).
        in_multiplier, out_multiplier: factors of the layer's input and output (Falcon-H1).
        input_size: width of the layer's input; None: the hidden size.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    output_gate: bool = False
    qk_norm_spans_heads: bool = False
    scale: float | None = None
    in_multiplier: float = 1.0
    out_multiplier: float = 1.0
    sinks: bool = False
    head_gate: bool = False
    input_size: int | None = None

    def layer_spec(self, hidden_size: int, dtypes: CacheDtypes) -> LayerSpec:
        """The tensors ``k`` and ``v``, one entry per token. Heads are split over ranks, or replicated if there are
        fewer heads."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        q_rows = 2 * q_size if self.output_gate else q_size
        entry = (self.num_kv_heads, self.head_dim)
        return LayerSpec(
            paged=tuple(CacheTensor(name, entry, dtypes.kv, sharded_dim=0) for name in ("k", "v")),
            num_weights=(self.input_size or hidden_size) * (q_rows + 2 * kv_size)
            + hidden_size * (q_size + self.num_heads * self.head_gate),
            flops_per_pair=4.0 * q_size,
        )

    def check_shares(self, tp_size: int) -> None:
        """Query heads are split; key and value heads are split, or replicated where there are fewer than ranks."""
        divide(self.num_heads, tp_size, "num_attention_heads")
        head_range(self.num_kv_heads, 0, tp_size, "num_key_value_heads")


def read_attention(
    text: JsonObject,
    *,
    qkv_bias: bool | None = None,
    qk_norm: bool = False,
    qk_norm_spans_heads: bool = False,
    output_gate: bool = False,
    partial_rotary_factor: float | None = None,
    rotary: bool = True,
    sinks: bool = False,
) -> AttentionConfig:
    """Read the keys of an attention layer.

    Args:
        qkv_bias: whether the architecture always has a bias on its input projections, and never on the output; None:
            ``attention_bias`` decides for all four.
        qk_norm, qk_norm_spans_heads, output_gate, sinks: fixed properties of the architecture.
        partial_rotary_factor: the share of each head that is rotated if the config has none; None: always whole heads.
        rotary: False if the architecture never rotates, whatever the config says.

    Raises:
        ConfigError, UnsupportedModelError: see ``config/checkpoint.py``.
    """
    num_heads = text.integer("num_attention_heads")
    head_dim = read_head_dim(text, num_heads)
    max_positions, bias = text.integer("max_position_embeddings", 32768), text.boolean("attention_bias", False)
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(text, num_heads),
        head_dim=head_dim,
        rope=read_rope(text, head_dim, max_positions, partial_default=partial_rotary_factor) if rotary else None,
        qkv_bias=bias if qkv_bias is None else qkv_bias,
        output_bias=bias and qkv_bias is None,
        qk_norm=qk_norm,
        qk_norm_spans_heads=qk_norm_spans_heads,
        output_gate=_output_gate(text, output_gate),
        sinks=sinks,
    )


def read_head_dim(text: JsonObject, num_heads: int) -> int:
    """Read ``head_dim``; the default is the hidden size over the number of heads."""
    if text.given("head_dim"):
        return text.integer("head_dim")
    hidden_size = text.integer("hidden_size")
    if hidden_size % num_heads:
        raise ConfigError(
            f"{text.where}: hidden_size={hidden_size} is not divisible by num_attention_heads={num_heads} "
            "and no head_dim is given"
        )
    return hidden_size // num_heads


def _num_kv_heads(text: JsonObject, num_heads: int) -> int:
    num_kv_heads = text.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{text.where}: num_attention_heads={num_heads} is not divisible by num_key_value_heads={num_kv_heads}"
        )
    return num_kv_heads


def _output_gate(text: JsonObject, expected: bool) -> bool:
    gate = text.boolean("attn_output_gate", expected)
    if gate != expected:
        raise UnsupportedModelError(
            f"{text.where}: attn_output_gate={str(gate).lower()} is not supported for this architecture; "
            f"leave it out or set it to {str(expected).lower()}"
        )
    return gate
