"""RecurrentGemma (arXiv 2404.07839): RG-LRU as a kind of layer, and readers of the family's keys."""

import struct
from dataclasses import dataclass, replace
from functools import partial

from weft.config.attention import AttentionConfig, read_attention
from weft.config.family import Family
from weft.config.json_object import JsonObject
from weft.config.layer_spec import CacheDtypes, CacheTensor, LayerSpec
from weft.config.model import Multipliers
from weft.config.sharding import divide
from weft.config.sliding_window import read_sliding_window
from weft.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RgLruConfig:
    """Geometry of a Real-Gated Linear Recurrent Unit (arXiv 2402.19427) with its convolution, in the whole model.

    Attributes:
        num_channels: width of the recurrence. Every channel has a state of one number.
        num_blocks: blocks of channels. A block's gates depend on its own channels alone.
        conv_kernel: number of inputs of one output of the convolution.
    """

    num_channels: int
    num_blocks: int
    conv_kernel: int

    @property
    def block_width(self) -> int:
        return self.num_channels // self.num_blocks

    def layer_spec(self, hidden_size: int, dtypes: CacheDtypes) -> LayerSpec:
        """The states ``conv [C, kernel - 1]``, the last inputs of the convolution, and ``recurrent [C]``."""
        channels = self.num_channels
        return LayerSpec(
            states=(
                CacheTensor("conv", (channels, self.conv_kernel - 1), dtypes.model, sharded_dim=0),
                CacheTensor("recurrent", (channels,), dtypes.state, sharded_dim=0),
            ),
            num_weights=channels * (3 * hidden_size + 2 * self.block_width + self.conv_kernel),
            flops_per_token=4.0 * channels,  # decay, input's factor, sum, output gate
        )

    def check_shares(self, tp_size: int) -> None:
        divide(self.num_blocks, tp_size, "num_attention_heads (blocks of lru_width)")


def read_rg_lru(text: JsonObject) -> RgLruConfig:
    """Read ``lru_width``, ``num_attention_heads`` (also the number of blocks) and ``conv1d_width``."""
    channels, blocks = text.integer("lru_width", text.integer("hidden_size")), text.integer("num_attention_heads")
    if channels % blocks:
        raise ConfigError(
            f"{text.where}: lru_width={channels} is not divisible by num_attention_heads={blocks}, the number of its "
            "blocks"
        )
    return RgLruConfig(channels, blocks, text.integer("conv1d_width", low=2))


def recurrent_gemma_layer_types(text: JsonObject, num_layers: int) -> tuple[str, ...]:
    """Layer types of RecurrentGemma: ``block_types`` again and again."""
    kinds = {"recurrent": "linear_attention", "attention": "sliding_attention"}
    blocks = text.raw("block_types")
    if not isinstance(blocks, list) or not blocks or not set(blocks) <= set(kinds):
        raise text.wrong("block_types", f"a list of {' and '.join(map(repr, kinds))}")
    return tuple(kinds[blocks[i % len(blocks)]] for i in range(num_layers))


def _read_attention(text: JsonObject) -> AttentionConfig:
    """Read attention. The output projection always has a bias."""
    bias = text.boolean("attention_bias", False)
    return replace(read_attention(text, qkv_bias=bias, partial_rotary_factor=0.5), output_bias=True)


def _read_multipliers(text: JsonObject) -> Multipliers:
    """Read the cap of the logits. Embeddings are scaled by the square root of their width, in bfloat16."""
    return Multipliers(
        embedding=_in_bfloat16(text.integer("hidden_size") ** 0.5), logits_cap=text.number("logits_soft_cap")
    )


def _in_bfloat16(value: float) -> float:
    """``value`` rounded to the nearest number of bfloat16."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return float(struct.unpack("<f", struct.pack("<I", (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000))[0])


def _half_width(text: JsonObject) -> int:
    """Width of the MLP: half of ``intermediate_size``, which counts gate and up."""
    return text.integer("intermediate_size") // 2


RECURRENT_GEMMA = Family(
    {
        "linear_attention": {"recurrent": read_rg_lru},
        "sliding_attention": {"self_attn": partial(read_sliding_window, attention=_read_attention)},
    },
    layer_types=recurrent_gemma_layer_types,
    multipliers=_read_multipliers,
    activation="gelu_pytorch_tanh",
    mlp_bias="always",
    zero_centered_norm=True,
    keys={"hidden_activation": "hidden_act", "attention_window_size": "sliding_window"},
    intermediate_size=_half_width,
)
