"""Inkling: windows and full attention with a relative position bias, short convolutions, experts.

Attention reads keys and values through a short convolution each, and adds a learned number to the score of each near
key. Mixer and MLP end with a convolution of their own before the residual stream. Readers of the family's keys.
"""

from dataclasses import dataclass, replace

from weft.config.attention import AttentionConfig, read_attention
from weft.config.family import Family
from weft.config.inkling_vision import read_inkling_vision
from weft.config.json_object import JsonObject
from weft.config.layer_spec import CacheDtypes, CacheTensor, LayerSpec
from weft.config.model import Multipliers
from weft.config.moe import read_inkling_moe
from weft.config.sliding_window import SlidingWindowConfig


@dataclass(frozen=True, slots=True)
class RelativeAttentionConfig:
    """Geometry of attention with a relative position bias in the whole model.

    Attributes:
        attention: heads and norms.
        window: see ``SlidingWindowConfig``; None: a token sees all tokens before it.
        extent: distances with a bias, from 0 on. Keys further back have none.
        rank: width of a head's vector that a matrix ``[rank, extent]`` turns into biases.
        kernel: inputs of one output of the convolutions of keys and values.
        log_floor, log_alpha: scores at position p are multiplied by ``1 + log_alpha * log((p + 1) / log_floor)`` where
            that is more than 1; None: never.
    """

    attention: AttentionConfig
    window: int | None
    extent: int
    rank: int
    kernel: int
    log_floor: int | None = None
    log_alpha: float = 0.0

    def layer_spec(self, hidden_size: int, dtypes: CacheDtypes) -> LayerSpec:
        """Keys and values as in attention or in a window, and the state ``conv``: the last inputs of both
        convolutions, ``[2, num_kv_heads, head_dim, kernel - 1]``."""
        heads, biases = self.attention, self.rank * self.extent
        spec = heads.layer_spec(hidden_size, dtypes)
        if self.window is not None:
            spec = SlidingWindowConfig(heads, self.window).layer_spec(hidden_size, dtypes)
        conv = (2, heads.num_kv_heads, heads.head_dim, self.kernel - 1)
        return replace(
            spec,
            states=(*spec.states, CacheTensor("conv", conv, dtypes.model, sharded_dim=1)),
            num_weights=spec.num_weights
            + hidden_size * heads.num_heads * self.rank
            + biases
            + 2 * heads.num_kv_heads * heads.head_dim * self.kernel,
            flops_per_token=spec.flops_per_token + 2.0 * (heads.num_heads - 1) * biases,
        )

    def check_shares(self, tp_size: int) -> None:
        """Heads are split as in attention."""
        self.attention.check_shares(tp_size)


@dataclass(frozen=True, slots=True)
class OutputConvConfig:
    """Geometry of a short convolution of what a mixer or an MLP adds to the residual stream.

    Attributes:
        num_channels: channels of the convolution, which equal the hidden size.
        kernel: number of inputs of one output.
        scale: factor of the sum with the input.
    """

    num_channels: int
    kernel: int
    scale: float = 1.0

    def layer_spec(self, hidden_size: int, dtypes: CacheDtypes) -> LayerSpec:
        """The state ``conv [num_channels, kernel - 1]``, whole on every rank."""
        state = CacheTensor("conv", (self.num_channels, self.kernel - 1), dtypes.model)
        return LayerSpec(states=(state,), num_weights=self.num_channels * self.kernel)

    def check_shares(self, tp_size: int) -> None:
        """Every rank computes all channels, of the sum over ranks."""


def inkling_layer_types(text: JsonObject, num_layers: int) -> tuple[str, ...]:
    """Layer types of Inkling: ``local_layer_ids`` have windows; all but every sixth layer if the key is missing."""
    given = text.given("local_layer_ids")
    local = set(text.integers("local_layer_ids")) if given else {i for i in range(num_layers) if (i + 1) % 6}
    return tuple("hybrid_sliding" if i in local else "hybrid" for i in range(num_layers))


def read_relative_attention(text: JsonObject) -> RelativeAttentionConfig:
    """Read full attention of Inkling."""
    floor = text.integer("log_scaling_n_floor") if text.given("log_scaling_n_floor") else None
    return RelativeAttentionConfig(
        _read_heads(text),
        window=None,
        extent=text.integer("rel_extent"),
        rank=text.integer("d_rel"),
        kernel=text.integer("conv_kernel_size", low=2),
        log_floor=floor,
        log_alpha=0.0 if floor is None else text.number("log_scaling_alpha", open_low=False),
    )


def read_relative_window(text: JsonObject) -> RelativeAttentionConfig:
    """Read attention over a window, which has heads of its own and a bias for every token of the window."""
    own = ("num_attention_heads", "num_key_value_heads", "head_dim")
    heads = JsonObject(text.values | {key: text.integer(f"swa_{key}") for key in own}, f"{text.where} (swa_*)")
    window = text.integer("sliding_window")
    has_effect = window < text.integer("max_position_embeddings")
    return RelativeAttentionConfig(
        _read_heads(heads),
        window=window if has_effect else None,
        extent=window,
        rank=text.integer("d_rel"),
        kernel=text.integer("conv_kernel_size", low=2),
    )


def _read_heads(text: JsonObject) -> AttentionConfig:
    """Read the heads, whose queries and keys are normalised. Scores are divided by the width of a head."""
    attention = read_attention(text, qkv_bias=False, qk_norm=True, rotary=False)
    return replace(attention, scale=1.0 / attention.head_dim)


def read_output_conv(text: JsonObject) -> OutputConvConfig:
    return OutputConvConfig(text.integer("hidden_size"), text.integer("conv_kernel_size", low=2))


def inkling_multipliers(text: JsonObject) -> Multipliers:
    """Multipliers of Inkling: logits are divided by a constant. MLPs and weights of experts have learned factors."""
    return Multipliers(logits=1.0 / text.number("logits_mup_width_multiplier"), learned_mlp=True)


_HEAD_KEYS = {
    "num_nextn_predict_layers": "num_mtp_layers",
    "local_layer_ids": "mtp_local_layer_ids",
    "chain_hidden_post_norm": "chain_hidden_post_norm",
}
"""Keys of ``mtp_config`` in published files -> keys of the text config in files of transformers."""


def read_inkling_head(top: JsonObject, text: JsonObject) -> tuple[tuple[str, ...], str]:
    """Read the types of the layers of the multi-token-prediction head, and why Weft does not run the head (empty: it
    does). Each layer has a dense MLP."""
    own = top.object("mtp_config") or JsonObject({}, top.where)
    given = {_HEAD_KEYS.get(key, key): value for key, value in own.values.items()}
    keys = JsonObject(
        given | {key: text.raw(key) for key in (*_HEAD_KEYS.values(), *_ORDER) if text.given(key)}, own.where
    )
    num_layers, local = keys.integer("num_mtp_layers", 0, low=0), keys.integers("mtp_local_layer_ids")
    if any(index >= num_layers for index in local):
        raise keys.wrong("mtp_local_layer_ids", f"numbers below num_mtp_layers={num_layers}")
    refused = [
        f"mtp_config has the key {key!r}, which Weft does not know" for key in own.values if key not in _HEAD_KEYS
    ]
    refused += [f"{key} is not {value}" for key, value in _ORDER.items() if keys.boolean(key, value) != value]
    return tuple("hybrid_sliding" if i in local else "hybrid" for i in range(num_layers)), "; ".join(refused)


_ORDER = {"chain_hidden_post_norm": False, "mtp_hidden_states_first": True}
"""Values of the only computation that Weft has. A layer reads the output of the layer before without a norm. Hidden
states precede the embedding."""


def inkling_intermediate_size(text: JsonObject) -> int:
    """Width of dense MLPs. Files with ``dense_intermediate_size`` give the experts' width as ``intermediate_size``."""
    return text.integer("dense_intermediate_size", text.integer("intermediate_size"))


_CONVOLUTIONS = {"attn_sconv": read_output_conv, "mlp_sconv": read_output_conv}

INKLING = Family(
    {
        "hybrid": {"self_attn": read_relative_attention, **_CONVOLUTIONS},
        "hybrid_sliding": {"self_attn": read_relative_window, **_CONVOLUTIONS},
    },
    layer_types=inkling_layer_types,
    norm_placement=dict.fromkeys(("hybrid", "hybrid_sliding"), "convolved"),
    multipliers=inkling_multipliers,
    moe=read_inkling_moe,
    vision=read_inkling_vision,
    mtp_chain=read_inkling_head,
    intermediate_size=inkling_intermediate_size,
    keys={
        "sliding_window_size": "sliding_window",
        "n_routed_experts": "num_experts",
        "sconv_kernel_size": "conv_kernel_size",
        "model_max_length": "max_position_embeddings",
        "embedding_multiplier": "logits_mup_width_multiplier",
        "dense_mlp_idx": "first_k_dense_replace",
    },
)
