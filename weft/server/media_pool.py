"""Images and videos of requests: read in threads, decoded and resized in worker processes.

Job: have the pictures of a prompt processed without keeping anybody else waiting. Owns: the threads and the processes.
Does not know: how a picture is processed (``multimodal/processor.py``).

Prompts whose images have to be downloaded wait in threads of their own, so that a slow host keeps nobody else waiting.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from weft.errors import RequestError
from weft.multimodal.media import MediaUrl, SourceReader, pixels_of
from weft.multimodal.parts import Media
from weft.multimodal.patch_maker import Processed, image_of_object
from weft.multimodal.processor import MediaProcessor, image_key, is_low_detail
from weft.multimodal.video import Video
from weft.server.media_worker import NewImage, NewVideo
from weft.server.worker import decode, encode
from weft.server.worker_pool import WorkerKind, WorkerPool

MAX_DOWNLOADS = 8
"""Prompts whose images are downloaded at a time."""

LIMIT_S = 30.0
"""Processor time for one image or video. The largest image takes about 3 s."""

MEMORY_BYTES = 3 << 30
"""Memory for one image or video. The largest image takes about 1 GiB."""

SMALL_PIXELS = 1 << 21
"""Pixels up to which an image is small."""


class MediaPool:
    """Reads images and videos. Threads and processes start when they are needed."""

    def __init__(self) -> None:
        self._local = ThreadPoolExecutor(2, thread_name_prefix="images")
        self._remote = ThreadPoolExecutor(MAX_DOWNLOADS, thread_name_prefix="downloads")
        self._workers: WorkerPool | None = None

    def start(self, processor: MediaProcessor) -> None:
        """Start the workers for a model that reads images."""
        setup = encode(processor.patch_maker)
        self._workers = WorkerPool(
            WorkerKind("images and videos", "weft.server.media_worker", setup, MEMORY_BYTES, LIMIT_S, SMALL_PIXELS)
        )
        self._workers.start()

    async def process(self, processor: MediaProcessor, media: Media, room: int, caller: str = "") -> list[Processed]:
        """Process all images of a prompt in their order, then all videos; see ``MediaProcessor.process``.

        Args:
            caller: who is to get a fair share of the workers.

        Raises:
            RequestError: too many, or one that cannot be read.
        """
        processor.check_counts(media, "messages")
        reader = SourceReader(processor.limits, "messages")
        sources = [("image", source) for source in media.get("image", ())]
        sources += [("video", source) for source in media.get("video", ())]
        done: list[Processed] = []
        for kind, source in sources:
            process = self._image if kind == "image" else self._video
            done.append(await process(processor, source, reader, caller))
            processor.check_sum(done, len(sources), room, reader.param)
        return done

    async def _image(self, processor: MediaProcessor, source: Any, reader: SourceReader, caller: str) -> Processed:
        data, key, size = await self._in_thread(source, partial(_read_image, source, reader))
        if (found := processor.cached(key)) is not None:
            return found
        task = NewImage(is_low_detail(source), reader.param)
        processed = await self._run(task, data, caller=caller, size=size, param=reader.param)
        processor.keep(processed, key)
        return processed

    async def _video(self, processor: MediaProcessor, source: Any, reader: SourceReader, caller: str) -> Processed:
        frames, times = await self._in_thread(source, partial(processor.read_video, source, reader))
        size = SMALL_PIXELS + 1
        for frame in frames:
            if not isinstance(frame, bytes):
                image_of_object(frame, reader.param)
        task = NewVideo(frames, times, reader.param)
        return await self._run(task, caller=caller, size=size, param=reader.param)

    async def _in_thread(self, source: Any, work: Any) -> Any:
        threads = self._remote if _is_remote(source) else self._local
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    async def _run(self, task: NewImage | NewVideo, blob: bytes = b"", **options: Any) -> Processed:
        assert self._workers is not None, "a model that reads images has workers"
        content, pixels = await self._workers.run(task, blob, **options)
        return replace(decode(content, Processed), pixel_values=pixels)

    def close(self) -> None:
        for threads in (self._local, self._remote):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._workers is not None:
            self._workers.close()


def _read_image(source: Any, reader: SourceReader) -> tuple[bytes, bytes, int]:
    """Return an image's encoded bytes, its key in the cache, and how many pixels it has. Raises RequestError."""
    data = reader.encoded(source)
    if data is None:
        image_of_object(source, reader.param)
        raise RequestError("an image of a request is not encoded", reader.param)
    return data, image_key(source, data), pixels_of(data, reader.limits, reader.param)


def _is_remote(source: Any) -> bool:
    sources = source.frames if isinstance(source, Video) else [source]
    return any(isinstance(each, MediaUrl) and each.url[:4].lower() == "http" for each in sources)
