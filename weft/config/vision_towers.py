"""Numbers that the vision tower of one family alone has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.config.vision import VisionConfig


@dataclass(frozen=True, slots=True)
class GlmTowerConfig:
    """The tower of GLM-5.3.

    Attributes:
        merger_size: width of the gated MLP after the merge.
        norm_eps: added to mean squares.
        swiglu_limit: see ``Multipliers.swiglu_limit``.
        bias: the projections of blocks have biases.
    """

    merger_size: int
    norm_eps: float
    swiglu_limit: float
    bias: bool

    def num_weights(self, vision: VisionConfig) -> int:
        """Number of weights in the tower's matrices."""
        size, out = vision.hidden_size, vision.out_hidden_size
        merger = out * (size * vision.merge_unit + out + 3 * self.merger_size)
        return vision.depth * (4 * size**2 + 3 * size * vision.intermediate_size) + merger + vision.num_table_weights


@dataclass(frozen=True, slots=True)
class Inkling2TowerConfig:
    """The tower of Inkling 2.

    Attributes:
        projector_size: width of the MLP after the merge.
        projector_bias: the MLP has biases.
        norm_eps: added to variances.
    """

    projector_size: int
    projector_bias: bool
    norm_eps: float

    def num_weights(self, vision: VisionConfig) -> int:
        """Number of weights in the tower's matrices."""
        size, unit = vision.hidden_size, vision.merge_unit
        projector = self.projector_size * (size * unit + vision.out_hidden_size)
        return vision.depth * (4 * size**2 + 2 * size * vision.intermediate_size) + projector + vision.num_table_weights


@dataclass(frozen=True, slots=True)
class InklingFold:
    """One layer of the tower of Inkling: neighbouring cells of a patch become one, and a matrix follows.

    Attributes:
        frames, side: cells that become one, along time, and along height and width.
        in_channels, out_channels: of a cell before and after.
    """

    frames: int
    side: int
    in_channels: int
    out_channels: int

    @property
    def in_features(self) -> int:
        """Channels of all cells that become one."""
        return self.in_channels * self.frames * self.side**2


@dataclass(frozen=True, slots=True)
class InklingTowerConfig:
    """The tower of Inkling, which looks at each patch alone.

    Attributes:
        folds: the layers. The last one leaves one cell of a patch, with the decoder's hidden size.
    """

    folds: tuple[InklingFold, ...]

    def num_weights(self, vision: VisionConfig) -> int:
        """Number of weights in the tower's matrices."""
        return sum(fold.in_features * fold.out_channels for fold in self.folds)
