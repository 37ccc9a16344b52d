"""Kimi-Linear (arXiv 2510.26692): Kimi Delta Attention and latent attention as kinds of layers.

Each has a geometry, keys in ``config.json``, and a cache. Latent attention (MLA, arXiv 2405.04434) stores one vector
per token for all heads.
"""

from dataclasses import dataclass, replace

from weft.config.json_object import JsonObject
from weft.config.layer_spec import CacheDtypes, CacheTensor, LayerSpec
from weft.config.rope import RopeConfig, read_rope
from weft.config.sharding import divide
from weft.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class KimiDeltaConfig:
    """Geometry of Kimi Delta Attention in the whole model. Heads of keys and values have the same size.

    Attributes:
        gate_floor: lower bound of the log decay (Ling 3.0), or 0.0 for none. See ``kda_gates``.
        low_rank: both gates are products of two matrices through ``head_dim`` columns, and checkpoints store ``A_log``
            with four dimensions (Kimi-Linear); False: each gate has one matrix, and ``A_log`` one dimension.
        flat_decay: ``A_log`` has one dimension also with gates of low rank (GLM-5.3).
    """

    num_heads: int
    head_dim: int
    conv_kernel: int
    gate_floor: float = 0.0
    low_rank: bool = True
    flat_decay: bool = False

    @property
    def width(self) -> int:
        """Width of the queries, of the keys and of the values."""
        return self.num_heads * self.head_dim

    def layer_spec(self, hidden_size: int, dtypes: CacheDtypes) -> LayerSpec:
        """The states ``conv [3 * width, kernel - 1]``, the last inputs of the convolution, and ``recurrent [H, K,
        K]``."""
        recurrent = (self.num_heads, self.head_dim, self.head_dim)
        gates = 2 * (self.head_dim * (hidden_size + self.width) if self.low_rank else hidden_size * self.width)
        return LayerSpec(
            states=(
                CacheTensor("conv", (3 * self.width, self.conv_kernel - 1), dtypes.model, sharded_dim=0),
                CacheTensor("recurrent", recurrent, dtypes.state, sharded_dim=0),
            ),
            verifies=True,
            num_weights=hidden_size * (4 * self.width + self.num_heads) + gates + 3 * self.width * self.conv_kernel,
            flops_per_token=6.0 * self.width * self.head_dim,  # decay, read, write
        )

    def check_shares(self, tp_size: int) -> None:
        divide(self.num_heads, tp_size, "linear_attn_config.num_heads")


@dataclass(frozen=True, slots=True)
class LatentAttentionConfig:
    """Geometry of latent attention in the whole model.

    Attributes:
        key_dim, value_dim: sizes of a head's keys and values that are computed from the latent.
        shared_dim: size of the part of a key that all heads share.
        query_rank: size of the latent from which queries are computed; None: from the hidden states.
        rope: rotary embedding of the shared part, whose neighbouring columns turn together; None: nothing is rotated.
        output_gate: the output of each head is gated by a sigmoid of the hidden states (Ling 3.0).
        norm_eps: epsilon of the latents' norms, which Kimi-Linear and Ling 3.0 take whatever the model's is.
    """

    num_heads: int
    key_dim: int
    shared_dim: int
    value_dim: int
    rank: int
    query_rank: int | None
    rope: RopeConfig | None = None
    output_gate: bool = False
    norm_eps: float = 1e-6

    @property
    def padded_entry(self) -> int:
        """Columns of an entry in the cache: a multiple of 8, so that kernels read whole 16 bytes."""
        return -(-(self.rank + self.shared_dim) // 8) * 8

    def layer_spec(self, hidden_size: int, dtypes: CacheDtypes) -> LayerSpec:
        """The tensor ``latent [padded_entry]``, one entry per token, whole on every rank."""
        entry, heads = self.rank + self.shared_dim, self.num_heads
        query = heads * (self.key_dim + self.shared_dim)
        queries = hidden_size * query
        if self.query_rank is not None:
            queries = self.query_rank * (hidden_size + query)
        queries += hidden_size * heads * self.output_gate
        absorbed = heads * self.rank * (self.key_dim + self.value_dim)
        return LayerSpec(
            paged=(CacheTensor("latent", (self.padded_entry,), dtypes.model),),
            num_weights=queries + hidden_size * (entry + heads * self.value_dim) + absorbed,
            flops_per_pair=2.0 * heads * (entry + self.rank),
        )

    def check_shares(self, tp_size: int) -> None:
        divide(self.num_heads, tp_size, "num_attention_heads")


def read_kimi_delta(text: JsonObject) -> KimiDeltaConfig:
    """Read ``linear_attn_config`` (published files) or ``linear_*`` (transformers)."""
    nested = text.object("linear_attn_config") or JsonObject({}, text.where)
    return KimiDeltaConfig(
        nested.integer("num_heads", text.integer("linear_num_heads", 32)),
        nested.integer("head_dim", text.integer("linear_head_dim", 128)),
        nested.integer("short_conv_kernel_size", text.integer("linear_conv_kernel_dim", 4, low=2), low=2),
    )


def read_latent_attention(text: JsonObject) -> LatentAttentionConfig:
    """Read the keys of the layers of full attention.

    Raises:
        UnsupportedModelError: the layers have biases, or rotate.
    """
    for key, value, default in (("attention_bias", False, False), ("mla_use_nope", True, True)):
        if text.boolean(key, default) is not value:
            raise UnsupportedModelError(
                f"{text.where}: {key}={str(not value).lower()} is not supported for this architecture; leave it out"
            )
    return LatentAttentionConfig(
        num_heads=text.integer("num_attention_heads"),
        key_dim=text.integer("qk_nope_head_dim"),
        shared_dim=text.integer("qk_rope_head_dim"),
        value_dim=text.integer("v_head_dim"),
        rank=text.integer("kv_lora_rank"),
        query_rank=text.integer("q_lora_rank") if text.given("q_lora_rank") else None,
    )


def read_bounded_kimi_delta(text: JsonObject) -> KimiDeltaConfig:
    """Read Kimi Delta Attention of Ling 3.0: decays are bounded unless ``kda_safe_gate`` is false."""
    floor = text.raw("kda_lower_bound") if text.boolean("kda_safe_gate", True) else 0.0
    if isinstance(floor, bool) or not isinstance(floor, (int, float)) or not -100.0 <= floor <= 0.0:
        raise text.wrong("kda_lower_bound", "a number from -100 to 0")
    heads = text.integer("linear_num_heads", text.integer("num_attention_heads"))
    dim = text.integer("linear_head_dim", text.integer("head_dim"))
    kernel = text.integer("linear_conv_kernel_dim", text.integer("short_conv_kernel_size", low=2), low=2)
    return KimiDeltaConfig(heads, dim, kernel, gate_floor=float(floor), low_rank=False)


def read_gated_latent_attention(text: JsonObject) -> LatentAttentionConfig:
    """Read latent attention of Ling 3.0: keys rotate, and heads have gates."""
    if text.given("q_lora_rank"):
        raise text.unsupported("q_lora_rank", " for this architecture; leave it out")
    if text.given("num_key_value_heads") and text.raw("num_key_value_heads") != text.raw("num_attention_heads"):
        raise text.unsupported("num_key_value_heads", ", since all heads share one latent; leave it out")
    latent = read_latent_attention(text)
    rope = read_rope(text, latent.shared_dim, text.integer("max_position_embeddings"), partial_default=None)
    if rope.scaling != "default":
        raise text.unsupported("rope_parameters", " for this architecture; supported is the default rotary embedding")
    return replace(latent, rope=rope, output_gate=True)


def ling_layer_types(text: JsonObject, num_layers: int) -> tuple[str, ...]:
    """Layer types of Ling 3.0: every ``layer_group_size``-th layer is full attention."""
    group = text.integer("layer_group_size")
    return tuple("linear_attention" if (i + 1) % group else "full_attention" for i in range(num_layers))


def kimi_layer_types(text: JsonObject, num_layers: int) -> tuple[str, ...]:
    """Layer types of Kimi-Linear. ``full_attn_layers`` and ``kda_layers`` count from 1. Without them every fourth layer
    is full attention."""
    nested = text.object("linear_attn_config")
    if nested is None or not (nested.given("full_attn_layers") and nested.given("kda_layers")):
        return tuple("full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(num_layers))
    full, delta = set(nested.integers("full_attn_layers")), set(nested.integers("kda_layers"))
    if full & delta or full | delta != set(range(1, num_layers + 1)):
        raise nested.wrong("full_attn_layers", f"with kda_layers, each of the layers 1 to {num_layers} once")
    return tuple("full_attention" if i + 1 in full else "linear_attention" for i in range(num_layers))
