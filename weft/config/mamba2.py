"""Mamba-2 (arXiv 2405.21060) as a kind of layer: geometry, keys in ``config.json``, cache."""

import math
from dataclasses import dataclass

from weft.config.json_object import JsonObject
from weft.config.layer_spec import CacheDtypes, CacheTensor, LayerSpec
from weft.config.sharding import divide
from weft.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """Geometry of Mamba-2 in the whole model. H heads of P channels share G groups of B and C with N numbers each.

    Attributes:
        conv_bias, in_bias, out_bias: whether the convolution and the two projections have a bias.
        dt_limit: minimum and maximum of the time step, after softplus.
        norm: whether there is an output norm by group. Without a norm the gate alone is applied.
        norm_eps: epsilon of that norm; None: that of the model's other norms.
        in_multiplier, out_multiplier: factors of the layer's input and output (Falcon-H1).
        part_multipliers: factors of the parts z, x, B, C, dt of the input projection; None: no factors.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_kernel: int
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    dt_limit: tuple[float, float] = (0.0, math.inf)
    norm: bool = True
    norm_eps: float | None = None
    norm_before_gate: bool = False
    in_multiplier: float = 1.0
    out_multiplier: float = 1.0
    part_multipliers: tuple[float, ...] | None = None

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def groups_size(self) -> int:
        """Size of B (or C) of all groups together."""
        return self.num_groups * self.state_size

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: x, B and C, in that order."""
        return self.inner_size + 2 * self.groups_size

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """Widths of the input projection's parts: z, x, B, C, dt."""
        return (self.inner_size, self.inner_size, self.groups_size, self.groups_size, self.num_heads)

    def layer_spec(self, hidden_size: int, dtypes: CacheDtypes) -> LayerSpec:
        """The states ``conv [conv_dim, kernel - 1]``, the last inputs of the convolution, and ``recurrent [H, N,
        P]``."""
        recurrent = (self.num_heads, self.state_size, self.head_dim)
        projections = hidden_size * (sum(self.part_sizes) + self.inner_size)
        return LayerSpec(
            states=(
                CacheTensor("conv", (self.conv_dim, self.conv_kernel - 1), dtypes.model, sharded_dim=0),
                CacheTensor("recurrent", recurrent, dtypes.state, sharded_dim=0),
            ),
            num_weights=projections + self.conv_dim * self.conv_kernel,
            flops_per_token=5.0 * self.num_heads * self.state_size * self.head_dim,  # decay, write (2), read (2)
        )

    def check_shares(self, tp_size: int) -> None:
        """Heads are split. Each rank needs whole groups, since the output norm spans a group."""
        divide(self.num_heads, tp_size, "mamba heads")
        divide(self.num_groups, tp_size, "mamba groups")


def read_mamba2(text: JsonObject) -> Mamba2Config:
    """Read the ``mamba_*`` keys (Bamba, Granite 4, Falcon-H1, Nemotron-H; others rename theirs to these).

    Raises:
        ConfigError: a number is missing or wrong, or the numbers of heads, groups and channels do not agree.
        UnsupportedModelError: an activation other than SiLU.
    """
    num_heads, num_groups = text.integer("mamba_n_heads"), text.integer("mamba_n_groups", 1)
    if num_heads % num_groups:
        raise ConfigError(f"{text.where}: mamba_n_heads={num_heads} is not divisible by mamba_n_groups={num_groups}")
    if text.text("mamba_hidden_act", "silu") not in ("silu", "swish"):
        raise text.unsupported("mamba_hidden_act", "; supported is 'silu'")
    bias = text.boolean("mamba_proj_bias", False)
    return Mamba2Config(
        num_heads=num_heads,
        head_dim=_head_dim(text, num_heads),
        state_size=text.integer("mamba_d_state"),
        num_groups=num_groups,
        conv_kernel=text.integer("mamba_d_conv", low=2),
        conv_bias=text.boolean("mamba_conv_bias", True),
        in_bias=bias,
        out_bias=text.boolean("mamba_out_bias", bias),
        dt_limit=_dt_limit(text),
        norm=text.boolean("mamba_rms_norm", True),
        norm_before_gate=text.boolean("mamba_norm_before_gate", False),
        in_multiplier=text.number("ssm_in_multiplier", 1.0, open_low=False),
        out_multiplier=text.number("ssm_out_multiplier", 1.0, open_low=False),
        part_multipliers=_part_multipliers(text),
    )


def _head_dim(text: JsonObject, num_heads: int) -> int:
    """Channels of a head, from two or three of: channels, heads, and channels of a head."""
    head_dim = None if text.raw("mamba_d_head") in (None, "auto") else text.integer("mamba_d_head")
    if text.given("mamba_d_ssm"):
        name, inner_size = "mamba_d_ssm", text.integer("mamba_d_ssm")
    elif text.given("mamba_expand"):
        name = "mamba_expand * hidden_size"
        inner_size = int(text.number("mamba_expand") * text.integer("hidden_size"))
    else:
        name, inner_size = "mamba_n_heads * mamba_d_head", num_heads * text.integer("mamba_d_head")
    if inner_size % num_heads or inner_size // num_heads != (head_dim or inner_size // num_heads):
        raise ConfigError(
            f"{text.where}: {name}={inner_size} is not mamba_n_heads={num_heads} times "
            f"mamba_d_head={text.raw('mamba_d_head')!r}"
        )
    return inner_size // num_heads


def _dt_limit(text: JsonObject) -> tuple[float, float]:
    low, high = text.numbers("time_step_limit", 2) or (0.0, math.inf)
    if not 0.0 <= low < high:
        raise text.wrong("time_step_limit", "two numbers of at least 0, the smaller one first")
    return low, high


def _part_multipliers(text: JsonObject) -> tuple[float, ...] | None:
    multipliers = text.numbers("ssm_multipliers", 5)
    return multipliers if multipliers and any(m != 1.0 for m in multipliers) else None
