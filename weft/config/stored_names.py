"""Facts from the names of a checkpoint's tensors: whether there is a tower, and which parts of a head are unquantised.

Does not know: shapes, dtypes, numbers.
"""

import json
import re
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


_CODED = ("weight_scale", "weight_scale_inv", "weight_packed", "qweight")
"""Ends of the names that only quantised weights have, one in each format."""
_JOINT = {"fc", "fc_embedding", "fc_hidden", "eh_proj", "input_proj"}
"""Names of the projections that read hidden states and embeddings."""


def unquantised_head(folder: Path, num_hidden_layers: int) -> tuple[str, ...]:
    """Patterns of the modules in a multi-token-prediction head whose weights are stored unquantised.

    Tools that quantise often copy the head as it was, and name none of its modules in ``quantization_config``.
    DeepSeek's names count the head as one more layer.

    Returns:
        Patterns for ``Rule`` with ``match="part"``: the whole head, its first projections, or nothing.
    """
    head = re.compile(rf"(?:^|\.)(?:mtp|layers\.{num_hidden_layers})\.")
    try:
        names = [name for name in _names(folder) if head.search(name)]
    except (ConfigError, OSError, ValueError):
        return ()
    joint = [name for name in names if name.split(".")[-2] in _JOINT]
    if names and not any(name.endswith(_CODED) for name in names):
        return ("mtp",)
    if joint and not any(name.endswith(_CODED) for name in joint):
        return "mtp.fc", "mtp.fc_embedding", "mtp.fc_hidden", "input_proj"
    return ()


def holds_kv_scales(folder: Path) -> bool:
    """Whether the files hold scales of an FP8 KV cache under ModelOpt's names."""
    try:
        return any(name.endswith(".k_proj.k_scale") for name in _names(folder))
    except (ConfigError, OSError, ValueError):
        return False


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
