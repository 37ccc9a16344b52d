"""Images and videos in messages: content parts in the forms that clients send.

A text in a part is always a URL (``SourceReader`` decides which URLs are allowed), so no caller of a server can name a
file of the machine by its path. ``pathlib.Path`` and image objects can only come from a Python program.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.errors import RequestError
from weft.multimodal.items import Modality
from weft.multimodal.media import MediaUrl
from weft.multimodal.video import Video, checked_fps

Media = dict[Modality, list[Any]]
"""Sources by modality, each in the order of its placeholders; see ``MediaProcessor.process``."""

_IMAGES = {"image_url": "image_url", "input_image": "image_url", "image": "image", "image_pil": "image_pil"}
_VIDEOS = {"video_url": "video_url", "video": "video"}
_DETAILS = ("auto", "low", "high")
_FRAMES = "data:video/jpeg;base64,"


def media_part(part: Mapping[str, Any], where: str) -> tuple[Modality, Any] | None:
    """Read a content part. Returns its modality and source; None if it is neither an image nor a video.

    Args:
        where: the place of the part in error messages, such as ``messages[0].content``.

    Raises:
        RequestError: an image or video has no readable source.
    """
    kind = str(part.get("type"))
    if kind in _IMAGES:
        return "image", _image(part, kind, _IMAGES[kind], where)
    if kind in _VIDEOS:
        return "video", _video(part, kind, _VIDEOS[kind], where)
    return None


def _image(part: Mapping[str, Any], kind: str, name: str, where: str) -> Any:
    if part.get("file_id") is not None:
        raise RequestError(
            f"{where} names a file_id; this server stores no files: send the image as a data: URI", "messages"
        )
    source: Any = part.get(name)
    detail = part.get("detail")
    if isinstance(source, Mapping):
        source, detail = source.get("url"), source.get("detail", detail)
    if detail not in (None, *_DETAILS):
        raise RequestError(f"{where} has detail={str(detail)[:40]!r}; allowed are {', '.join(_DETAILS)}", "messages")
    if source is None or source == "":
        raise RequestError(f"{where} has a part of type {kind!r} without {name}", "messages")
    return MediaUrl(source, detail or "auto") if isinstance(source, str) else source


def _video(part: Mapping[str, Any], kind: str, name: str, where: str) -> Any:
    source: Any = part.get(name)
    fps = part.get("fps")
    if isinstance(source, Mapping):
        source, fps = source.get("url"), source.get("fps", fps)
    if source is None or source == "" or source == []:
        raise RequestError(f"{where} has a part of type {kind!r} without {name}", "messages")
    if isinstance(source, str):
        if not source.startswith(_FRAMES):
            raise RequestError(
                f"{where} has a video that begins with {source[:30]!r}; videos are read as frames: "
                f"'{_FRAMES}<frame>,<frame>,…', or a list of image URLs",
                "messages",
            )
        source = [f"data:image/jpeg;base64,{frame}" for frame in source[len(_FRAMES) :].split(",")]
    if isinstance(source, list) and all(isinstance(frame, str) for frame in source):
        return Video([MediaUrl(frame) for frame in source], checked_fps(fps, "messages"), is_sampled=True)
    return Video.of(source, "messages")


def prompt_media(given: Any) -> Media:
    """Read ``multi_modal_data`` of a prompt in Python: one source or a list of them by modality. A text is a path.

    Raises:
        RequestError: the value is not a dict, or a modality is unknown.
    """
    param = "multi_modal_data"
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not set(given) <= {"image", "video"}:
        what = sorted(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
        raise RequestError(f"multi_modal_data has {what}; it must be a dict with image, video or both", param)
    images, videos = given.get("image"), given.get("video")
    result: Media = {}
    if not isinstance(images, (list, tuple)):
        images = [] if images is None else [images]
    if images:
        result["image"] = [as_path(image) for image in images]
    if videos is not None:
        several = isinstance(videos, list) and bool(videos) and not _is_frame(videos[0])
        result["video"] = [_video_of(video, param) for video in (videos if several else [videos])]
    return result


def as_path(source: Any) -> Any:
    """Convert a source in Python, where a text is a path."""
    return Path(source) if isinstance(source, str) else source


def _is_frame(value: Any) -> bool:
    """Whether a list that begins with the value is one video, and not a list of videos."""
    return not isinstance(value, (Video, list, tuple)) and getattr(value, "ndim", 3) == 3


def _video_of(source: Any, param: str) -> Video:
    video = source if isinstance(source, Video) else Video.of(source, param)
    if not isinstance(video.frames, Sequence):
        return video
    return Video([as_path(frame) for frame in video.frames], video.fps, video.is_sampled)
