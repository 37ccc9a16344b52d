"""Mamba (arXiv 2312.00752) as a kind of layer: geometry, keys in ``config.json``, cache."""

from dataclasses import dataclass

from weft.config.json_object import JsonObject
from weft.config.layer_spec import CacheDtypes, CacheTensor, LayerSpec
from weft.config.sharding import divide


@dataclass(frozen=True, slots=True)
class MambaConfig:
    """Geometry of Mamba. Every channel has a state of N numbers and a time step of its own; all channels share B and C.

    Attributes:
        dt_rank: size of the vector from which the time steps of all channels are projected.
        bias: whether the input and output projections have a bias.
        norm_weights: whether the RMSNorms over dt, B and C have weights (Jamba) or not (FalconMamba); None: no such
            norms (Mamba).
        norm_eps: epsilon of those norms.
    """

    num_channels: int
    state_size: int
    dt_rank: int
    conv_kernel: int
    conv_bias: bool
    bias: bool
    norm_weights: bool | None
    norm_eps: float

    def layer_spec(self, hidden_size: int, dtypes: CacheDtypes) -> LayerSpec:
        """The states ``conv [C, kernel - 1]``, the last inputs of the convolution, and ``recurrent [N, C]``."""
        inner = self.dt_rank + 2 * self.state_size
        projections = self.num_channels * (3 * hidden_size + inner + self.dt_rank)
        return LayerSpec(
            states=(
                CacheTensor("conv", (self.num_channels, self.conv_kernel - 1), dtypes.model, sharded_dim=0),
                CacheTensor("recurrent", (self.state_size, self.num_channels), dtypes.state, sharded_dim=1),
            ),
            num_weights=projections + self.num_channels * self.conv_kernel,
            flops_per_token=7.0 * self.num_channels * self.state_size,  # decay (2), write (3), read (2)
        )

    def check_shares(self, tp_size: int) -> None:
        """Channels are split. B, C and the time steps depend on all channels, so they need a sum over the ranks."""
        divide(self.num_channels, tp_size, "mamba channels (mamba_expand * hidden_size)")


@dataclass(frozen=True, slots=True)
class HeadedMambaConfig:
    """Geometry of Mamba in which each head has B, C and time steps from its own channels (Zamba).

    Attributes:
        mamba: the layer without heads. Its ``dt_rank`` is that of one head.
    """

    num_heads: int
    mamba: MambaConfig

    def layer_spec(self, hidden_size: int, dtypes: CacheDtypes) -> LayerSpec:
        """The states of Mamba. A head's projections are as many times smaller as there are heads."""
        return self.mamba.layer_spec(hidden_size, dtypes)

    def check_shares(self, tp_size: int) -> None:
        """Heads are split."""
        divide(self.num_heads, tp_size, "n_mamba_heads")


def read_headed_mamba(text: JsonObject) -> HeadedMambaConfig:
    """Read the ``mamba_*`` keys and ``n_mamba_heads``."""
    mamba, heads = read_mamba(text, norm_weights=None), text.integer("n_mamba_heads")
    if mamba.num_channels % heads:
        raise text.wrong("n_mamba_heads", f"a divisor of the {mamba.num_channels} channels")
    if text.text("hidden_mamba_act", "silu") not in ("silu", "swish"):
        raise text.unsupported("hidden_mamba_act", "; supported is 'silu'")
    return HeadedMambaConfig(heads, mamba)


def read_mamba(text: JsonObject, *, norm_weights: bool | None) -> MambaConfig:
    """Read the ``mamba_*`` keys (Jamba; Mamba and FalconMamba rename their own to these).

    Args:
        norm_weights: a fixed property of the architecture.
    """
    hidden_size = text.integer("hidden_size")
    automatic = text.raw("mamba_dt_rank") in (None, "auto")
    return MambaConfig(
        num_channels=text.integer("mamba_d_inner", int(text.number("mamba_expand", 2) * hidden_size)),
        state_size=text.integer("mamba_d_state", 16),
        dt_rank=-(-hidden_size // 16) if automatic else text.integer("mamba_dt_rank"),
        conv_kernel=text.integer("mamba_d_conv", 4, low=2),
        conv_bias=text.boolean("mamba_conv_bias", True),
        bias=text.boolean("mamba_proj_bias", False),
        norm_weights=norm_weights,
        norm_eps=text.number("rms_norm_eps", 1e-6) if norm_weights else text.number("mixer_rms_eps", 1e-6),
    )
