"""Files of the disk tier: one page or state each, named after its content.

Job: write, read and check files, and list those of a folder. Owns: the format. Does not know: which files are kept, or
who asks for them.

A file is written under a temporary name and renamed, so that a crash leaves whole files or files that are ignored. Its
header repeats its name and the fingerprint of the engine that wrote it. Checksums cover header and content. A file that
differs in anything is rejected with a reason::

    magic, version | length and checksum of the header | header (JSON) | content

Files lie in ``FOLDER/FINGERPRINT/xx/NAME``, where ``xx`` are the first digits of the name. With tensor parallelism each
rank has files of its own, under a fingerprint that also says the rank and the number of ranks.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAGIC, VERSION = b"WEFTTIER", 1
_START = struct.Struct("<8sIII")
_SUFFIXES = (".page", ".state")
TEMPORARY = ".tmp"


class RejectedFile(Exception):
    """Raised for a file that must not be used. The message is the reason."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file in the folder: its path, its bytes and the time of its last use."""

    path: Path
    num_bytes: int
    used: float


def share_of(fingerprint: str, rank: int, num_ranks: int) -> str:
    """The fingerprint of the files of one rank."""
    return fingerprint if num_ranks == 1 else f"{fingerprint}-{rank}of{num_ranks}"


def path_of(folder: Path, fingerprint: str, name: str) -> Path:
    return folder / fingerprint / name[:2] / name


def write(folder: Path, fingerprint: str, name: str, content: memoryview) -> None:
    """Write one file, whole or not at all.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    path = path_of(folder, fingerprint, name)
    header = json.dumps(
        {"name": name, "fingerprint": fingerprint, "bytes": content.nbytes, "checksum": zlib.crc32(content)}
    ).encode()
    temporary = path.with_name(f"{name}.{os.getpid()}{TEMPORARY}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("wb") as file:
            file.write(_START.pack(MAGIC, VERSION, len(header), zlib.crc32(header)))
            file.write(header)
            file.write(content)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read(folder: Path, fingerprint: str, name: str, content: memoryview) -> None:
    """Read one file into ``content``, which may be changed even if the file is rejected.

    Raises:
        RejectedFile: the file is missing, torn, changed, or was written by another engine.
    """
    path = path_of(folder, fingerprint, name)
    try:
        with path.open("rb") as file:
            header = _read_header(file)
            if (header["name"], header["fingerprint"]) != (name, fingerprint):
                raise RejectedFile("it holds something else")
            if header["bytes"] != content.nbytes:
                raise RejectedFile(f"it has {header['bytes']} bytes of content instead of {content.nbytes}")
            if file.readinto(content) != content.nbytes:
                raise RejectedFile("it ends too early")
            if zlib.crc32(content) != header["checksum"]:
                raise RejectedFile("its content does not match its checksum")
        os.utime(path)
    except OSError as error:
        raise RejectedFile(f"it cannot be read: {error}") from error


def _read_header(file: Any) -> dict[str, Any]:
    start = file.read(_START.size)
    if len(start) < _START.size:
        raise RejectedFile("it ends too early")
    magic, version, length, checksum = _START.unpack(start)
    if magic != MAGIC:
        raise RejectedFile("it is no file of a tier")
    if version != VERSION:
        raise RejectedFile(f"it has version {version} of the format instead of {VERSION}")
    text = file.read(min(length, 1 << 16))
    if len(text) != length or zlib.crc32(text) != checksum:
        raise RejectedFile("its header does not match its checksum")
    header: dict[str, Any] = json.loads(text)
    return header


def check(path: Path) -> None:
    """Check a file of any engine.

    Raises:
        RejectedFile: the file must not be used.
    """
    try:
        with path.open("rb") as file:
            header = _read_header(file)
        content = memoryview(bytearray(header["bytes"]))
    except OSError as error:
        raise RejectedFile(f"it cannot be read: {error}") from error
    used = path.stat()
    read(path.parents[2], path.parents[1].name, path.name, content)
    os.utime(path, ns=(used.st_atime_ns, used.st_mtime_ns))
    if used.st_size != path.stat().st_size or _content_end(path, header) != used.st_size:
        raise RejectedFile("there is something after its content")


def _content_end(path: Path, header: dict[str, Any]) -> int:
    with path.open("rb") as file:
        length = _START.unpack(file.read(_START.size))[2]
    return _START.size + int(length) + int(header["bytes"])


def files_of(folder: Path) -> Iterator[FoundFile]:
    """Files of one engine's folder (``FOLDER/FINGERPRINT``), in no order."""
    for part in sorted(folder.iterdir()) if folder.is_dir() else ():
        for entry in os.scandir(part) if part.is_dir() else ():
            if entry.name.endswith(_SUFFIXES):
                status = entry.stat()
                yield FoundFile(Path(entry.path), status.st_size, status.st_mtime)


def remove_torn(folder: Path) -> int:
    """Remove temporary files that dead processes left. Returns their number."""
    count = 0
    for path in folder.glob(f"*/*/*{TEMPORARY}"):
        process = path.name.removesuffix(TEMPORARY).rpartition(".")[2]
        if not process.isdecimal() or not _is_alive(int(process)):
            path.unlink(missing_ok=True)
            count += 1
    return count


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
