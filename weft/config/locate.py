"""The location of a checkpoint: a folder, a hub id, or the bundled model.

A folder has precedence over the local hub cache, and the cache over a download.
"""

import os
import re
from pathlib import Path

from weft.assets import MODEL_DIR
from weft.errors import ConfigError

BUNDLED_NAME = "weft-mini"

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_CONFIG_FILES = ["*.json", "*.txt", "*.jinja", "*.model"]
_WEIGHT_FILES = ["*.safetensors"]


def locate(name: str | None, *, weights: bool = True) -> Path:
    """Return the folder of checkpoint ``name``; None names the bundled model.

    Args:
        name: a folder, or a hub id such as ``Qwen/Qwen3-0.6B``.
        weights: whether the safetensors files are needed.

    Raises:
        ConfigError: the name is neither a folder nor a model on the hub or in the local cache.
    """
    if name is None or (name == BUNDLED_NAME and not Path(name).exists()):
        return MODEL_DIR
    folder = os.path.expanduser(name)
    if os.path.isdir(folder):  # also False for a name that is no valid path
        return Path(folder)
    if os.path.exists(folder):
        raise ConfigError(f"model {name!r} is a file; give the folder that holds its config.json")
    if not _HUB_ID.fullmatch(name) or name.startswith((".", "/")):
        raise ConfigError(f"model {name!r}: there is no such folder; give a folder, or a hub id like Qwen/Qwen3-0.6B")
    return _from_hub(name, _CONFIG_FILES + _WEIGHT_FILES if weights else _CONFIG_FILES)


def _from_hub(name: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download  # needed only for checkpoints that are not on disk

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the client raises errors of many libraries: HTTP, validation, files
        reason = str(error).strip().split("\n", maxsplit=1)[0]
        raise ConfigError(
            f"model {name!r}: there is no such folder, and it cannot be downloaded from the hub "
            f"({type(error).__name__}: {reason}); check the name and the network, or give a local folder"
        ) from error
