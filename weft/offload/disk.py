"""Files of the disk tier: one page or state each, named after its content.

Job: write, read and check files, and list those of a folder. Owns: the format. Does not know: which files are kept, or
who asks for them.

A file is written under a temporary name and renamed, so that a crash leaves whole files or files that are ignored. Its
header repeats its name and the fingerprint of the engine that wrote it. Checksums cover header and content. A file that
differs in anything is rejected with a reason. The header has a fixed size, so that one call reads or writes a file::

    magic, version | length and checksum of the header | header (JSON) | zeros up to 1,024 bytes | content

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

MAGIC, VERSION = b"WEFTTIER", 2
_START = struct.Struct("<8sIII")
_HEAD_BYTES = 1024
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
    text = json.dumps(
        {"name": name, "fingerprint": fingerprint, "bytes": content.nbytes, "checksum": zlib.crc32(content)}
    ).encode()
    head = (_START.pack(MAGIC, VERSION, len(text), zlib.crc32(text)) + text).ljust(_HEAD_BYTES, b"\0")
    assert len(head) == _HEAD_BYTES, "the name of a file is too long"
    temporary = path.with_name(f"{name}.{os.getpid()}{TEMPORARY}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("wb", buffering=0) as file:
            _write_whole(file.fileno(), head, content)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _write_whole(file: int, head: bytes, content: memoryview) -> None:
    done = os.writev(file, [head, content])
    while done < len(head) + content.nbytes:  # the system writes 2 GiB at a time
        done += os.writev(file, [head[done:], content.cast("B")[max(0, done - len(head)) :]])


def read(folder: Path, fingerprint: str, name: str, content: memoryview) -> None:
    """Read one file into ``content``, which may be changed even if the file is rejected.

    Raises:
        RejectedFile: the file is missing, torn, changed, or was written by another engine.
    """
    try:
        file = os.open(f"{folder}/{fingerprint}/{name[:2]}/{name}", os.O_RDONLY)  # as ``path_of``, and quicker
        try:
            _read(file, fingerprint, name, content)
            os.utime(file)
        finally:
            os.close(file)
    except OSError as error:
        raise RejectedFile(f"it cannot be read: {error}") from error


def _read(file: int, fingerprint: str, name: str, content: memoryview) -> None:
    head = bytearray(_HEAD_BYTES)
    done = os.preadv(file, [head, content], 0)
    header = _header_of(head, done)
    if (header["name"], header["fingerprint"]) != (name, fingerprint):
        raise RejectedFile("it holds something else")
    if header["bytes"] != content.nbytes:
        raise RejectedFile(f"it has {header['bytes']} bytes of content instead of {content.nbytes}")
    while done < _HEAD_BYTES + content.nbytes:  # the system reads 2 GiB at a time
        more = os.preadv(file, [content.cast("B")[done - _HEAD_BYTES :]], done)
        if not more:
            raise RejectedFile("it ends too early")
        done += more
    if zlib.crc32(content) != header["checksum"]:
        raise RejectedFile("its content does not match its checksum")


def _header_of(head: bytes | bytearray, num_bytes: int) -> dict[str, Any]:
    """The header in the first bytes of a file, of which ``num_bytes`` were read."""
    if num_bytes < _HEAD_BYTES:
        raise RejectedFile("it ends too early")
    magic, version, length, checksum = _START.unpack_from(head)
    if magic != MAGIC:
        raise RejectedFile("it is no file of a tier")
    if version != VERSION:
        raise RejectedFile(f"it has version {version} of the format instead of {VERSION}")
    text = head[_START.size : _START.size + length]
    if zlib.crc32(text) != checksum or head.count(0, _START.size + length) != _HEAD_BYTES - _START.size - length:
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
            head = file.read(_HEAD_BYTES)
        content = memoryview(bytearray(_header_of(head, len(head))["bytes"]))
        used = path.stat()
    except OSError as error:
        raise RejectedFile(f"it cannot be read: {error}") from error
    read(path.parents[2], path.parents[1].name, path.name, content)
    os.utime(path, ns=(used.st_atime_ns, used.st_mtime_ns))
    if used.st_size != _HEAD_BYTES + content.nbytes:
        raise RejectedFile("there is something after its content")


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
