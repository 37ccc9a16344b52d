"""Images from all sources of a request: encoded bytes, data: URIs, local files, URLs, PIL images, arrays.

Job: convert one picture to an 8-bit RGB image, or raise an error with the remedy. Owns: the supported formats, and the
limits. Does not know: models, prompts.

No input is trusted. The size of a picture is known before its pixels are decoded. Formats are detected from the
content. Pictures that cost more time than their size suggests (progressive JPEGs of many scans) are refused.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import stat
import time
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote, urlsplit

from weft.errors import RequestError
from weft.multimodal.fetch import FetchPolicy, fetch

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")

Background = Literal["white", "checkerboard"]
"""The background of transparent pixels: white, or squares of 8 x 8 pixels in two greys, the lighter one first."""

_MAX_SCANS = 50
"""Upper bound on the scans of a JPEG. Progressive ones have about ten; each costs a pass over all pixels."""

_ALLOWED = "allowed are PNG, JPEG, WebP and GIF images of one frame and 8 bits per channel"

_MAGIC = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF", b"GIF8")
_KINDS = (
    (b"%PDF", "a PDF"),
    (b"<svg", "an SVG"),
    (b"<?xml", "XML"),
    (b"<!DOC", "HTML"),
    (b"<html", "HTML"),
    (b"II*\0", "a TIFF"),
    (b"MM\0*", "a TIFF"),
    (b"BM", "a BMP"),
    (b"PK\3\4", "a ZIP archive"),
    (b"\x1f\x8b", "gzip data"),
)


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Limits on the cost of a picture, and rules for its source.

    Attributes:
        local_path: folder whose files may be named as ``file://`` URLs; None: none.
        domains: see ``FetchPolicy``; empty: no downloads.
        max_bytes: upper bound on the size of an encoded picture.
        max_pixels: upper bound on the pixels of a decoded picture.
        max_video_pixels: upper bound on the pixels of all decoded frames of a video.
        fetch_timeout_s: seconds for all downloads of one prompt.
    """

    local_path: Path | None = None
    domains: tuple[str, ...] = ()
    max_bytes: int = 32 << 20
    max_pixels: int = 1 << 26
    max_video_pixels: int = 1 << 29
    fetch_timeout_s: float = 15.0


@dataclass(frozen=True, slots=True)
class MediaUrl:
    """A picture named by a URL. ``detail``: as in the OpenAI API, ``low`` for a small copy."""

    url: str
    detail: str = "auto"


class SourceReader:
    """Reads the pictures of one prompt.

    Attributes:
        param: the request's field that errors blame.
    """

    def __init__(self, limits: ReadLimits, param: str) -> None:
        self.limits = limits
        self.param = param
        self._fetch_s = limits.fetch_timeout_s

    def encoded(self, source: Any) -> bytes | None:
        """The encoded bytes of a picture; None if it is decoded already. May block. Raises RequestError."""
        if isinstance(source, MediaUrl):
            return self._url(source.url)
        if isinstance(source, Path):
            return read_file(source, self.limits.max_bytes, self.param)
        return bytes(source) if isinstance(source, (bytes, bytearray, memoryview)) else None

    def _url(self, url: str) -> bytes:
        """Resolve a ``data:``, ``file:``, ``http:`` or ``https:`` URL."""
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            return _data_uri(url, self.limits.max_bytes, self.param)
        if scheme == "file":
            return _local_file(url, self.limits, self.param)
        if scheme in ("http", "https"):
            return self._fetched(url)
        raise RequestError(
            f"the image URL begins with {url[:20]!r}; give 'data:image/png;base64,…', or an https:// or file:// URL "
            "where the server allows them",
            self.param,
        )

    def _fetched(self, url: str) -> bytes:
        began = time.monotonic()
        try:
            return fetch(url, FetchPolicy(self.limits.domains, self.limits.max_bytes, self._fetch_s), self.param)
        finally:
            self._fetch_s = max(0.0, self._fetch_s - (time.monotonic() - began))


def _too_large(limit: int, param: str) -> RequestError:
    return RequestError(f"an image is larger than the {limit:,} bytes that are read; send a smaller one", param)


def _data_uri(url: str, limit: int, param: str) -> bytes:
    head, comma, data = url.partition(",")
    kind, *parameters = head[len("data:") :].lower().split(";")
    if not comma or "base64" not in parameters or not kind.startswith("image/"):
        raise RequestError(
            f"the data: URI begins with {head[:60]!r}; give data:image/png;base64,… (or jpeg, webp, gif)", param
        )
    return decode_base64(data, limit, param)


def decode_base64(data: str, limit: int, param: str) -> bytes:
    """Decode a base64 text. Raises RequestError if it is too long or invalid."""
    if len(data) // 4 * 3 > limit + 3:
        raise _too_large(limit, param)
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"an image is not valid base64 ({error}); encode its bytes again", param) from error


def _local_file(url: str, limits: ReadLimits, param: str) -> bytes:
    """Resolve a local path. Symbolic links are followed first, and must not lead out of the allowed folder."""
    parts = urlsplit(url)
    given = unquote(parts.path)
    if limits.local_path is None:
        raise RequestError(
            "file:// URLs are not read here unless --allowed-local-media-path names their folder; send the image as a "
            "data: URI",
            param,
        )
    if parts.netloc not in ("", "localhost") or not given.startswith("/") or "\0" in given:
        raise RequestError(f"{url[:200]!r} is not a file:///absolute/path URL", param)
    path = Path(os.path.realpath(given))
    if not path.is_relative_to(os.path.realpath(limits.local_path)):
        raise RequestError(f"{url[:200]!r} is not under the folder of --allowed-local-media-path; move it there", param)
    return read_file(path, limits.max_bytes, param)


def read_file(path: Path, limit: int, param: str) -> bytes:
    """The content of a regular file. Raises RequestError."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise RequestError(f"{str(path)!r} is not a file; name an image file", param)
            content = file.read(limit + 1)
    except OSError as error:
        raise RequestError(f"{str(path)!r} cannot be read ({error.strerror}); name an image file", param) from error
    if len(content) > limit:
        raise _too_large(limit, param)
    return content


def decode_image(data: bytes, limits: ReadLimits, param: str, background: Background = "white") -> Image:
    """Decode a picture to an RGB image, rotated as its EXIF data says, with transparency over the background.

    Raises:
        RequestError: the data is no image of a supported format, or is damaged, animated, 16-bit, or too large.
    """
    image = _opened(data, limits, param)
    try:
        image.load()
        return to_rgb(_turned(image), param, background)
    except RequestError:
        raise
    except Exception as error:
        raise _damaged(error, param) from error


def pixels_of(data: bytes, limits: ReadLimits, param: str) -> int:
    """Return how many pixels an encoded picture has, without decoding them. Raises RequestError as ``decode_image``."""
    image = _opened(data, limits, param)
    return image.width * image.height


def _opened(data: bytes, limits: ReadLimits, param: str) -> Image:
    """Open a picture without decoding any pixel. Raises RequestError."""
    image_module = pillow()
    if len(data) > limits.max_bytes:
        raise _too_large(limits.max_bytes, param)
    try:
        image: Image = image_module.open(io.BytesIO(data), formats=FORMATS)
    except image_module.UnidentifiedImageError as error:
        if data.startswith(_MAGIC):
            raise _damaged(ValueError("its header is not valid"), param) from error
        raise RequestError(f"{_described(data)} is not an image that is read here; {_ALLOWED}", param) from error
    except Exception as error:  # each format fails in its own way; Pillow has a bound on pixels as well
        raise _damaged(error, param) from error
    _check_header(image, data, limits, param)
    return image


@cache
def pillow() -> Any:
    """Import ``PIL.Image`` without warnings, since problems of a caller's picture do not belong in the log."""
    from PIL import Image

    warnings.filterwarnings("ignore", module=r"PIL\.")
    return Image


def _damaged(error: Exception, param: str) -> RequestError:
    reason = (str(error) or type(error).__name__).splitlines()[0][:200]
    return RequestError(f"an image is damaged or cut off ({reason}); send it again", param)


def _described(data: bytes) -> str:
    """Describe what data seems to be."""
    if not data:
        return "nothing (0 bytes)"
    start = data[:64].lstrip()
    known = next((name for magic, name in _KINDS if start.startswith(magic)), None)
    if known is None and data[4:8] == b"ftyp":
        known = "a video, HEIC or AVIF file"
    return known or f"data that begins with {data[:8]!r}"


def _check_header(image: Image, data: bytes, limits: ReadLimits, param: str) -> None:
    """Check what is known before any pixel is decoded."""
    check_size(image.size, limits, param)
    if image.format != "MPO" and getattr(image, "is_animated", False):  # (MPO is a JPEG with previews)
        raise RequestError(f"an image is animated ({image.format}); send one frame, or the frames as a video", param)
    if image.format == "PNG" and data[24] > 8:
        raise _too_deep(f"{data[24]} bits per channel", param)
    if image.format in ("JPEG", "MPO") and data.count(b"\xff\xda") > _MAX_SCANS:
        raise RequestError(f"a JPEG has more than {_MAX_SCANS} scans; save it as a baseline JPEG", param)


def check_size(size: tuple[int, int], limits: ReadLimits, param: str) -> None:
    """Raise RequestError if there are no pixels, or too many. ``size``: width and height."""
    width, height = size
    if width < 1 or height < 1:
        raise RequestError(f"an image has {width} x {height} pixels; it needs at least one", param)
    if width * height > limits.max_pixels:
        raise RequestError(
            f"an image has {width:,} x {height:,} pixels, more than the {limits.max_pixels:,} that are decoded; send a "
            "smaller one",
            param,
        )


def check_video_size(num_frames: int, size: tuple[int, int], limits: ReadLimits, param: str) -> None:
    """Raise RequestError if the frames of a video have too many pixels together. ``size``: width and height."""
    width, height = size
    if num_frames * width * height > limits.max_video_pixels:
        raise RequestError(
            f"a video has {num_frames} frames of {width:,} x {height:,} pixels, together more than the "
            f"{limits.max_video_pixels:,} that are decoded; send fewer or smaller ones",
            param,
        )


def _too_deep(what: str, param: str) -> RequestError:
    return RequestError(f"an image has {what}; {_ALLOWED}: convert it to 8 bits per channel", param)


def _turned(image: Image) -> Image:
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # the picture is fine even if its EXIF data is broken
        return image


def to_rgb(image: Image, param: str, background: Background = "white") -> Image:
    """Convert a decoded image to RGB, with transparency over the background. Raises RequestError for more than 8
    bits."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        raise _too_deep(f"more than 8 bits per channel (mode {image.mode})", param)
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        from PIL.Image import alpha_composite, new

        layer = image.convert("RGBA")
        if background == "checkerboard":
            return _over_checkerboard(layer)
        return alpha_composite(new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("RGB")


def _over_checkerboard(layer: Image) -> Image:
    """The image over a checkerboard, rounded as Inkling 2's processor does."""
    import numpy as np

    pixels = np.asarray(layer)
    rows, columns = (np.arange(side) // 8 for side in pixels.shape[:2])
    under = np.where((rows[:, None] + columns) % 2 == 0, 204, 153).astype(np.uint16)
    alpha = pixels[:, :, 3].astype(np.uint16)
    under *= 255 - alpha
    over = np.stack([(pixels[:, :, i] * alpha + under + 127) // 255 for i in range(3)], axis=-1)  # at most 65,152
    return pillow().fromarray(over.astype(np.uint8))
