"""A checkpoint's image and video processor: pictures in, patches for the vision encoder out.

Job: read the pictures of a prompt and have patches made of them (``patch_maker.py``); cache the results, so that the
same picture in a later turn costs a look-up. Owns: the bounds on a prompt and on concurrent work, the cache. Does not
know: prompts (``placeholders.py``), or the sources of pictures (``media.py``).
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.config import EngineConfig
from weft.config.media_limits import MediaLimits
from weft.config.vision import VisionConfig
from weft.errors import ConfigError, ContextLengthError, RequestError
from weft.multimodal.items import Modality
from weft.multimodal.media import MediaUrl, ReadLimits, SourceReader
from weft.multimodal.patch_maker import PatchMaker, Processed, pixel_table
from weft.multimodal.rules import RULES
from weft.multimodal.video import Video, VideoSettings, sample_frames, timestamps

MAX_CONCURRENT = 2
"""Upper bound on pictures that are decoded and resized at a time. Further ones wait."""

MAX_PROMPT_BYTES = 2 << 30
"""Upper bound on the patches of one prompt in bytes, since they travel to the engine together."""


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


class MediaProcessor:
    """Processes the images and videos of one model's requests. Several threads may use it.

    Args:
        vision: the vision tower of the checkpoint.
        limit_per_prompt: upper bounds on items of each modality in a prompt.
        max_tokens: upper bound on placeholder tokens of one item.
        cache_bytes: size of the cache of processed items.
        dtype: dtype of the patches, which is the model's.

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
        import numpy as np

        images = _load_image_processor(folder, vision)
        rules = RULES[vision.processor]
        videos = VideoSettings.read(folder, vision) if rules.video is not None else None
        self.patch_maker = PatchMaker(
            vision,
            limits,
            max_tokens,
            dtype,
            rules.image_limits(images),
            int(images.resample),
            pixel_table(images, dtype, np.arange(256, dtype=np.uint8)),
            pixel_table(images, dtype, np.full(1, -1, np.float32)),
            f"{sorted(images.to_dict().items(), key=lambda pair: pair[0])} {videos}",
            videos,
        )
        self._cache = _Cache(cache_bytes)
        self._turns = threading.BoundedSemaphore(MAX_CONCURRENT)

    def check_counts(self, media: Mapping[Modality, Sequence[Any]], param: str) -> None:
        """Raise RequestError for more images or videos than a prompt may have, or for videos that are not read."""
        if self.patch_maker.videos is None and media.get("video"):
            raise RequestError("this model reads images and no videos; send frames of the video as images", param)
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

    def video(self, source: Any, reader: SourceReader) -> Processed:
        """Process one video; see ``process``."""
        frames, times = self.read_video(source, reader)
        with self._turns:
            return self.patch_maker.video(frames, times, reader.param)

    def read_video(self, source: Any, reader: SourceReader) -> tuple[list[Any], tuple[float, ...]]:
        """Read the frames that are used of a video, and the times of its temporal patches. Raises RequestError."""
        video = source if isinstance(source, Video) else Video.of(source, reader.param)
        settings = self.patch_maker.videos
        assert settings is not None, "check_counts refused the video"
        indices = sample_frames(video, settings, reader.param)
        frames = self._encoded_frames([video.frames[index] for index in indices], reader)
        return frames, timestamps(indices, video, settings)

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


def _load_image_processor(folder: Path, vision: VisionConfig) -> Any:
    """Load the checkpoint's image processor in its Pillow form, or that of the family's published checkpoints if the
    folder has none."""
    rules = RULES[vision.processor]
    kind, sizes = rules.image_class(), rules.sizes(vision)
    if not any((folder / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
        return kind(**rules.image_defaults, **sizes)
    try:
        processor = kind.from_pretrained(folder, local_files_only=True)
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
