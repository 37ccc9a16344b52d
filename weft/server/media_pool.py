"""Images and videos of requests, read off the event loop.

Prompts whose images have to be downloaded wait in threads of their own, so that a slow host keeps nobody else waiting.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from weft.multimodal.media import MediaUrl
from weft.multimodal.parts import Media
from weft.multimodal.processor import MAX_CONCURRENT, MediaProcessor, Processed
from weft.multimodal.video import Video

MAX_DOWNLOADS = 8
"""Prompts whose images are downloaded at a time."""


class MediaPool:
    """Threads that read images. They start when they are needed."""

    def __init__(self) -> None:
        self._local = ThreadPoolExecutor(MAX_CONCURRENT, thread_name_prefix="images")
        self._remote = ThreadPoolExecutor(MAX_DOWNLOADS, thread_name_prefix="downloads")

    async def process(self, processor: MediaProcessor, media: Media, room: int) -> list[Processed]:
        """See ``MediaProcessor.process``. Raises RequestError."""
        if not media:
            return []
        processor.check_counts(media, "messages")
        threads = self._remote if _is_remote(media) else self._local
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads, processor.process, media, room, "messages")

    def close(self) -> None:
        for threads in (self._local, self._remote):
            threads.shutdown(wait=False, cancel_futures=True)


def _is_remote(media: Media) -> bool:
    sources = [source for kind in media.values() for source in kind]
    sources += [frame for source in sources if isinstance(source, Video) for frame in source.frames]
    return any(isinstance(source, MediaUrl) and source.url[:4].lower() == "http" for source in sources)
