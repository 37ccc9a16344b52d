"""The worker process for images and videos: ``python -m weft.server.media_worker``, see ``worker.serve``."""

from dataclasses import replace

import msgspec

from weft.multimodal.patch_maker import PatchMaker
from weft.server.worker import Result, decode, serve


class NewImage(msgspec.Struct, frozen=True, tag="image"):
    """Process the encoded image in the blob of this message; see ``PatchMaker.image``."""

    is_low: bool
    param: str


class NewVideo(msgspec.Struct, frozen=True, tag="video"):
    """Process the encoded frames of a video; see ``PatchMaker.video``."""

    frames: list[bytes]
    times: tuple[float, ...]
    param: str


class Task:
    def __init__(self, setup: bytes) -> None:
        self._maker = decode(setup, PatchMaker)

    def __call__(self, content: bytes, blob: bytes) -> Result:
        task = decode(content, NewImage | NewVideo)
        if isinstance(task, NewImage):
            processed = self._maker.image(blob, task.is_low, task.param)
        else:
            processed = self._maker.video(task.frames, task.times, task.param)
        return replace(processed, pixel_values=b""), processed.pixel_values


if __name__ == "__main__":
    serve(Task)
