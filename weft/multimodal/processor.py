"""A checkpoint's image and video processor: pictures in, patches for the vision encoder out.

Job: decode, resize, cut into patches and normalise as transformers does for the checkpoint; cache the results, so that
the same picture in a later turn costs a look-up. Owns: the settings of the checkpoint's processor, the bound on
concurrent work, the cache. Does not know: prompts (``placeholders.py``), or the sources of pictures (``media.py``).

Images are processed as in transformers' Pillow processor, so that pixels do not depend on other installed packages.
transformers' video processor needs torchvision. ``video.py`` has the same steps with the same resampling.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.config import EngineConfig
from weft.config.media_limits import MediaLimits
from weft.config.vision import VisionConfig
from weft.errors import ConfigError, ContextLengthError, RequestError
from weft.multimodal.items import Modality, pixel_bytes
from weft.multimodal.media import (
    MediaUrl,
    ReadLimits,
    SourceReader,
    check_size,
    check_video_size,
    decode_image,
    pillow,
    to_rgb,
)
from weft.multimodal.video import Video, VideoSettings, sample_frames, timestamps, video_patches

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_CONCURRENT = 2
"""Upper bound on pictures that are decoded and resized at a time. Further ones wait."""

MAX_PROMPT_BYTES = 2 << 30
"""Upper bound on the patches of one prompt in bytes, since they travel to the engine together."""

DETAIL_LOW = 512
"""Pixels of the longer side of an image with ``detail="low"``, as in the OpenAI API."""

# Settings of published Qwen3-VL checkpoints, for a folder without processor files (dummy weights).
_SIZE = {"shortest_edge": 1 << 16, "longest_edge": 1 << 24}
_VIDEO_SIZE = {"shortest_edge": 1 << 12, "longest_edge": 25_165_824}


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


def load_processor(config: EngineConfig) -> MediaProcessor | None:
    """Load the processor of an engine's checkpoint; None if the model reads text only. Takes seconds. Raises
    ConfigError."""
    model = config.model_config
    if not model.runs_vision:
        return None
    assert model.vision is not None and config.max_num_encoder_input_tokens is not None
    if (folder := config.allowed_local_media_path) is not None and not folder.is_dir():
        given = f"allowed_local_media_path={str(folder)!r}"
        raise ConfigError(f"{given} is not a folder; give one that exists, or leave it out")
    limits = ReadLimits(config.allowed_local_media_path, config.allowed_media_domains or ())
    cache_bytes = int(config.mm_processor_cache_gb * (1 << 30))
    return MediaProcessor(
        config.model_path,
        model.vision,
        limits,
        config.limit_mm_per_prompt,
        config.max_num_encoder_input_tokens,
        cache_bytes,
        config.dtype,
    )


@dataclass(frozen=True, slots=True)
class PatchMaker:
    """Makes patches of one picture at a time, as a checkpoint's processor does. It may be sent to other processes.

    Attributes:
        vision, limits, max_tokens, dtype: see ``MediaProcessor``.
        size: fewest and most pixels of a resized image.
        resample: Pillow's number of the filter.
        values: ``[3, 256]``: each 8-bit number of each channel as the encoder gets it, as bits of ``dtype``.
        settings: all settings of the processor as a text, for content hashes.
        videos: settings of the video processor.
    """

    vision: VisionConfig
    limits: ReadLimits
    max_tokens: int
    dtype: str
    size: tuple[int, int]
    resample: int
    values: bytes
    settings: str
    videos: VideoSettings

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
        if isinstance(source, bytes):
            return decode_image(source, self.limits, param)
        image = image_of_object(source, param)
        check_size(image.size, self.limits, param)
        return to_rgb(image, param)

    def _resized(self, image: Image, is_low: bool, param: str) -> Image:
        """The image in the size that the model takes, as 8-bit RGB."""
        if is_low:
            image.thumbnail((DETAIL_LOW, DETAIL_LOW))
        factor = self.vision.patch_size * self.vision.spatial_merge_size
        try:
            height, width = resized_size(image.height, image.width, factor, *self.size)
        except ValueError as error:
            raise RequestError(
                f"an image of {image.width} x {image.height} pixels cannot be processed ({error}); crop it", param
            ) from error
        self._check_tokens("an image", height * width // factor**2, image.size, param)
        return image.resize((width, height), self.resample)

    def patches(self, image: Image, content_hash: bytes) -> Processed:
        """Cut a resized image into patches, in the order of the checkpoint's processor.

        The processor scales and normalises each 8-bit number by itself, so its 3 x 256 results are looked up.
        """
        import numpy as np

        patch, merge, frames = self.vision.patch_size, self.vision.spatial_merge_size, self.vision.temporal_patch_size
        h, w = image.height // patch, image.width // patch
        values = np.frombuffer(self.values, "uint16" if self.dtype == "bfloat16" else self.dtype).reshape(3, 256)
        tiles = np.asarray(image).reshape(h // merge, merge, patch, w // merge, merge, patch, 3)
        patches = np.empty((h // merge, w // merge, merge, merge, 3, frames, patch, patch), values.dtype)
        for row in range(h // merge):  # [merge, patch, w // merge, merge, patch, 3] to [w // merge, merge, merge, ...]
            ordered = tiles[row].transpose(2, 0, 3, 5, 1, 4)
            for channel in range(3):
                patches[row, :, :, :, channel] = values[channel][ordered[:, :, :, channel]][:, :, :, None]
        return Processed("image", content_hash, (1, h, w), patches.tobytes(), self.dtype)

    def video(self, frames: Sequence[Any], times: tuple[float, ...], param: str) -> Processed:
        """Process what ``MediaProcessor.read_video`` returned. Raises RequestError."""
        first = self._decoded(frames[0], param)  # the others must have its size
        check_video_size(len(frames), first.size, self.limits, param)
        grid = self.videos.grid(len(frames), first.height, first.width, param)
        self._check_tokens("a video", self.vision.num_tokens(grid), first.size, param)
        digest = hashlib.sha256(f"video {grid} {self.settings}\n".encode())
        patches = video_patches((self._decoded(frame, param) for frame in frames), grid, self.videos, param)
        digest.update(patches.data)
        return Processed("video", digest.digest(), grid, pixel_bytes(patches, self.dtype), self.dtype, times)

    def _check_tokens(self, name: str, num_tokens: int, size: tuple[int, int], param: str) -> None:
        if num_tokens > self.max_tokens:
            raise RequestError(
                f"{name} of {size[0]} x {size[1]} pixels becomes {num_tokens:,} tokens, more than the "
                f"{self.max_tokens:,} that are encoded in a step (max_num_encoder_input_tokens); send a smaller one",
                param,
            )


class MediaProcessor:
    """Processes the images and videos of one model's requests. Several threads may use it.

    Args:
        folder: the folder of the checkpoint.
        vision: the vision tower of the checkpoint.
        limits: limits on pictures.
        limit_per_prompt: upper bounds on items of each modality in a prompt.
        max_tokens: upper bound on placeholder tokens of one item.
        cache_bytes: size of the cache of processed items.
        dtype: dtype of the patches, which is the model's.

    Attributes:
        vision, limits, max_tokens: as given.

    Raises:
        ConfigError: the folder's processor files do not fit this architecture.
    """

    def __init__(
        self,
        folder: Path,
        vision: VisionConfig,
        limits: ReadLimits,
        limit_per_prompt: MediaLimits,
        max_tokens: int,
        cache_bytes: int,
        dtype: str = "float32",
    ) -> None:
        self.vision = vision
        self.limits = limits
        self._limit_per_prompt = limit_per_prompt
        self.max_tokens = max_tokens
        images = _load_image_processor(folder, vision)
        videos = VideoSettings.read(folder, vision, _VIDEO_SIZE)
        self.patch_maker = PatchMaker(
            vision,
            limits,
            max_tokens,
            dtype,
            (int(images.size["shortest_edge"]), int(images.size["longest_edge"])),
            int(images.resample),
            _pixel_table(images, dtype),
            f"{sorted(images.to_dict().items(), key=lambda pair: pair[0])} {videos}",
            videos,
        )
        self._cache = _Cache(cache_bytes)
        self._turns = threading.BoundedSemaphore(MAX_CONCURRENT)

    def check_counts(self, media: Mapping[Modality, Sequence[Any]], param: str) -> None:
        """Raise RequestError for more images or videos than a prompt may have."""
        for modality, sources in media.items():
            limit = getattr(self._limit_per_prompt, modality)
            if limit is not None and len(sources) > limit:
                raise RequestError(
                    f"the prompt has {len(sources)} {modality}s; at most {limit} are allowed here "
                    "(limit_mm_per_prompt): send fewer",
                    param,
                )

    def process(self, media: Mapping[Modality, Sequence[Any]], room: int, param: str) -> list[Processed]:
        """Process all images of a prompt in their order, then all videos. Blocks.

        Args:
            room: upper bound on tokens of all items together.
            media: by modality: images as PIL images, arrays ``[height, width, 3]`` of uint8, encoded bytes, paths or
                ``MediaUrl``; videos as ``Video``, or the frames alone.
            param: the request's field to blame.

        Raises:
            RequestError: there are too many items, or one cannot be read.
        """
        self.check_counts(media, param)
        reader = SourceReader(self.limits, param)
        steps = [(self.image, source) for source in media.get("image", ())]
        steps += [(self.video, source) for source in media.get("video", ())]
        done: list[Processed] = []
        for read, source in steps:
            done.append(read(source, reader))
            self.check_sum(done, len(steps), room, param)
        return done

    def check_sum(self, done: Sequence[Processed], num_items: int, room: int, param: str) -> None:
        """Raise RequestError if the first items of ``num_items`` are too much, before more of them cost anything."""
        if sum(len(item.pixel_values) for item in done) > MAX_PROMPT_BYTES:
            raise RequestError(
                f"the first {len(done)} of the prompt's {num_items} images and videos already have more than "
                f"{MAX_PROMPT_BYTES:,} bytes of patches; send fewer or smaller ones",
                param,
            )
        if sum(self.vision.num_tokens(item.grid) for item in done) > room:
            raise ContextLengthError(
                f"the first {len(done)} of the prompt's {num_items} images and videos already are too long for "
                "this model's maximum context length; send fewer or smaller ones",
                param,
            )

    # -- images --------------------------------------------------------------------------------------------------

    def image(self, source: Any, reader: SourceReader) -> Processed:
        """Process one image; see ``process``."""
        data = reader.encoded(source)
        with self._turns:
            key = image_key(source, data) if data is not None else None
            found = self._cache.get(key)
            if found is not None:
                return found
            given = source if data is None else data
            image, content_hash = self.patch_maker.resized(given, is_low_detail(source), reader.param)
            processed = self.cached(content_hash) or self.patch_maker.patches(image, content_hash)
            self.keep(processed, key)
            return processed

    def cached(self, key: bytes) -> Processed | None:
        """Return the image of this content hash or ``image_key`` if it was processed lately."""
        return self._cache.get(key)

    def keep(self, processed: Processed, key: bytes | None) -> None:
        """Remember a processed image, also under its ``image_key``."""
        self._cache.put(processed, processed.content_hash, key)

    # -- videos --------------------------------------------------------------------------------------------------

    def video(self, source: Any, reader: SourceReader) -> Processed:
        """Process one video; see ``process``."""
        frames, times = self.read_video(source, reader)
        with self._turns:
            return self.patch_maker.video(frames, times, reader.param)

    def read_video(self, source: Any, reader: SourceReader) -> tuple[list[Any], tuple[float, ...]]:
        """Read the frames that are used of a video, and the times of its temporal patches. Raises RequestError."""
        video = source if isinstance(source, Video) else Video.of(source, reader.param)
        indices = sample_frames(video, self.patch_maker.videos, reader.param)
        frames = self._encoded_frames([video.frames[index] for index in indices], reader)
        return frames, timestamps(indices, video, self.patch_maker.videos)

    def _encoded_frames(self, frames: Sequence[Any], reader: SourceReader) -> list[Any]:
        """The encoded bytes of frames, or the frames if they are decoded. Raises RequestError."""
        result, left = [], self.limits.max_bytes
        for frame in frames:
            data = reader.encoded(frame)
            left -= len(data or b"")
            if left < 0:
                raise RequestError(
                    f"a video's frames are larger than the {self.limits.max_bytes:,} bytes that are read; send fewer "
                    "or smaller ones",
                    reader.param,
                )
            result.append(frame if data is None else data)
        return result


def image_key(source: Any, data: bytes) -> bytes:
    """The key of an image in the cache: its encoded bytes and its detail."""
    return hashlib.sha256(data).digest() + bytes([is_low_detail(source)])


def is_low_detail(source: Any) -> bool:
    """Whether a small copy is wanted."""
    return isinstance(source, MediaUrl) and source.detail == "low"


def resized_size(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
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


def _pixel_table(processor: Any, dtype: str) -> bytes:
    """Return ``PatchMaker.values``: what the processor makes of each 8-bit number."""
    import numpy as np

    image = np.broadcast_to(np.arange(256, dtype=np.uint8)[None, :, None], (3, 256, 1))
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


def _load_image_processor(folder: Path, vision: VisionConfig) -> Any:
    """Load the checkpoint's image processor in its Pillow form, or that of the published Qwen3-VL if the folder has
    none."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    sizes = {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
    }
    if not any((folder / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
        return Qwen2VLImageProcessorPil(size=_SIZE, image_mean=[0.5] * 3, image_std=[0.5] * 3, **sizes)
    try:
        processor = Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the library can raise anything
        raise ConfigError(
            f"the image processor's files in {folder} cannot be read ({error}); fetch them again"
        ) from error
    wrong = {name: getattr(processor, name) for name, size in sizes.items() if getattr(processor, name) != size}
    if wrong:
        raise ConfigError(f"the image processor's files in {folder} say {wrong}, config.json says {sizes}")
    return processor


class _Cache:
    """A cache of processed items, least recently used first. Several keys may name one item."""

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes
        self._items: OrderedDict[bytes, Processed] = OrderedDict()  # by content hash
        self._hashes: OrderedDict[bytes, bytes] = OrderedDict()  # other key -> content hash
        self._lock = threading.Lock()

    def get(self, key: bytes | None) -> Processed | None:
        if key is None:
            return None
        with self._lock:
            content_hash = self._hashes.get(key, key)
            found = self._items.get(content_hash)
            if found is not None:
                self._items.move_to_end(content_hash)
            return found

    def put(self, processed: Processed, content_hash: bytes, key: bytes | None) -> None:
        size = len(processed.pixel_values)
        with self._lock:
            if content_hash not in self._items:
                self._items[content_hash] = processed
                self._left -= size
            while self._left < 0:
                self._left += len(self._items.popitem(last=False)[1].pixel_values)
            if key is not None:
                self._hashes[key] = content_hash
                while len(self._hashes) > 4 * len(self._items) + 16:
                    self._hashes.popitem(last=False)
