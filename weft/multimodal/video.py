"""Videos as rows of frames: sampling, size, patches, times.

Job: the steps of the checkpoint's video processor in transformers on frames, without torchvision. Owns: its settings,
under its names. Does not know: containers and codecs (a video comes as frames), prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.config.json_object import JsonObject
from weft.config.vision import VisionConfig
from weft.errors import RequestError
from weft.multimodal.rules import RULES, Fit, VideoLimits, VideoRules

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

_ASSUMED_FPS = 24.0
_FORM = 'frames, or (frames, {"fps": 30.0})'


@dataclass(frozen=True, slots=True)
class Video:
    """Frames in their order.

    Attributes:
        frames: images as ``MediaProcessor.process`` accepts them, all of one size.
        fps: frames per second; None if unknown.
        is_sampled: all frames are used. Otherwise as many per second as the checkpoint's processor wants.
    """

    frames: Sequence[Any]
    fps: float | None = None
    is_sampled: bool = False

    @classmethod
    def of(cls, source: Any, param: str) -> Video:
        """Make a video from frames, or from a pair of frames and metadata. Raises RequestError."""
        metadata: Mapping[str, Any] = {}
        if isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], Mapping):
            source, metadata = source
        unknown = sorted(set(metadata) - {"fps", "do_sample_frames"})
        if unknown:
            raise RequestError(
                f"a video's metadata has unknown keys {unknown}; allowed are fps and do_sample_frames", param
            )
        if (
            isinstance(source, (str, bytes, Path))
            or not hasattr(source, "__len__")
            or not hasattr(source, "__getitem__")
        ):
            raise RequestError(f"a video is given as {type(source).__name__}; give {_FORM}", param)
        fps, samples = metadata.get("fps"), metadata.get("do_sample_frames", True)
        return cls(source, checked_fps(fps, param), is_sampled=not samples)

    def known_fps(self, settings: VideoSettings) -> float:
        """The frame rate. If unknown, sampled frames have the processor's sampling rate, and others 24 per second, as
        in transformers."""
        return self.fps or (settings.fps if self.is_sampled else _ASSUMED_FPS)


def checked_fps(fps: Any, param: str) -> float | None:
    """Check the given frames per second. Raises RequestError."""
    if fps is None:
        return None
    if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not 0 < fps <= 1000:
        raise RequestError(f"a video's fps={fps!r} is not a number above 0 and at most 1000", param)
    return float(fps)


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoSettings(VideoLimits):
    """Settings of the checkpoint's video processor; see transformers' ``Qwen3VLVideoProcessor``.

    ``processor``: see ``VisionConfig``.
    """

    processor: str
    patch_size: int
    merge_size: int
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    resample: int

    @property
    def rules(self) -> VideoRules:
        return _rules(self.processor)

    @classmethod
    def read(cls, folder: Path, vision: VisionConfig) -> VideoSettings:
        """Read ``video_preprocessor_config.json`` or ``processor_config.json``. Raises ConfigError."""
        rules, given = _rules(vision.processor), _settings(folder)
        known = {key: value for key, value in given.values.items() if value is not None}
        given = JsonObject(rules.defaults | known, given.where)
        square = vision.patch_size * vision.spatial_merge_size
        caps = given.boolean("cap_pixels_per_frame", False)
        if given.integer("max_duration", 0, low=0):
            raise given.unsupported("max_duration", "; leave it out")
        shortest, longest = _pixel_limits(given, rules, vision.temporal_patch_size * square**2)
        return cls(
            processor=vision.processor,
            shortest_edge=shortest,
            longest_edge=longest,
            patch_size=vision.patch_size,
            temporal_patch_size=vision.temporal_patch_size,
            merge_size=vision.spatial_merge_size,
            factor=square * given.integer("patch_expand_factor", 1),
            image_mean=given.numbers("image_mean", 3),
            image_std=given.numbers("image_std", 3),
            resample=given.integer("resample", 3),
            fps=given.number("fps", 2.0),
            min_frames=given.integer("min_frames", 4),
            max_frames=given.integer("max_frames"),
            max_pixels_per_frame=given.integer("max_video_tokens", 768) * square**2 if caps else None,
        )

    def fit(self, num_frames: int, height: int, width: int, param: str) -> Fit:
        """The sizes of ``num_frames`` frames of one size. Raises RequestError."""
        try:
            return self.rules.fit(num_frames, height, width, self)
        except ValueError as error:
            raise RequestError(
                f"a video of {num_frames} frames of {width} x {height} pixels cannot be processed ({error})", param
            ) from error

    def grid(self, num_frames: int, canvas: tuple[int, int]) -> tuple[int, int, int]:
        """The grid of patches of ``num_frames`` frames of this height and width."""
        height, width = canvas
        return -(-num_frames // self.temporal_patch_size), height // self.patch_size, width // self.patch_size


def _rules(processor: str) -> VideoRules:
    rules = RULES[processor].video
    assert rules is not None, "the family reads videos"
    return rules


def _pixel_limits(given: JsonObject, rules: VideoRules, token_pixels: int) -> tuple[int, int]:
    """Fewest and most pixels of a video. ``token_pixels``: those of a token."""
    if rules.tokens is not None:
        low, high = rules.tokens
        tokens = given.integer("min_image_tokens", low), given.integer("max_image_tokens", high)
        return tokens[0] * token_pixels, tokens[1] * token_pixels
    sizes = given.object("size")
    assert sizes is not None, "it has a default"
    return sizes.integer("shortest_edge"), sizes.integer("longest_edge")


def _settings(folder: Path) -> JsonObject:
    alone, together = folder / "video_preprocessor_config.json", folder / "processor_config.json"
    if alone.is_file():
        return JsonObject.load(alone)
    nested = JsonObject.load(together).object("video_processor") if together.is_file() else None
    return nested or JsonObject({}, str(alone))


def sample_frames(video: Video, settings: VideoSettings, param: str) -> list[int]:
    """Indices of the frames to use, as the processor chooses them. Raises RequestError."""
    total = len(video.frames)
    least = settings.temporal_patch_size
    if total < least:
        raise RequestError(f"a video has {total} frames; it needs at least {least}, or send an image", param)
    if video.is_sampled:
        if total > settings.max_frames:
            raise RequestError(f"a video has {total} frames; at most {settings.max_frames} are used: send fewer", param)
        return list(range(total))
    return settings.rules.sample(total, video.known_fps(settings), settings)


def timestamps(indices: Sequence[int], video: Video, settings: VideoSettings) -> tuple[float, ...]:
    """Seconds of each temporal patch."""
    step = settings.temporal_patch_size
    padded = [*indices, *[indices[-1]] * (-len(indices) % step)]
    fps = video.known_fps(settings)
    time = settings.rules.patch_time
    return tuple(time(padded[i] / fps, padded[i + step - 1] / fps) for i in range(0, len(padded), step))


def video_patches(
    frames: Iterable[Image], grid: tuple[int, int, int], content: tuple[int, int], settings: VideoSettings, param: str
) -> NDArray[np.float32]:
    """Resize frames one by one to ``content`` (height, width) at the top left of the grid, and convert them to patches
    in the processor's order: contiguous float32 with the numbers of
    ``[t * h * w, channels * temporal_patch * patch * patch]``.

    Raises:
        RequestError: frames have different sizes.
    """
    import numpy as np

    t, h, w = grid
    patch, step, merge = settings.patch_size, settings.temporal_patch_size, settings.merge_size
    pixels, (height, width) = np.zeros((t * step, 3, h * patch, w * patch), np.uint8), content
    size, count = None, 0
    for count, frame in enumerate(frames, 1):
        if size not in (None, frame.size):
            raise RequestError(f"a video's frames have different sizes, {size} and {frame.size}; send one size", param)
        size = frame.size
        resized = frame.resize((width, height), resample=settings.resample)
        pixels[count - 1, :, :height, :width] = np.asarray(resized).transpose(2, 0, 1)
    pixels[count:] = pixels[count - 1]
    blocks = pixels.reshape(t, step, 3, h // merge, merge, patch, w // merge, merge, patch)
    return np.ascontiguousarray(_normalised(blocks.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8), settings))


def _normalised(blocks: NDArray[np.uint8], settings: VideoSettings) -> NDArray[np.float32]:
    """Normalise ``blocks […, channels, temporal_patch, patch, patch]``."""
    import numpy as np

    mean, std = (
        np.asarray(values, np.float32).reshape(3, 1, 1, 1) for values in (settings.image_mean, settings.image_std)
    )
    return (blocks.astype(np.float32) / np.float32(255) - mean) / std
