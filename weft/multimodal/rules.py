"""Differences between the processors of families: sizes of pictures, frames of videos, and the text around frames.

Job: the arithmetic of transformers' processors, without pixels. Owns: ``RULES``, by ``VisionConfig.processor``. Does
not know: pictures, files, requests.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

from weft.config.vision import VisionConfig
from weft.multimodal.inkling import inkling2_processor, inkling_processor
from weft.multimodal.items import Modality
from weft.multimodal.media import Background


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoLimits:
    """The settings of a video processor that sizes and frames follow from.

    Attributes:
        shortest_edge, longest_edge: fewest and most pixels of all frames of a video.
        factor: sides of a frame are multiples of it.
    """

    shortest_edge: int
    longest_edge: int
    temporal_patch_size: int
    factor: int
    fps: float
    min_frames: int
    max_frames: int
    max_pixels_per_frame: int | None


class Fit(NamedTuple):
    """Heights and widths in pixels: of the resized picture, and of the black canvas that has it at its top left."""

    content: tuple[int, int]
    canvas: tuple[int, int]


@dataclass(frozen=True, slots=True)
class VideoRules:
    """How one family prepares videos.

    Attributes:
        tokens: fewest and most tokens of a video, if the settings count tokens; None if they count pixels.
        defaults: settings of published checkpoints for keys that the files leave out.
        fit: sizes of each frame, from the number of frames, height, width and the settings. Raises ValueError.
        sample: the frames to use, from their number and frames per second.
        patch_time: seconds of a temporal patch, from those of its first and its last frame.
        time_before, time_after: formats of a time in the text before and after the frame.
        frame_placeholder: the placeholder of embeddings of frames.
    """

    tokens: tuple[int, int] | None
    defaults: dict[str, Any]
    fit: Callable[[int, int, int, VideoLimits], Fit]
    sample: Callable[[int, float, VideoLimits], list[int]]
    patch_time: Callable[[float, float], float]
    time_before: str
    time_after: str
    frame_placeholder: Modality


@dataclass(frozen=True, slots=True)
class ProcessorRules:
    """How one family prepares pictures.

    Attributes:
        image_class: imports the class of the image processor in its Pillow form.
        image_defaults: settings of published checkpoints, for a folder without processor files.
        image_limits: fewest and most pixels of a resized image, of an image processor; or what ``image_fit`` takes in
            their place.
        image_fit: sizes of an image, from its height and width, the multiple of sides, and the two limits. Raises
            ValueError.
        video: None: the family reads no videos.
        sizes: settings of the image processor that follow from ``config.json``.
        padded_canvas: height and width of the canvas of an image, from its own and the multiple of sides. Pixels of -1
            extend the image, and patches have channels last. None: images are as large as the canvas.
        background: what is under transparent pixels.
    """

    image_class: Callable[[], Any]
    image_defaults: dict[str, Any]
    image_limits: Callable[[Any], tuple[float, int]]
    image_fit: Callable[[int, int, int, float, int], Fit]
    video: VideoRules | None
    sizes: Callable[[VisionConfig], dict[str, Any]]
    padded_canvas: Callable[[int, int, int], tuple[int, int]] | None = None
    background: Background = "white"


def resized_size(height: int, width: int, factor: int, min_pixels: float, max_pixels: int) -> tuple[int, int]:
    """Return the size to which transformers' ``smart_resize`` of Qwen2-VL resizes, without importing transformers.

    Both sides are multiples of ``factor``, and there are ``min_pixels`` to ``max_pixels``. Raises ValueError for an
    aspect ratio beyond 200.
    """
    ratio = max(height, width) / min(height, width)
    if ratio > 200:
        raise ValueError(f"absolute aspect ratio must be smaller than 200, got {ratio}")
    new_height, new_width = (round(side / factor) * factor for side in (height, width))
    if new_height * new_width > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        new_height, new_width = (max(factor, math.floor(side / scale / factor) * factor) for side in (height, width))
    elif new_height * new_width < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        new_height, new_width = (math.ceil(side * scale / factor) * factor for side in (height, width))
    return new_height, new_width


def _qwen_image_fit(height: int, width: int, factor: int, min_pixels: float, max_pixels: int) -> Fit:
    size = resized_size(height, width, factor, min_pixels, max_pixels)
    return Fit(size, size)


def _qwen_image_limits(processor: Any) -> tuple[int, int]:
    return int(processor.size["shortest_edge"]), int(processor.size["longest_edge"])


def _qwen_video_fit(num_frames: int, height: int, width: int, settings: VideoLimits) -> Fit:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    max_pixels = settings.longest_edge
    if settings.max_pixels_per_frame is not None:
        share = min(settings.max_pixels_per_frame, settings.longest_edge // num_frames)
        max_pixels = num_frames * max(share, int(settings.shortest_edge * 1.05))
    step = settings.temporal_patch_size
    size = smart_resize(num_frames, height, width, step, settings.factor, settings.shortest_edge, max_pixels)
    return Fit(size, size)


def _qwen_sample(total: int, fps: float, settings: VideoLimits) -> list[int]:
    """``settings.fps`` frames per second, within the processor's bounds."""
    import numpy as np

    wanted = int(total / fps * settings.fps)
    count = min(max(wanted, settings.min_frames), settings.max_frames, total)
    return [int(index) for index in np.linspace(0, total - 1, count).round()]


def glm_fit(
    num_frames: int, height: int, width: int, *, step: int, factor: int, min_pixels: float, max_pixels: int
) -> Fit:
    """Return the sizes of a picture of GLM-5.3, which keeps its aspect ratio on a canvas.

    Args:
        num_frames: frames of a video; ``step`` for an image.
        step: frames of a temporal patch.
        factor: sides of the canvas are multiples of it.
        min_pixels, max_pixels: of the canvas, times the number of frames.

    Raises:
        ValueError: one square is more than ``max_pixels``.
    """
    frames = max(step, round(num_frames / step) * step)
    pixels = num_frames * height * width
    tall, wide = _aligned(height, factor), _aligned(width, factor)
    if frames * tall * wide < min_pixels:
        scale = math.sqrt(min_pixels / pixels)
        tall, wide = (_aligned(math.ceil(side * scale), factor) for side in (height, width))
    if frames * tall * wide > max_pixels:
        tall, wide = _largest_canvas(height, width, factor, max_pixels // frames)
    scale = min(tall / height, wide / width)
    if pixels >= min_pixels:
        scale = min(1.0, scale)
    content = max(1, min(tall, math.floor(height * scale))), max(1, min(wide, math.floor(width * scale)))
    return Fit(content, (tall, wide))


def _aligned(side: int, factor: int) -> int:
    return math.ceil(max(1, side) / factor) * factor


def _largest_canvas(height: int, width: int, factor: int, max_pixels: int) -> tuple[int, int]:
    """The canvas of the highest smaller copy that has at most ``max_pixels``."""
    if max_pixels < factor**2:
        raise ValueError(f"{max_pixels} pixels are fewer than one square of {factor} x {factor}")

    def canvas(copy_height: int) -> tuple[int, int]:
        return _aligned(copy_height, factor), _aligned(math.floor(width * copy_height / height), factor)

    fitting = bisect_right(range(1, height + 1), max_pixels, key=lambda copy_height: math.prod(canvas(copy_height)))
    return canvas(fitting) if fitting else (factor, factor)


def _glm_image_fit(height: int, width: int, factor: int, min_pixels: float, max_pixels: int) -> Fit:
    return glm_fit(
        _GLM_STEP, height, width, step=_GLM_STEP, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels
    )


def _glm_image_limits(processor: Any) -> tuple[int, int]:
    pixels = processor.temporal_patch_size * (processor.patch_size * processor.merge_size) ** 2
    return processor.min_image_tokens * pixels, processor.max_image_tokens * pixels


def _glm_video_fit(num_frames: int, height: int, width: int, settings: VideoLimits) -> Fit:
    return glm_fit(
        num_frames,
        height,
        width,
        step=settings.temporal_patch_size,
        factor=settings.factor,
        min_pixels=settings.shortest_edge,
        max_pixels=settings.longest_edge,
    )


def _glm_sample(total: int, fps: float, settings: VideoLimits) -> list[int]:
    """The first frame of each interval of ``1 / settings.fps`` seconds, an even number of frames.

    The length of the video is that of a decoder without metadata: whole seconds, one more than the last frame's.
    """
    import numpy as np

    seconds = round((total - 1) / fps) + 1
    wanted = max(1, min(int(seconds * settings.fps), settings.max_frames))
    taken, due = [], 0.0
    for index in range(total):
        if index * (1 / fps) >= due and due < seconds:
            taken.append(index)
            due += 1 / settings.fps
    if total < wanted or len(taken) > wanted:
        taken = np.linspace(0, total - 1, wanted, dtype=int).tolist()
    elif len(taken) < wanted:
        taken = np.linspace(taken[0], taken[-1], wanted, dtype=int).tolist()
    taken = list(dict.fromkeys(taken))
    return [*taken, taken[-1]] if len(taken) % 2 else taken


_GLM_STEP = 2
"""Frames of a temporal patch of GLM-5.3 (``config/glm_vision.py``)."""
_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip
_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def _named(module: str, name: str) -> Callable[[], Any]:
    return lambda: getattr(import_module(module), name)


def _patch_sizes(vision: VisionConfig) -> dict[str, Any]:
    return {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
    }


def _square_size(vision: VisionConfig) -> dict[str, Any]:
    side = vision.patch_size * vision.spatial_merge_size
    return {"size": {"height": side, "width": side}}


def _whole_squares(height: int, width: int, factor: int) -> tuple[int, int]:
    return _aligned(height, factor), _aligned(width, factor)


def _inkling2_fit(height: int, width: int, factor: int, *_: float) -> Fit:
    """Images keep their size."""
    return Fit((height, width), _whole_squares(height, width, factor))


def _inkling_canvas(height: int, width: int, factor: int) -> tuple[int, int]:
    """One column more than whole squares, also where these suffice."""
    return _aligned(height, factor), (width // factor + 1) * factor


def _inkling_limits(processor: Any) -> tuple[float, int]:
    """The factor of an image's size, and the longest side to which an image grows; 0: any."""
    fraction, longest = processor.rescale_image_frac, processor.rescale_image_max_upscaled_long_edge
    return (1.0 if fraction is None else float(fraction)), (0 if longest is None else int(longest))


def _inkling_fit(height: int, width: int, factor: int, fraction: float, longest: int) -> Fit:
    """The image scaled by a factor, and not beyond the longest side; sides are rounded half up. Raises ValueError."""
    edge = max(height, width)
    wanted = min(edge * fraction, max(longest, edge)) if longest else edge * fraction
    height, width = (math.floor(side * (wanted / edge) + 0.5) for side in (height, width))
    if not height or not width:
        raise ValueError(f"{fraction} times its size has no pixels")
    return Fit((height, width), _inkling_canvas(height, width, factor))


RULES = {
    "qwen": ProcessorRules(
        image_class=_named("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil"),
        image_defaults=_HALF | {"size": {"shortest_edge": 1 << 16, "longest_edge": 1 << 24}},
        image_limits=_qwen_image_limits,
        image_fit=_qwen_image_fit,
        video=VideoRules(
            tokens=None,
            defaults=_HALF | {"size": {"shortest_edge": 1 << 12, "longest_edge": 25_165_824}, "max_frames": 768},
            fit=_qwen_video_fit,
            sample=_qwen_sample,
            patch_time=lambda first, last: (first + last) / 2,
            time_before="<{:.1f} seconds>",
            time_after="",
            frame_placeholder="video",
        ),
        sizes=_patch_sizes,
    ),
    "glm": ProcessorRules(
        image_class=_named("transformers.models.glm5_next.image_processing_pil_glm5_next", "Glm5NextImageProcessorPil"),
        image_defaults={},
        image_limits=_glm_image_limits,
        image_fit=_glm_image_fit,
        video=VideoRules(
            tokens=(16, 240_000),
            defaults=_CLIP | {"max_frames": 2048},
            fit=_glm_video_fit,
            sample=_glm_sample,
            patch_time=lambda first, last: first,
            time_before="",
            time_after="{:.1f} seconds",
            frame_placeholder="image",
        ),
        sizes=_patch_sizes,
    ),
    "inkling2": ProcessorRules(
        image_class=inkling2_processor,
        image_defaults={},
        image_limits=lambda processor: (0, 0),
        image_fit=_inkling2_fit,
        video=None,
        sizes=_square_size,
        padded_canvas=_whole_squares,
        background="checkerboard",
    ),
    "inkling": ProcessorRules(
        image_class=inkling_processor,
        image_defaults={},
        image_limits=_inkling_limits,
        image_fit=_inkling_fit,
        video=None,
        sizes=_square_size,
        padded_canvas=_inkling_canvas,
    ),
}
