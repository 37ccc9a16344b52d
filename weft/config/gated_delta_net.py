"""Gated DeltaNet (arXiv 2412.06464) as a kind of layer: geometry, keys in ``config.json``, cache."""

from dataclasses import dataclass, replace
from enum import StrEnum

from weft.config.json_object import JsonObject
from weft.config.layer_spec import CacheDtypes, CacheTensor, LayerSpec
from weft.config.sharding import divide
from weft.errors import ConfigError

L2_EPS = 1e-6
"""The epsilon under the root of the norm of queries and keys."""


class InProjLayout(StrEnum):
    """The form in which a checkpoint stores the input projection.

    ``GROUPED`` (Qwen3-Next): two tensors, ``qkvz`` and ``ba``, with rows grouped by key head: q and k of the head, then
    v and z (or b and a) of its value heads. ``SEPARATE`` (Qwen3.5): four tensors, ``qkv``, ``z``, ``b``, ``a``.
    ``SINGLE`` (OLMo-Hybrid): ``q``, ``k``, ``v``, ``z``, ``b``, ``a``.
    """

    GROUPED = "grouped"
    SEPARATE = "separate"
    SINGLE = "single"


@dataclass(frozen=True, slots=True)
class GatedDeltaNetConfig:
    """Geometry of Gated DeltaNet in the whole model. HV value heads share HK key heads in groups.

    Attributes:
        negative_eigenvalues: the write strength is twice the sigmoid, so a state can change its sign along a key (arXiv
            2411.12537).
        sigmoid_gate: the output gate is a sigmoid, as in Qwen4-Exp, instead of a SiLU.
        norm_eps: epsilon of the output norm; None: the model's.
        in_proj: how checkpoints store the input projection.
    """

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel: int
    negative_eigenvalues: bool = False
    sigmoid_gate: bool = False
    norm_eps: float | None = None
    in_proj: InProjLayout = InProjLayout.GROUPED

    @property
    def gate_activation(self) -> str:
        """Name of the output gate's activation, as ``gated_rms_norm`` takes it."""
        return "sigmoid" if self.sigmoid_gate else "silu"

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

    def layer_spec(self, hidden_size: int, dtypes: CacheDtypes) -> LayerSpec:
        """The states ``conv [conv_dim, kernel - 1]``, the last inputs of the convolution, and ``recurrent [HV, K,
        V]``."""
        projections = hidden_size * (self.conv_dim + 2 * self.value_dim + 2 * self.num_v_heads)
        recurrent = (self.num_v_heads, self.head_k_dim, self.head_v_dim)
        return LayerSpec(
            states=(
                CacheTensor("conv", (self.conv_dim, self.conv_kernel - 1), dtypes.model, sharded_dim=0),
                CacheTensor("recurrent", recurrent, dtypes.state, sharded_dim=0),
            ),
            verifies=True,
            num_weights=projections + self.conv_dim * self.conv_kernel,
            flops_per_token=6.0 * self.num_v_heads * self.head_k_dim * self.head_v_dim,  # decay, read, write
        )

    def check_shares(self, tp_size: int) -> None:
        """Key heads are split over ranks, each with its value heads."""
        divide(self.num_k_heads, tp_size, "linear_num_key_heads")


def read_gated_delta_net(text: JsonObject, *, in_proj: InProjLayout) -> GatedDeltaNetConfig:
    """Read the ``linear_*`` keys.

    Raises:
        ConfigError: a number is missing or wrong, or the head counts do not divide.
    """
    config = GatedDeltaNetConfig(
        num_k_heads=text.integer("linear_num_key_heads"),
        num_v_heads=text.integer("linear_num_value_heads"),
        head_k_dim=text.integer("linear_key_head_dim"),
        head_v_dim=text.integer("linear_value_head_dim"),
        conv_kernel=text.integer("linear_conv_kernel_dim", low=2),
        in_proj=in_proj,
    )
    if config.num_v_heads % config.num_k_heads:
        raise ConfigError(
            f"{text.where}: linear_num_value_heads={config.num_v_heads} is not divisible by "
            f"linear_num_key_heads={config.num_k_heads}"
        )
    return config


def read_olmo_hybrid_gated_delta_net(text: JsonObject) -> GatedDeltaNetConfig:
    """Read the keys of OLMo-Hybrid. Missing numbers follow from the attention heads and the hidden size."""
    heads, hidden_size = text.integer("num_attention_heads"), text.integer("hidden_size")
    k_heads, v_heads = (text.integer(f"linear_num_{kind}_heads", heads) for kind in ("key", "value"))
    k_dim = text.integer("linear_key_head_dim", int(0.75 * hidden_size / k_heads))
    numbers = {
        "linear_num_key_heads": k_heads,
        "linear_num_value_heads": v_heads,
        "linear_key_head_dim": k_dim,
        "linear_value_head_dim": text.integer("linear_value_head_dim", 2 * k_dim),
    }
    config = read_gated_delta_net(JsonObject({**text.values, **numbers}, text.where), in_proj=InProjLayout.SINGLE)
    return replace(config, negative_eigenvalues=text.boolean("linear_allow_neg_eigval", True), norm_eps=1e-5)
