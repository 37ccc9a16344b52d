"""Triton's key of its own version, cached between starts.

Triton looks up compiled kernels under a hash that includes its compiler. Every process would read and hash 400 MB for
it, which takes 0.3 s or more. The cached key is valid while the sizes and modification times of Triton's files are
unchanged; the name of the cache file is a hash of these.
"""

import contextlib
import hashlib
import tempfile
from pathlib import Path

from weft.platforms.triton_version import is_known

_HASHED = ("_C/libtriton*", "runtime/cache.py", "compiler/**/*.py", "backends/**/*.py", "language/**/*.py")
"""The files in Triton's folder that ``triton_key`` reads."""


def remember_triton_key() -> None:
    """Make Triton use the cached key from now on. The first start on a machine computes and stores the key."""
    import triton
    from triton import knobs
    from triton.runtime import cache

    if not is_known(triton.__version__):
        return  # another version may hash other files
    kept = Path(knobs.cache.dir) / f"weft-triton-key-{fingerprint(Path(triton.__file__).parent)}"
    key = ""
    with contextlib.suppress(OSError):
        key = kept.read_text()
    if not key:
        key = cache.triton_key()
        _keep(key, kept)
    cache.triton_key = lambda: key


def fingerprint(folder: Path) -> str:
    """A name for the state of Triton's files in ``folder``."""
    files = sorted(path for pattern in _HASHED for path in folder.glob(pattern))
    states = [(str(path), (state := path.stat()).st_size, state.st_mtime_ns) for path in files]
    return hashlib.sha256(repr(states).encode()).hexdigest()[:32]


def _keep(key: str, file: Path) -> None:
    """Write the file atomically, since processes may start at the same time. Errors are ignored."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=file.name, delete=False) as draft:
            draft.write(key)
        Path(draft.name).replace(file)
