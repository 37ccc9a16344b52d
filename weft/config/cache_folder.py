"""The folder for compiled code and measurements that later starts reuse.

Everything in the folder may be deleted at any time.
"""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return ``$WEFT_CACHE_DIR``, else ``weft`` in ``$XDG_CACHE_HOME``, else ``~/.cache/weft``. The folder may not
    exist yet."""
    if given := os.environ.get("WEFT_CACHE_DIR"):
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "weft"
