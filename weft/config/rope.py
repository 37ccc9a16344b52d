"""Rotary-embedding settings of a checkpoint, from old and new keys to one ``RopeConfig``.

The module knows the supported scalings and the numbers that each needs. The layer computes the frequencies.
"""

from dataclasses import dataclass, field

from weft.config.json_object import JsonObject
from weft.errors import UnsupportedModelError

SUPPORTED_SCALINGS = ("default", "linear", "llama3", "proportional", "yarn")
NO_ROPE_SCALING = "none"
"""Scaling of an attention without rotary embedding. Its first two dimensions are rotated by zero."""

_DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, arXiv 2104.09864).

    ``rotary_dim`` leading dimensions of each head are rotated (``head_dim * partial_rotary_factor``).
    ``scaling`` is one of ``SUPPORTED_SCALINGS`` or ``"none"``; ``parameters`` are the checkpoint's numbers for it,
    under its names. ``"proportional"`` turns the first ``angles`` pairs of a head and keeps the others as they are.
    """

    theta: float
    rotary_dim: int
    scaling: str = "default"
    parameters: dict[str, object] = field(default_factory=dict)


def read_rope(
    config: JsonObject, head_dim: int, max_position_embeddings: int, partial_default: float | None
) -> RopeConfig:
    """Read the model's ``RopeConfig``. Its ``parameters`` hold every number that the scaling needs, with defaults.

    Args:
        config: the (text) config of the checkpoint.
        partial_default: the share of the head that is rotated if the config has none; None if the architecture always
            rotates whole heads.

    Raises:
        UnsupportedModelError: another scaling, per-layer-type settings, a partial or odd rotary dimension that the
            architecture does not have.
    """
    settings = config.object("rope_scaling") or config.object("rope_parameters") or JsonObject({}, config.where)
    scaling = _scaling(settings)
    if "rope_theta" in settings.values and settings.raw("rope_theta") is None:
        return RopeConfig(1.0, 2, NO_ROPE_SCALING)
    theta = settings.number("rope_theta", config.number("rope_theta", _DEFAULT_THETA))
    if scaling == "proportional":
        angles = int(settings.number("partial_rotary_factor", 1.0) * head_dim // 2)
        if not 0 < angles <= head_dim // 2:
            raise settings.wrong("partial_rotary_factor", f"a share of head_dim={head_dim} that is at least one pair")
        return RopeConfig(theta, head_dim, scaling, {"angles": angles, "factor": settings.number("factor", 1.0)})
    rotary_dim = _rotary_dim(config, settings, head_dim, partial_default)
    if scaling == "default":
        return RopeConfig(theta, rotary_dim)
    return RopeConfig(theta, rotary_dim, scaling, _parameters(scaling, config, settings, max_position_embeddings))


def _scaling(settings: JsonObject) -> str:
    nested = [key for key in ("full_attention", "sliding_attention", "linear_attention") if key in settings.values]
    if nested:
        raise UnsupportedModelError(
            f"{settings.where}: separate rotary settings per layer type ({', '.join(nested)}) are not supported; "
            "Weft applies one set of rotary parameters to all layers"
        )
    scaling = settings.text("rope_type", settings.text("type", "default"))
    if scaling == "mrope":  # text has the same position in all three sections, which is the plain embedding
        return "default"
    if scaling not in SUPPORTED_SCALINGS:
        raise UnsupportedModelError(
            f"{settings.where}: rope type {scaling!r} is not supported; supported are {', '.join(SUPPORTED_SCALINGS)}. "
            "Remove the scaling to serve the original context length, or use a checkpoint with a supported one"
        )
    return scaling


def _rotary_dim(config: JsonObject, settings: JsonObject, head_dim: int, partial_default: float | None) -> int:
    share = settings.number("partial_rotary_factor", config.number("partial_rotary_factor", partial_default or 1.0))
    if partial_default is None and share != 1.0:
        raise UnsupportedModelError(
            f"{config.where}: partial_rotary_factor={share} is not supported for this architecture, which rotates "
            "whole heads; leave it out or set it to 1.0"
        )
    rotary_dim = int(head_dim * share)
    if share > 1.0 or rotary_dim < 2 or rotary_dim % 2:
        raise UnsupportedModelError(
            f"{config.where}: head_dim={head_dim} with partial_rotary_factor={share} gives a rotary dimension of "
            f"{rotary_dim}; it must be even, at least 2 and at most head_dim"
        )
    return rotary_dim


def _parameters(scaling: str, config: JsonObject, settings: JsonObject, max_positions: int) -> dict[str, object]:
    if scaling == "linear":
        return {"factor": settings.number("factor")}
    # A top-level value has precedence over the nested one, as in the reference implementation.
    original = config.integer(
        "original_max_position_embeddings", settings.integer("original_max_position_embeddings", max_positions)
    )
    if scaling == "llama3":
        return _llama3(settings, original)
    parameters: dict[str, object] = {
        "factor": settings.number("factor", max_positions / original),
        "original_max_position_embeddings": original,
        "beta_fast": settings.number("beta_fast", 32.0),
        "beta_slow": settings.number("beta_slow", 1.0),
        "truncate": settings.boolean("truncate", True),
    }
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        if settings.given(key):
            parameters[key] = settings.number(key, open_low=False)
    return parameters


def _llama3(settings: JsonObject, original: int) -> dict[str, object]:
    low, high = settings.number("low_freq_factor"), settings.number("high_freq_factor")
    if high <= low:
        raise UnsupportedModelError(
            f"{settings.where}: high_freq_factor={high:g} must be greater than low_freq_factor={low:g} "
            "for rope type 'llama3'"
        )
    return {
        "factor": settings.number("factor"),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
