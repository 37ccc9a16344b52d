"""Inkling 2: Inkling's attention with clipped heads, gates and a sink for each token, and residuals over blocks.

Full attention has convolutions whose taps follow the token, and an input of its own for queries, keys and values.
Readers of the family's keys; those that it shares with Inkling are read in ``inkling.py``.
"""

from dataclasses import dataclass, replace

from weft.config.family import Family
from weft.config.inkling import (
    OutputConvConfig,
    RelativeAttentionConfig,
    inkling_layer_types,
    read_relative_attention,
    read_relative_window,
)
from weft.config.inkling_vision import read_inkling2_vision
from weft.config.json_object import JsonObject
from weft.config.layer_spec import CacheDtypes, CacheTensor, LayerSpec
from weft.config.model import Multipliers
from weft.config.moe import MoeConfig, SigmoidRouting, SoftcappedSwiGLU, read_experts
from weft.config.residual_streams import StreamsConfig


@dataclass(frozen=True, slots=True)
class ClippedAttentionConfig:
    """Geometry of attention with clipped heads in the whole model.

    Attributes:
        relative: heads, window, position bias and convolutions.
        head_clip, relative_clip: greatest L2 norms of a query or key head, and of a head's relative vector.
        dynamic: every token has taps of its own, and queries, keys and values have inputs of their own.
    """

    relative: RelativeAttentionConfig
    head_clip: float
    relative_clip: float
    dynamic: bool

    def layer_spec(self, hidden_size: int, dtypes: CacheDtypes) -> LayerSpec:
        """Keys, values and convolutions as in Inkling, a gate for each channel, and a sink for each head.

        Dynamic convolutions keep the state ``conv [kernel - 1, 2, num_kv_heads, head_dim, kernel - 1]``: the inputs
        once for each delay.
        """
        relative, heads = self.relative, self.relative.attention
        spec = relative.layer_spec(hidden_size, dtypes)
        weights = hidden_size * heads.num_heads * (heads.head_dim + 1)
        if not self.dynamic:
            return replace(spec, num_weights=spec.num_weights + weights)
        delays, taps = relative.kernel - 1, 2 * heads.num_kv_heads * relative.kernel
        shape = (delays, 2, heads.num_kv_heads, heads.head_dim, delays)
        return replace(
            spec,
            states=(CacheTensor("conv", shape, dtypes.model, sharded_dim=2),),
            num_weights=spec.num_weights + weights + hidden_size * taps,
        )

    def check_shares(self, tp_size: int) -> None:
        """Heads are split as in attention."""
        self.relative.check_shares(tp_size)


def _clipped(text: JsonObject, relative: RelativeAttentionConfig, *, dynamic: bool) -> ClippedAttentionConfig:
    """Add the clips. Heads have no norm, and scores have the usual scale."""
    heads, clips = replace(relative.attention, qk_norm=False, scale=None), ("qk_l2_clip", "rel_l2_clip")
    head_clip, relative_clip = (text.number(f"{clip}_threshold") for clip in clips)
    return ClippedAttentionConfig(replace(relative, attention=heads), head_clip, relative_clip, dynamic)


def read_clipped_attention(text: JsonObject) -> ClippedAttentionConfig:
    """Read full attention."""
    return _clipped(text, read_relative_attention(text), dynamic=True)


def read_clipped_window(text: JsonObject) -> ClippedAttentionConfig:
    """Read attention over a window."""
    return _clipped(text, read_relative_window(text), dynamic=False)


def _read_output_conv(text: JsonObject) -> OutputConvConfig:
    """Read the convolution of an output, whose sum with its input is divided by the root of the number of terms."""
    kernel = text.integer("conv_kernel_size", low=2)
    return OutputConvConfig(text.integer("hidden_size"), kernel, scale=(kernel + 1) ** -0.5)


def read_softcapped_moe(text: JsonObject, num_layers: int) -> MoeConfig:
    """Read the experts of every layer."""
    if text.text("scoring_func") != "sigmoid":
        raise text.unsupported("scoring_func", " for this architecture; supported is 'sigmoid'")
    num_experts, top_k = read_experts(text)
    return MoeConfig(
        num_experts,
        top_k,
        text.integer("moe_intermediate_size"),
        norm_topk_prob=True,
        shared_expert_intermediate_size=None,
        sparse_layers=frozenset(range(num_layers)),
        sigmoid=SigmoidRouting(True, scale=text.number("route_scale")),
        softcapped=SoftcappedSwiGLU(text.number("mlp_gate_softcap"), text.number("mlp_up_softcap")),
    )


_CONVOLUTIONS = {"attn_sconv": _read_output_conv, "mlp_sconv": _read_output_conv}

INKLING2 = Family(
    {
        "hybrid": {"self_attn": read_clipped_attention, **_CONVOLUTIONS},
        "hybrid_sliding": {"self_attn": read_clipped_window, **_CONVOLUTIONS},
    },
    layer_types=inkling_layer_types,
    norm_placement=dict.fromkeys(("hybrid", "hybrid_sliding"), "blocks"),
    streams=lambda text: StreamsConfig("blocks", count=text.integer("n_layers_per_attn_res_block")),
    multipliers=lambda text: Multipliers(logits_cap=text.number("final_logit_softcapping")),
    moe=read_softcapped_moe,
    vision=read_inkling2_vision,
    keys={
        "sliding_window_size": "sliding_window",
        "n_routed_experts": "num_experts",
        "sconv_kernel_size": "conv_kernel_size",
        "model_max_length": "max_position_embeddings",
        "intermediate_size": "moe_intermediate_size",
        "routed_scaling_factor": "route_scale",
    },
)
