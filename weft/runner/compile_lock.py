"""One process at a time compiles a kernel.

Job: the locks that ranks and replicas take, which start together and miss the same kernels. Owns: an empty file beside
Triton's cache, of which each kernel locks one byte, so that a process that ends leaves nothing locked. Does not know:
how a kernel is compiled.

Where files cannot be locked, every process compiles for itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from triton import knobs

logger = logging.getLogger(__name__)

LIMIT_S = 60.0
"""Seconds. The slowest kernels take three; a process that has ended holds nothing."""

_LOOK_S = 0.02
_NAME = "weft-compiling.lock"
_FLOCK = "@hhqqi4x"
"""C's ``struct flock``: type, whence, start, length, process id."""


@contextmanager
def held(src: Any, options: Mapping[str, Any]) -> Iterator[bool]:
    """Hold the lock of the kernel that ``triton.compile(src, **options)`` makes. False: another process has it."""
    try:
        file = _opened()
    except OSError:
        yield True
        return
    with file:  # closing it unlocks
        is_mine = True
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _place(src, options))
        except (BlockingIOError, PermissionError):  # either may say that it is locked
            is_mine = False
        except OSError:
            pass
        yield is_mine


def wait(src: Any, options: Mapping[str, Any], limit_s: float = LIMIT_S) -> bool:
    """Until no other process holds the lock. False, and the caller had better compile itself: nothing can be locked
    after all, or another process has held it for ``limit_s`` seconds, which a warning names."""
    place, deadline = _place(src, options), time.monotonic() + limit_s
    try:
        with _opened() as file:
            while True:
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                    return True
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        holder = _holder(file, place)
                        logger.warning(
                            "process %s has been compiling a kernel for %g s; it is compiled here too", holder, limit_s
                        )
                        return False
                time.sleep(_LOOK_S)
    except OSError:
        return False


def _holder(file: IO[str], place: int) -> int:
    """The id of the process that has locked the byte; 0 if it is not known. Raises OSError."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
    return int(struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))[-1])


def _place(src: Any, options: Mapping[str, Any]) -> int:
    """The kernel's byte."""
    return int(hashlib.sha256(f"{src.hash()} {dict(options)}".encode()).hexdigest()[:15], 16)


def _opened() -> IO[str]:
    folder = Path(knobs.cache.dir)
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / _NAME).open("a")
