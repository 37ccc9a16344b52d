"""What an architecture's name alone decides: one ``Family`` each, in ``families.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from weft.config.json_object import JsonObject
from weft.config.layer_spec import MixerConfig
from weft.config.model import ACTIVATIONS, Multipliers, ResidualWeights
from weft.config.moe import MoeConfig
from weft.config.vision import VisionConfig

MixerReader = Callable[[JsonObject], MixerConfig]
"""From the (text) config to the geometry of one kind of token mixer."""

Mixers = Mapping[str, Mapping[str, MixerReader]]
"""Layer type -> module in the decoder layer -> reader of its geometry."""

MoeReader = Callable[[JsonObject, int], MoeConfig | None]
"""From the (text) config and the number of layers; None: this checkpoint has no experts."""


def uniform_layer_types(text: JsonObject, num_layers: int) -> tuple[str, ...]:
    """Every layer is full attention."""
    return ("full_attention",) * num_layers


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture's name alone decides.

    Attributes:
        mixers: other layer types are refused.
        layer_types: the type of every layer, of so many, where ``config.json`` has no ``layer_types``.
        without_mlp: types of layers that have token mixers alone.
        multipliers: reads the constants that parts of the model are scaled by.
        activation: the activation of the architecture's MLPs, one of ``ACTIVATIONS``. A checkpoint with another one is
            refused.
        moe: reads the mixture of experts, from the (text) config and the number of layers; None: layers have none.
        mlp_bias: ``mlp_bias`` is read (other architectures have none).
        zero_centered_norm: see ``ModelConfig``.
        norm_placement: see ``ModelConfig``.
        residual_weights: reads those of ``ModelConfig``.
        keys: names of the family's own for keys that others share -> the shared name.
        layer_names: names of layer types in published files -> those of ``mixers``.
        intermediate_size: reads the width of the dense MLP where it is not simply ``intermediate_size``.
        mtp: checkpoints come with a multi-token-prediction head, unless ``mtp_num_hidden_layers`` is 0.
        multimodal: the language model's numbers stand under ``text_config``.
        vision: reads the vision tower, from the whole config and the text config; None: the architecture has none.
    """

    mixers: Mixers
    layer_types: Callable[[JsonObject, int], tuple[str, ...]] = uniform_layer_types
    without_mlp: tuple[str, ...] = ()
    multipliers: Callable[[JsonObject], Multipliers] | None = None
    activation: str = "silu"
    moe: MoeReader | None = None
    mlp_bias: bool = False
    zero_centered_norm: bool = False
    norm_placement: Mapping[str, str] = field(default_factory=dict)
    residual_weights: Callable[[JsonObject], dict[str, ResidualWeights]] | None = None
    mtp: bool = False
    multimodal: bool = False
    vision: Callable[[JsonObject, JsonObject], VisionConfig | None] | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    layer_names: Mapping[str, str] = field(default_factory=dict)
    intermediate_size: Callable[[JsonObject], int] | None = None

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation={self.activation!r} is not one of {', '.join(ACTIVATIONS)}")
