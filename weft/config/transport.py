"""An ``EngineConfig`` between processes: what msgspec needs to know of its field types.

Job: hooks for paths and mappings. Owns: nothing. Does not know: who sends what.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def encode_other(value: Any) -> Any:
    """For ``enc_hook``."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(f"{type(value).__name__} does not cross the process border")


def decode_other(kind: type, value: Any) -> Any:
    """For ``dec_hook``."""
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} does not cross the process border")
