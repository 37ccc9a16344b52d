"""Serialisation of messages between processes: hooks for types that msgspec does not know."""

from array import array
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from weft.config.model import Mixers


def encode_other(value: Any) -> Any:
    """Encode other types; an ``enc_hook`` of msgspec."""
    if isinstance(value, array):
        return value.tobytes()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mixers):
        return {kind: {name: [_path(type(g)), g] for name, g in modules.items()} for kind, modules in value.items()}
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be sent to another process")


def decode_other(kind: type, value: Any) -> Any:
    """Decode other types; a ``dec_hook`` of msgspec."""
    if kind is array:
        return array("I", value)
    if kind is Path:
        return Path(value)
    if kind is Mixers:
        return Mixers({kind: {name: _geometry(*g) for name, g in modules.items()} for kind, modules in value.items()})
    raise NotImplementedError(f"{kind.__name__} cannot be sent to another process")


def _path(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _geometry(path: str, fields: dict[str, Any]) -> Any:
    module, name = path.split(":")
    return msgspec.convert(fields, getattr(import_module(module), name))
