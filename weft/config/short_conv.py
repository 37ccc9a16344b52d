"""Short convolution (LFM2) as a kind of layer: geometry, keys in ``config.json``, cache."""

from dataclasses import dataclass

from weft.config.json_object import JsonObject
from weft.config.layer_spec import CacheDtypes, CacheTensor, LayerSpec
from weft.config.sharding import divide


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """Geometry of a double-gated short convolution in the whole model.

    Attributes:
        num_channels: channels of the convolution, which equal the hidden size.
        kernel: number of inputs of one output.
        bias: whether both projections and the convolution have a bias.
    """

    num_channels: int
    kernel: int
    bias: bool

    def layer_spec(self, hidden_size: int, dtypes: CacheDtypes) -> LayerSpec:
        """The state ``conv [num_channels, kernel - 1]``, the last inputs of the convolution."""
        state = CacheTensor("conv", (self.num_channels, self.kernel - 1), dtypes.model, sharded_dim=0)
        return LayerSpec(
            states=(state,),
            verifies=True,
            num_weights=4 * hidden_size * self.num_channels + self.num_channels * self.kernel,
            flops_per_token=2.0 * self.num_channels,  # the two gates
        )

    def check_shares(self, tp_size: int) -> None:
        divide(self.num_channels, tp_size, "hidden_size")


def read_short_conv(text: JsonObject) -> ShortConvConfig:
    return ShortConvConfig(
        text.integer("hidden_size"), text.integer("conv_L_cache", low=2), text.boolean("conv_bias", False)
    )
