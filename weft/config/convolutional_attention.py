"""Compressed convolutional attention (CCA, arXiv 2510.04476) as a kind of layer: geometry, cache."""

from dataclasses import dataclass, replace

from weft.config.attention import AttentionConfig
from weft.config.layer_spec import CacheDtypes, CacheTensor, LayerSpec
from weft.config.sharding import divide
from weft.config.sliding_window import SlidingWindowConfig


@dataclass(frozen=True, slots=True)
class ConvolutionalAttentionConfig:
    """Geometry of attention whose queries and keys pass two convolutions, in the whole model.

    The first convolution is depthwise. The second one mixes the channels of a head. The second half of the value
    channels comes from the token before.

    Attributes:
        attention: heads and rotary embedding.
        channel_kernel, head_kernel: taps of the first convolution, and of the second one.
        window: number of tokens that a token sees; None: all.
    """

    attention: AttentionConfig
    channel_kernel: int
    head_kernel: int
    window: int | None = None

    @property
    def mixer(self) -> AttentionConfig | SlidingWindowConfig:
        """Attention after the convolutions."""
        return self.attention if self.window is None else SlidingWindowConfig(self.attention, self.window)

    @property
    def taps(self) -> int:
        """Tokens that both convolutions and the delay of values read for one token, itself included."""
        return max(2, self.channel_kernel + self.head_kernel - 1)

    @property
    def channels(self) -> int:
        """Channels of the state: every channel of queries and keys for each tap of the second convolution, and those
        of values."""
        heads = self.attention
        copies = self.head_kernel * (heads.num_heads + heads.num_kv_heads)
        return heads.head_dim * (copies + heads.num_kv_heads)

    def layer_spec(self, hidden_size: int, dtypes: CacheDtypes) -> LayerSpec:
        """The cache of the attention, and the state ``conv [channels, taps - 1]``, the last inputs."""
        spec, heads = self.mixer.layer_spec(hidden_size, dtypes), self.attention
        of_head = heads.head_dim * (self.head_kernel * heads.head_dim + self.channel_kernel)
        plain = (heads.num_heads + heads.num_kv_heads) * of_head
        conv = CacheTensor("conv", (self.channels, self.taps - 1), dtypes.model, sharded_dim=0)
        return replace(spec, states=(*spec.states, conv), num_weights=spec.num_weights + plain, num_plain_weights=plain)

    def check_shares(self, tp_size: int) -> None:
        """Ranks hold whole groups: a key head reads all of its query heads."""
        divide(self.attention.num_kv_heads, tp_size, "num_key_value_heads (whose query heads stay together)")
