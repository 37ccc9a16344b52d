"""One process at a time compiles a kernel.

Job: the locks that ranks and replicas take, which start together and miss the same kernels. Owns: an empty file beside
Triton's cache, of which each kernel locks one byte, so that a process that ends leaves nothing locked. Does not know:
how a kernel is compiled.

Where files cannot be locked, every process compiles for itself.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from triton import knobs

_NAME = "weft-compiling.lock"


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


def wait(src: Any, options: Mapping[str, Any]) -> bool:
    """Until no other process holds the lock. False: nothing can be locked after all."""
    try:
        with _opened() as file:
            fcntl.lockf(file, fcntl.LOCK_EX, 1, _place(src, options))
    except OSError:
        return False
    return True


def _place(src: Any, options: Mapping[str, Any]) -> int:
    """The kernel's byte."""
    return int(hashlib.sha256(f"{src.hash()} {dict(options)}".encode()).hexdigest()[:15], 16)


def _opened() -> IO[str]:
    folder = Path(knobs.cache.dir)
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / _NAME).open("a")
