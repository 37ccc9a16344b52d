"""Whether a checkpoint's files hold a vision tower. Only names are read."""

import json
from collections.abc import Iterable
from pathlib import Path

from weft.config.json_object import JsonObject
from weft.errors import ConfigError

_INDEX = "model.safetensors.index.json"
_MOST_BYTES = 1 << 27
"""Upper bound on the header of a file."""


def lacks_tower(folder: Path) -> bool:
    """Whether the files hold tensors and none of a tower. False for files that cannot be read: the loader says why."""
    try:
        names = list(_names(folder))
    except (ConfigError, OSError, ValueError):
        return False
    return bool(names) and not any("visual" in name.split(".") for name in names)


def _names(folder: Path) -> Iterable[str]:
    index = folder / _INDEX
    if index.is_file():
        files = JsonObject.load(index).object("weight_map")
        return files.values if files is not None else ()
    return [name for path in folder.glob("*.safetensors") for name in _header(path)]


def _header(path: Path) -> Iterable[str]:
    """The names in one file: a length of eight bytes and a JSON object precede its numbers."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(length, _MOST_BYTES)))
    return header if isinstance(header, dict) else ()
