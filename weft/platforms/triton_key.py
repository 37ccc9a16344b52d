"""Triton's key of its own version, kept between starts because it takes long to compute.

Triton looks a compiled kernel up under a hash of, among other things, its compiler: 400 MB of library, read and hashed
in every process, 0.3 s and more. Whether the files are still those of the last start, their sizes and times of
modification tell; then the key is the same, and is read from a file whose name holds a hash of these.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from pathlib import Path

from weft.platforms.triton_version import is_known

_HASHED = ("_C/libtriton*", "runtime/cache.py", "compiler/**/*.py", "backends/**/*.py", "language/**/*.py")
"""What ``triton_key`` reads, below Triton's folder."""


def remember_triton_key() -> None:
    """Make Triton use the remembered key from now on; the first start on a machine computes and keeps it."""
    import triton
    from triton import knobs
    from triton.runtime import cache

    if not is_known(triton.__version__):
        return  # what another version hashes is not known here
    kept = Path(knobs.cache.dir) / f"weft-triton-key-{fingerprint(Path(triton.__file__).parent)}"
    key = ""
    with contextlib.suppress(OSError):
        key = kept.read_text()
    if not key:
        key = cache.triton_key()
        _keep(key, kept)
    cache.triton_key = lambda: key


def fingerprint(folder: Path) -> str:
    """Names the state of Triton's files in ``folder``."""
    files = sorted(path for pattern in _HASHED for path in folder.glob(pattern))
    states = [(str(path), (state := path.stat()).st_size, state.st_mtime_ns) for path in files]
    return hashlib.sha256(repr(states).encode()).hexdigest()[:32]


def _keep(key: str, file: Path) -> None:
    """Write all of it at once, for processes that start at the same time; without a place to write, keep nothing."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=file.name, delete=False) as draft:
            draft.write(key)
        Path(draft.name).replace(file)
