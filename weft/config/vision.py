"""Vision towers: their geometry, and the keys of Qwen3-VL, Qwen3.5 and Qwen4-Exp in ``config.json``.

Job: read ``VisionConfig`` from ``vision_config`` and the special tokens next to it. Owns: the keys, with the defaults
of the reference implementation. Does not know: tensors, images, the keys of other towers (``glm_vision.py``,
``inkling_vision.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any, Literal

from weft.config.json_object import JsonObject
from weft.errors import UnsupportedModelError

_DEFAULTS: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "hidden_act": "gelu_pytorch_tanh",
}
_SIZES = (
    "depth", "hidden_size", "intermediate_size", "num_heads", "in_channels", "patch_size", "temporal_patch_size",
    "spatial_merge_size", "out_hidden_size",
)  # fmt: skip
_SYNONYMS = {"num_hidden_layers": "depth", "num_attention_heads": "num_heads"}
ACTIVATIONS = ("gelu_pytorch_tanh", "gelu", "silu")
_DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class VisionTokens:
    """Token ids around images.

    Attributes:
        image, video: the placeholders of an image and of a video in a prompt. ``video`` is None if no videos are read.
        start, end: the tokens before and after each frame of a video.
    """

    image: int
    video: int | None = None
    start: int | None = None
    end: int | None = None


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

    def num_weights(self, vision: "VisionConfig") -> int:
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

    def num_weights(self, vision: "VisionConfig") -> int:
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

    def num_weights(self, vision: "VisionConfig") -> int:
        """Number of weights in the tower's matrices."""
        return sum(fold.in_features * fold.out_channels for fold in self.folds)


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Geometry of a vision tower.

    Attributes:
        patch_size, temporal_patch_size, in_channels: side in pixels, frames, and channels of a patch.
        spatial_merge_size: side of the square of patches that is merged into one embedding.
        out_hidden_size: size of an embedding, which is the decoder's hidden size.
        num_position_embeddings: number of entries in the learned square grid of positions, which is interpolated. 0:
            the tower has no learned positions.
        deepstack_indexes: blocks whose features are added in the decoder's first layers, one layer each.
        tokens: special tokens of the vocabulary.
        mrope_section: number of rotary frequencies for the temporal, vertical and horizontal position. They are
            interleaved: of every three frequencies the second is vertical and the third horizontal, up to the section's
            length. All others are temporal. None: the decoder has no rotary positions.
        processor: the family whose processor prepares pictures (``multimodal/rules.py``).
        class_token: each image begins with a token that is no patch. Its patches attend to this token.
        glm, inkling2, inkling: numbers of the towers of these families; None: the tower is another one. Without any the
            tower is that of Qwen3-VL.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    out_hidden_size: int
    num_position_embeddings: int
    activation: str
    rope_theta: float
    tokens: VisionTokens
    mrope_section: tuple[int, int, int] | None
    deepstack_indexes: tuple[int, ...] = ()
    class_token: bool = False
    processor: Literal["qwen", "glm", "inkling2", "inkling"] = "qwen"
    glm: GlmTowerConfig | None = None
    inkling2: Inkling2TowerConfig | None = None
    inkling: InklingTowerConfig | None = None

    @property
    def patch_dim(self) -> int:
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merge_unit(self) -> int:
        """Number of patches that are merged into one embedding."""
        return self.spatial_merge_size**2

    @property
    def num_class_rows(self) -> int:
        """Rows of class tokens before the patches of each image: a whole square, of which the last is attended to."""
        return self.merge_unit if self.class_token else 0

    @property
    def num_features(self) -> int:
        """Embeddings per token: the embedding itself, and features for the decoder's first layers."""
        return 1 + len(self.deepstack_indexes)

    @property
    def num_weights(self) -> int:
        """Number of weights in the tower's matrices."""
        own = self.glm or self.inkling2 or self.inkling
        if own is not None:
            return own.num_weights(self)
        size, merged, out = self.hidden_size, self.hidden_size * self.merge_unit, self.out_hidden_size
        blocks = self.depth * (4 * size**2 + 2 * size * self.intermediate_size)
        return blocks + self.num_features * merged * (merged + out) + self.num_table_weights

    @property
    def num_table_weights(self) -> int:
        """Number of weights that embed patches and their positions."""
        return (self.patch_dim + self.num_position_embeddings) * self.hidden_size

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Number of placeholder tokens of an item of ``grid`` patches."""
        t, h, w = grid
        return t * h * w // self.merge_unit


def read_vision(
    top: JsonObject, text: JsonObject, *, tokens: VisionTokens, mrope_section: tuple[int, int, int], deepstack: bool
) -> VisionConfig | None:
    """Read the checkpoint's tower; None if there is no ``vision_config``.

    Args:
        tokens, mrope_section: defaults of the architecture.
        deepstack: the architecture takes features from inside the tower.

    Raises:
        ConfigError, UnsupportedModelError: see ``config/checkpoint.py``.
    """
    given = top.object("vision_config")
    if given is None:
        return None
    vision = with_defaults(given, _DEFAULTS)
    _check_supported(vision)
    rope = vision.object("rope_parameters") or JsonObject({}, vision.where)
    return VisionConfig(
        **read_sizes(vision),
        num_position_embeddings=vision.integer("num_position_embeddings"),
        activation=vision.text("hidden_act"),
        rope_theta=rope.number("rope_theta", _DEFAULT_THETA),
        tokens=read_tokens(top, tokens, "vision_start_token_id", "vision_end_token_id"),
        mrope_section=_mrope_section(text, mrope_section),
        deepstack_indexes=_deepstack_indexes(vision) if deepstack else (),
    )


def with_defaults(given: JsonObject, defaults: dict[str, Any], synonyms: Mapping[str, str] | None = None) -> JsonObject:
    """The tower's keys under one name each, with defaults. Sizes that are given per dimension become numbers.

    ``synonyms``: the family's names of keys -> names here.
    """
    names = _SYNONYMS | dict(synonyms or {})
    values = {names.get(key, key): value for key, value in given.values.items() if value is not None}
    for key in ("patch_size", "temporal_patch_size"):
        values[key] = _one_size(given, key, values.get(key, defaults[key]))
    return JsonObject(defaults | values, given.where)


def read_sizes(vision: JsonObject) -> dict[str, Any]:
    """Read the fields of ``VisionConfig`` that are sizes of every tower."""
    return {name: vision.integer(name) for name in _SIZES}


def read_tokens(top: JsonObject, defaults: VisionTokens, start: str, end: str) -> VisionTokens:
    """Read the special tokens. ``start`` and ``end`` are the keys of the tokens around placeholders."""
    names = ("image_token_id", "video_token_id", start, end)
    values = (defaults.image, defaults.video, defaults.start, defaults.end)
    return VisionTokens(*(top.integer(name, value, low=0) for name, value in zip(names, values, strict=True)))


def _one_size(given: JsonObject, key: str, value: Any) -> Any:
    """Read a size that may be given per dimension. All dimensions must be equal."""
    if isinstance(value, list) and len(set(value)) == 1:
        return value[0]
    if isinstance(value, list):
        raise UnsupportedModelError(f"{given.where}: {key}={value!r} is not supported; give one number")
    return value


def _check_supported(vision: JsonObject) -> None:
    if vision.text("hidden_act") not in ACTIVATIONS:
        raise vision.unsupported("hidden_act", f"; supported are {', '.join(ACTIVATIONS)}")
    check_rotation(vision)
    positions = vision.integer("num_position_embeddings")
    if isqrt(positions) ** 2 != positions:
        raise vision.wrong("num_position_embeddings", "a square number")


def check_rotation(vision: JsonObject) -> None:
    """Refuse heads that do not turn by rows and columns."""
    rope = vision.object("rope_parameters")
    if rope is not None and rope.text("rope_type", "axial") not in ("axial", "default"):
        raise rope.unsupported("rope_type", "; a tower is rotated by rows and columns ('axial')")
    size, heads = vision.integer("hidden_size"), vision.integer("num_heads")
    if size % heads or size // heads % 4:
        raise vision.wrong("hidden_size", f"{heads} heads (num_heads) of a multiple of 4 dimensions")


def _deepstack_indexes(vision: JsonObject) -> tuple[int, ...]:
    """The blocks with features, in the order of the decoder's layers; ``[8, 16, 24]`` if not given."""
    indexes = vision.integers("deepstack_visual_indexes") if vision.given("deepstack_visual_indexes") else (8, 16, 24)
    if list(indexes) != sorted(set(indexes)) or (indexes and indexes[-1] >= vision.integer("depth")):
        raise vision.wrong("deepstack_visual_indexes", "ascending numbers of blocks below depth")
    return indexes


def _mrope_section(text: JsonObject, default: tuple[int, int, int]) -> tuple[int, int, int]:
    settings = text.object("rope_scaling") or text.object("rope_parameters") or JsonObject({}, text.where)
    if not settings.boolean("mrope_interleaved", True):
        raise UnsupportedModelError(
            f"{settings.where}: mrope_interleaved=false is not supported for this architecture, whose rotary sections "
            "are always interleaved; leave it out"
        )
    section = settings.integers("mrope_section") or default
    if len(section) != 3:
        raise settings.wrong("mrope_section", "three numbers")
    return section
