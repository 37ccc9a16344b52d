"""From one decoded picture or video to patches for the vision encoder.

Job: resize, cut into patches and normalise as transformers does for the checkpoint. Owns: the settings of the
checkpoint's processor. Does not know: requests, caches, the sources of pictures (``media.py``).

Images are processed as in transformers' Pillow processor, so that pixels do not depend on other installed packages.
transformers' video processor needs torchvision. ``video.py`` has the same steps with the same resampling.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.config.vision import VisionConfig
from weft.errors import RequestError
from weft.multimodal.items import Modality, pixel_bytes
from weft.multimodal.media import ReadLimits, check_size, check_video_size, decode_image, pillow, to_rgb
from weft.multimodal.padded import padded_patches
from weft.multimodal.rules import RULES, Fit
from weft.multimodal.video import VideoSettings, video_patches

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

DETAIL_LOW = 512
"""Pixels of the longer side of an image with ``detail="low"``, as in the OpenAI API."""


@dataclass(frozen=True, slots=True)
class Processed:
    """One image or video in the form of the encoder; fields as in ``MediaItem``.

    ``times``: seconds of each temporal patch of a video; None for an image.
    """

    modality: Modality
    content_hash: bytes
    grid: tuple[int, int, int]
    pixel_values: bytes
    dtype: str
    times: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class PatchMaker:
    """Makes patches of one picture at a time, as a checkpoint's processor does. It may be sent to other processes.

    Attributes:
        vision, limits, max_tokens, dtype: see ``MediaProcessor``.
        size: see ``ProcessorRules.image_limits``.
        resample: Pillow's number of the filter.
        values: ``[3, 256]``: each 8-bit number of each channel as the encoder gets it, as bits of ``dtype``.
        padding: ``[3, 1]``: the same of -1, for pixels outside an image.
        settings: all settings of the processor as a text, for content hashes.
        videos: settings of the video processor; None: the model reads no videos.
    """

    vision: VisionConfig
    limits: ReadLimits
    max_tokens: int
    dtype: str
    size: tuple[float, int]
    resample: int
    values: bytes
    padding: bytes
    settings: str
    videos: VideoSettings | None

    def image(self, source: Any, is_low: bool, param: str) -> Processed:
        """Process an image that was given as encoded bytes, PIL image or array. Raises RequestError."""
        return self.patches(*self.resized(source, is_low, param))

    def resized(self, source: Any, is_low: bool, param: str) -> tuple[Image, bytes]:
        """Return the image in the size that the model takes, and its content hash. Raises RequestError."""
        image = self._resized(self._decoded(source, param), is_low, param)
        digest = hashlib.sha256(f"image {image.size} {self.settings}\n".encode())
        digest.update(image.tobytes())
        return image, digest.digest()

    def _decoded(self, source: Any, param: str) -> Image:
        background = RULES[self.vision.processor].background
        if isinstance(source, bytes):
            return decode_image(source, self.limits, param, background)
        image = image_of_object(source, param)
        check_size(image.size, self.limits, param)
        return to_rgb(image, param, background)

    def _resized(self, image: Image, is_low: bool, param: str) -> Image:
        """The image in the size that the model takes, as 8-bit RGB; without pixels outside it that are no colour."""
        if is_low:
            image.thumbnail((DETAIL_LOW, DETAIL_LOW))
        factor = self.vision.patch_size * self.vision.spatial_merge_size
        rules = RULES[self.vision.processor]
        try:
            fit = rules.image_fit(image.height, image.width, factor, *self.size)
        except ValueError as error:
            raise RequestError(
                f"an image of {image.width} x {image.height} pixels cannot be processed ({error}); crop it", param
            ) from error
        self._check_tokens("an image", math.prod(fit.canvas) // factor**2, image.size, param)
        if rules.padded_canvas is not None:
            fit = Fit(fit.content, fit.content)
        return on_canvas(image, fit, self.resample)

    def patches(self, image: Image, content_hash: bytes) -> Processed:
        """Cut a resized image into patches, in the order of the checkpoint's processor.

        The processor scales and normalises each 8-bit number by itself, so its 3 x 256 results are looked up.
        """
        import numpy as np

        patch, merge, frames = self.vision.patch_size, self.vision.spatial_merge_size, self.vision.temporal_patch_size
        bits, canvas = "uint16" if self.dtype == "bfloat16" else self.dtype, RULES[self.vision.processor].padded_canvas
        values = np.frombuffer(self.values, bits).reshape(3, 256)
        if canvas is not None:
            height, width = canvas(image.height, image.width, patch * merge)
            padded = padded_patches(image, (height, width), self.vision, values, np.frombuffer(self.padding, bits))
            return Processed("image", content_hash, (1, height // patch, width // patch), padded.tobytes(), self.dtype)
        h, w = image.height // patch, image.width // patch
        tiles = np.asarray(image).reshape(h // merge, merge, patch, w // merge, merge, patch, 3)
        patches = np.empty((h // merge, w // merge, merge, merge, 3, frames, patch, patch), values.dtype)
        for row in range(h // merge):  # [merge, patch, w // merge, merge, patch, 3] to [w // merge, merge, merge, ...]
            ordered = tiles[row].transpose(2, 0, 3, 5, 1, 4)
            for channel in range(3):
                patches[row, :, :, :, channel] = values[channel][ordered[:, :, :, channel]][:, :, :, None]
        return Processed("image", content_hash, (1, h, w), patches.tobytes(), self.dtype)

    def video(self, frames: Sequence[Any], times: tuple[float, ...], param: str) -> Processed:
        """Process what ``MediaProcessor.read_video`` returned. Raises RequestError."""
        assert self.videos is not None, "the video was read"
        first = self._decoded(frames[0], param)  # the others must have its size
        check_video_size(len(frames), first.size, self.limits, param)
        fit = self.videos.fit(len(frames), first.height, first.width, param)
        grid = self.videos.grid(len(frames), fit.canvas)
        self._check_tokens("a video", self.vision.num_tokens(grid), first.size, param)
        digest = hashlib.sha256(f"video {grid} {self.settings}\n".encode())
        decoded = (self._decoded(frame, param) for frame in frames)
        patches = video_patches(decoded, grid, fit.content, self.videos, param)
        digest.update(patches.data)
        return Processed("video", digest.digest(), grid, pixel_bytes(patches, self.dtype), self.dtype, times)

    def _check_tokens(self, name: str, num_tokens: int, size: tuple[int, int], param: str) -> None:
        if num_tokens > self.max_tokens:
            raise RequestError(
                f"{name} of {size[0]} x {size[1]} pixels becomes {num_tokens:,} tokens, more than the "
                f"{self.max_tokens:,} that are encoded in a step (max_num_encoder_input_tokens); send a smaller one",
                param,
            )


def on_canvas(image: Image, fit: Fit, resample: int) -> Image:
    """The image in the size ``fit.content``, at the top left of a black canvas where that is larger."""
    (height, width), (tall, wide) = fit
    resized = image.resize((width, height), resample)
    if fit.content == fit.canvas:
        return resized
    canvas = pillow().new("RGB", (wide, tall))
    canvas.paste(resized)
    return canvas


def pixel_table(processor: Any, dtype: str, numbers: NDArray[Any]) -> bytes:
    """Return what the processor makes of each number in each channel, ``[3, len(numbers)]``, as bits of ``dtype``."""
    import numpy as np

    image = np.broadcast_to(numbers[None, :, None], (3, len(numbers), 1))
    if processor.do_rescale:
        image = processor.rescale(image, processor.rescale_factor)
    if processor.do_normalize:
        image = processor.normalize(image, processor.image_mean, processor.image_std)
    return pixel_bytes(np.asarray(image, np.float32), dtype)


def image_of_object(source: Any, param: str) -> Image:
    """A PIL image, made of an array if needed. Raises RequestError."""
    image_module = pillow()
    if isinstance(source, image_module.Image):
        if source.format != "MPO" and getattr(source, "is_animated", False):
            raise RequestError("an image is animated; give one frame, or the frames as a video", param)
        return source
    import numpy as np

    if not isinstance(source, np.ndarray):
        raise RequestError(
            f"an image is given as {type(source).__name__}; give a PIL image, an array [height, width, 3] of uint8, a "
            "path, or encoded bytes",
            param,
        )
    if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3:
        raise RequestError(
            f"an image is an array of {source.dtype} {list(source.shape)}; give [height, width, 3] of uint8", param
        )
    return image_module.fromarray(np.ascontiguousarray(source))
