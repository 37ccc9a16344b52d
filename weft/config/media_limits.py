"""The number of images and videos that a prompt may hold (``limit_mm_per_prompt``, as in vLLM)."""

from dataclasses import asdict, dataclass
from typing import Any

from weft.config.json_object import json_setting
from weft.errors import ConfigError

NAME = "limit_mm_per_prompt"


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Upper bounds on the items of each modality in one prompt; None: the context is the only bound."""

    image: int | None = None
    video: int | None = None

    def __str__(self) -> str:
        return ", ".join(f"{name}: {'any' if limit is None else limit}" for name, limit in asdict(self).items())


def parse_media_limits(value: Any) -> MediaLimits:
    """Parse the setting, given as a mapping or as JSON text, for example ``{"image": 4, "video": 0}``.

    Raises:
        ConfigError: an unknown modality, or a limit that is no number of items.
    """
    if isinstance(value, MediaLimits):
        return value
    limits = json_setting(NAME, value, """'{"image": 4}'""")
    for modality, limit in limits.items():
        if modality not in ("image", "video"):
            raise ConfigError(f"{NAME} has the unknown modality {modality!r}; allowed: image, video")
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise ConfigError(f"{NAME}: {modality}={limit!r} is not a number of items; allowed: 0 or more")
    return MediaLimits(**limits)
