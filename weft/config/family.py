"""``Family``: the properties that follow from an architecture's name alone (``families.py`` has one entry each)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from weft.config.json_object import JsonObject
from weft.config.layer_spec import MixerConfig
from weft.config.model import ACTIVATIONS, Multipliers, ResidualWeights
from weft.config.moe import MoeConfig
from weft.config.residual_streams import StreamsConfig
from weft.config.vision import VisionConfig

MixerReader = Callable[[JsonObject], MixerConfig]
"""Reads the geometry of one kind of token mixer from the (text) config."""

Mixers = Mapping[str, Mapping[str, MixerReader]]
"""Layer type -> module in the decoder layer -> reader of its geometry."""

MoeReader = Callable[[JsonObject, int], MoeConfig | None]
"""Reads the mixture of experts from the (text) config and the number of layers; None if the checkpoint has no
experts."""


def uniform_layer_types(text: JsonObject, num_layers: int) -> tuple[str, ...]:
    """Every layer is full attention."""
    return ("full_attention",) * num_layers


@dataclass(frozen=True, slots=True)
class Family:
    """The properties that follow from an architecture's name alone.

    Attributes:
        mixers: the supported layer types and their token mixers.
        layer_types: computes the type of every layer, given their number, if ``config.json`` has no ``layer_types``.
        layer_type_names: the family's names of layer types in older files -> the names in ``mixers``.
        final_layer_types: computes each layer's type from those in ``config.json`` or ``layer_types``; None: no change.
        without_mlp: types of layers that have token mixers alone.
        multipliers: reads the constants that scale parts of the model.
        activation: the activation of the architecture's MLPs, one of ``ACTIVATIONS``. A checkpoint with another one is
            refused.
        moe: reads the mixture of experts from the (text) config and the number of layers; None if no layer has experts.
        mlp_bias: whether dense MLPs have biases: never, always, or as the key ``mlp_bias`` says.
        zero_centered_norm: see ``ModelConfig``.
        norm_placement: see ``ModelConfig``.
        streams: reads ``ModelConfig.streams``.
        residual_weights: reads ``ModelConfig.residual_weights``.
        keys: the family's name of a key -> the shared name.
        intermediate_size: reads the width of the dense MLP if it differs from the key ``intermediate_size``.
        mtp: checkpoints have a multi-token-prediction head, unless ``mtp_num_hidden_layers`` is 0.
        mtp_chain: reads ``ModelConfig.mtp_chain`` and ``mtp_refused`` from the whole config and the text config.
        multimodal: the language model's numbers are under ``text_config``.
        vision: reads the vision tower from the whole config and the text config; None if the architecture has no tower.
    """

    mixers: Mixers
    layer_types: Callable[[JsonObject, int], tuple[str, ...]] = uniform_layer_types
    layer_type_names: Mapping[str, str] = field(default_factory=dict)
    final_layer_types: Callable[[JsonObject, tuple[str, ...]], tuple[str, ...]] | None = None
    without_mlp: tuple[str, ...] = ()
    multipliers: Callable[[JsonObject], Multipliers] | None = None
    activation: str = "silu"
    moe: MoeReader | None = None
    mlp_bias: Literal["never", "always", "key"] = "never"
    zero_centered_norm: bool = False
    norm_placement: Mapping[str, str] = field(default_factory=dict)
    streams: Callable[[JsonObject], StreamsConfig] | None = None
    residual_weights: Callable[[JsonObject], dict[str, ResidualWeights]] | None = None
    mtp: bool = False
    mtp_chain: Callable[[JsonObject, JsonObject], tuple[tuple[str, ...], str]] | None = None
    multimodal: bool = False
    vision: Callable[[JsonObject, JsonObject], VisionConfig | None] | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    intermediate_size: Callable[[JsonObject], int] | None = None

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation={self.activation!r} is not one of {', '.join(ACTIVATIONS)}")
