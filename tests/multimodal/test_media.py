"""Pictures from any source: how each form is read, and the errors for refused pictures."""

from __future__ import annotations

import contextlib
import io
import os
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.pictures import data_uri, encoded, picture
from weft.errors import RequestError
from weft.multimodal.fetch import FetchPolicy
from weft.multimodal.items import MediaItem, cache_token_ids
from weft.multimodal.media import MediaUrl, ReadLimits, SourceReader, decode_image

LIMITS = ReadLimits(max_bytes=1 << 20, max_pixels=1 << 20)
PARAM = "messages"


def decode(data: bytes, limits: ReadLimits = LIMITS) -> Image.Image:
    return decode_image(data, limits, PARAM)


def read(url: str, limits: ReadLimits = LIMITS) -> bytes | None:
    return SourceReader(limits, PARAM).encoded(MediaUrl(url))


class TestWhatIsRead:
    @pytest.mark.parametrize("kind", ["PNG", "WEBP"])
    def test_lossless(self, kind: str) -> None:
        image = picture(23, 17)
        found = decode(encoded(image, kind, **({"lossless": True} if kind == "WEBP" else {})))
        assert found.mode == "RGB" and found.tobytes() == image.tobytes()

    @pytest.mark.parametrize("options", [{}, {"progressive": True}, {"optimize": True}, {"subsampling": 2}])
    def test_jpeg(self, options: dict[str, object]) -> None:
        image = picture(64, 48)
        found = np.asarray(decode(encoded(image, "JPEG", quality=95, **options)), np.int16)
        assert np.abs(found - np.asarray(image, np.int16)).mean() < 4

    @pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK"])
    def test_other_modes(self, mode: str) -> None:
        image = picture(16, 16).convert(mode)
        found = decode(
            encoded(image, "JPEG" if mode == "CMYK" else "PNG", **({"quality": 100} if mode == "CMYK" else {}))
        )
        wanted = np.asarray(image.convert("RGB"), np.int16)
        assert found.mode == "RGB" and np.abs(np.asarray(found, np.int16) - wanted).mean() < 4

    @pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
    def test_transparency_lies_over_white(self, mode: str) -> None:
        if mode == "P":
            image = Image.new("P", (4, 4), 1)
            image.putpalette([0, 0, 0, 200, 0, 0])
            data = encoded(image, "PNG", transparency=1)
        else:
            data = encoded(Image.new(mode, (4, 4), 0), "PNG")
        assert decode(data).getpixel((0, 0)) == (255, 255, 255)

    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_exif_turns(self, orientation: int) -> None:
        """The picture stands upright, whichever of the eight ways its camera was held."""
        upright = picture(20, 12)
        undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}
        stored = upright if orientation == 1 else upright.transpose(Image.Transpose(undo[orientation]))
        exif = Image.Exif()
        exif[0x0112] = orientation
        assert decode(encoded(stored, "PNG", exif=exif.tobytes())).tobytes() == upright.tobytes()

    @pytest.mark.filterwarnings("ignore:Corrupt EXIF")
    def test_broken_exif_is_no_reason_to_refuse(self) -> None:
        data = encoded(picture(), "PNG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
        assert decode(data).size == (24, 16)

    def test_a_jpeg_with_previews(self) -> None:
        """Telephones write MPO files: the first picture is meant."""
        data = encoded(picture(16, 16), "MPO", save_all=True, append_images=[picture(8, 8)])
        assert decode(data).size == (16, 16)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(width: int, height: int, depth: int = 8, color: int = 2, rows: bytes = b"") -> bytes:
    """A PNG whose header says anything."""
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def animated(kind: str) -> bytes:
    return encoded(picture(), kind, save_all=True, append_images=[picture(seed=1)], duration=100)


def scans(number: int) -> bytes:
    """A progressive JPEG whose last scan stands there so often: each costs a pass over all pixels."""
    data = encoded(picture(64, 64), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * number + b"\xff\xd9"


HOSTILE = {
    "nothing": (b"", "nothing .0 bytes"),
    "text": (b"hello world", "data that begins with b'hello wo' is not an image"),
    "a PDF": (b"%PDF-1.7\n", "a PDF is not an image"),
    "an SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>", "an SVG"),
    "a TIFF": (encoded(picture(), "TIFF"), "a TIFF is not an image"),
    "a BMP": (encoded(picture(), "BMP"), "a BMP is not an image"),
    "an MP4": (b"\0\0\0\x18ftypmp42" + bytes(40), "a video, HEIC or AVIF file"),
    "EPS runs Ghostscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not an image"),
    "cut off PNG": (encoded(picture(64, 64))[:-40], "damaged or cut off"),
    "cut off JPEG": (encoded(picture(64, 64), "JPEG")[:-200], "damaged or cut off"),
    "cut off WebP": (encoded(picture(64, 64), "WEBP")[:-40], "damaged or cut off|not an image"),
    "header alone": (encoded(picture())[:33], "damaged or cut off|not an image"),
    "wrong chunk": (encoded(picture()).replace(b"IDAT", b"IDAU"), "damaged or cut off .its header"),
    "bomb": (png_of(50_000, 50_000), "damaged or cut off .*bomb|more than the"),
    "wide bomb": (png_of(2**31 - 1, 1), "damaged or cut off|more than the"),
    "many pixels": (png_of(1025, 1024), "1,025 x 1,024 pixels, more than the 1,048,576 that are decoded"),
    "no pixels": (png_of(0, 5), "damaged or cut off"),
    "text bomb": (
        encoded(picture())[:33] + chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 24))) + encoded(picture())[33:],
        "damaged",
    ),
    "16 bits": (encoded(Image.new("I;16", (4, 4))), "16 bits per channel; allowed .* convert it to 8"),
    "16 bits RGB": (png_of(2, 1, depth=16, rows=b"\0" + bytes(12)), "16 bits per channel"),
    "animated GIF": (animated("GIF"), "animated .GIF.; send one frame"),
    "animated WebP": (animated("WEBP"), "animated .WEBP."),
    "animated PNG": (animated("PNG"), "animated .PNG."),
    "scans": (scans(200), "more than 50 scans"),
    "large": (encoded(picture()) + bytes(1 << 20), "larger than the 1,048,576 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pictures(name: str) -> None:
    data, error = HOSTILE[name]
    with pytest.raises(RequestError, match=error) as caught:
        decode(data)
    assert caught.value.param == PARAM


def test_changed_bytes_never_break_anything() -> None:
    """Whatever becomes of a file on its way: an image, or an error in words."""
    rng = np.random.default_rng(0)
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        original = encoded(picture(16, 16), kind)
        for _ in range(60):
            data = bytearray(original)
            for place in rng.integers(0, len(data), 3):
                data[place] = rng.integers(0, 256)
            with contextlib.suppress(RequestError):
                assert decode(bytes(data)).mode == "RGB"


def test_what_one_prompt_fetches_has_one_limit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[float] = []

    def fetch(url: str, policy: FetchPolicy, param: str) -> bytes:
        left.append(policy.timeout_s)
        time.sleep(0.02)
        return b"x"

    monkeypatch.setattr("weft.multimodal.media.fetch", fetch)
    reader = SourceReader(ReadLimits(fetch_timeout_s=0.03), PARAM)
    for _ in range(3):
        reader.encoded(MediaUrl("https://a.example/x.png"))
    assert left[0] == 0.03 and left[1] <= 0.01 + 1e-9 and left[2] == 0


class TestUrls:
    def test_data(self) -> None:
        data = encoded(picture())
        uri = data_uri(data)
        assert read(uri) == data
        assert read(uri.replace("data:image/png;", "DATA:image/PNG;charset=x;")) == data
        assert read(uri[:60] + "\n" + uri[60:]) == data, "as encoders that break lines write it"

    @pytest.mark.parametrize(
        ("url", "error"),
        [
            ("", "begins with ''; give 'data:image/png;base64"),
            ("x.png", "begins with 'x.png'"),
            ("/etc/passwd", "begins with '/etc/passwd'"),
            ("ftp://x/y.png", "begins with 'ftp://"),
            ("gopher://127.0.0.1:6379/_x", "begins with 'gopher"),
            ("data:image/png,abc", "data: URI begins with 'data:image/png'; give data:image/png;base64"),
            ("data:;base64,YQ==", "data: URI begins with 'data:;base64'"),
            ("data:application/pdf;base64,YQ==", "data: URI begins with"),
            ("data:image/png;base64", "data: URI begins with"),
            ("data:image/png;base64,Y", "not valid base64"),
            ("data:image/png;base64,Yé==", "not valid base64"),
            ("data:image/png;base64," + "A" * (1 << 21), "larger than the 1,048,576 bytes"),
            ("file:///etc/passwd", "not read here unless --allowed-local-media-path"),
            ("https://example.com/x.png", "fetches no media unless --allowed-media-domains names its host"),
            ("HTTP://example.com/x.png", "fetches no media"),
        ],
    )
    def test_refused(self, url: str, error: str) -> None:
        with pytest.raises(RequestError, match=error):
            read(url)


class TestLocalFiles:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "allowed"
        (folder / "inner dir").mkdir(parents=True)
        (folder / "inner dir" / "a.png").write_bytes(b"inside")
        (tmp_path / "secret.png").write_bytes(b"outside")
        (tmp_path / "allowed-too").mkdir()
        (tmp_path / "allowed-too" / "b.png").write_bytes(b"outside")
        (folder / "link.png").symlink_to(tmp_path / "secret.png")
        (folder / "good.png").symlink_to(folder / "inner dir" / "a.png")
        os.mkfifo(folder / "pipe.png")
        return folder

    def test_allowed(self, folder: Path) -> None:
        limits = ReadLimits(local_path=folder)
        for name in ("inner%20dir/a.png", "./inner%20dir/../inner%20dir/a.png", "good.png"):
            assert read(f"file://{folder}/{name}", limits) == b"inside"
        assert read(f"file://localhost{folder}/good.png", limits) == b"inside"

    @pytest.mark.parametrize(
        ("name", "error"),
        [
            ("../secret.png", "not under the folder"),
            ("%2e%2e/secret.png", "not under the folder"),
            ("../missing.png", "not under the folder"),
            ("../allowed-too/b.png", "not under the folder"),
            ("link.png", "not under the folder"),
            ("missing.png", "cannot be read"),
            ("pipe.png", "is not a file"),
            ("inner%20dir", "is not a file|cannot be read"),
            ("a%00.png", "is not a file:///absolute/path URL"),
        ],
    )
    def test_refused(self, folder: Path, name: str, error: str) -> None:
        with pytest.raises(RequestError, match=error):
            read(f"file://{folder}/{name}", ReadLimits(local_path=folder))
        with pytest.raises(RequestError, match="is not a file:///absolute/path URL"):
            read(f"file://elsewhere{folder}/good.png", ReadLimits(local_path=folder))


def test_a_picture_of_a_program_may_be_open_already() -> None:
    """A file that is open is read as the file is, whatever its mode."""
    image = Image.open(io.BytesIO(encoded(picture(9, 9).convert("P"))))
    from weft.multimodal.media import to_rgb

    assert to_rgb(image, PARAM).mode == "RGB"


def test_keys_tell_items_apart() -> None:
    """Every run of placeholders has its item's id."""
    item = MediaItem("video", b"x" * 32, [(1, 2), (4, 2)], (2, 3, 4), b"")
    own = item.cache_token_id
    assert own < 0 and cache_token_ids([5] * 7, [item]) == [5, own, own, 5, own, own, 5]
