"""The layer table: every layer that split ops find by name, in model order."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import weft.layers


class LayerTable(dict[str, Any]):
    """Layers announce themselves here while a model is built. Those that keep a cache have it under the same name.

    The names of layers with a cache are those of ``ModelConfig.layer_specs``.
    """

    def register(self, name: str, layer: Any) -> None:
        assert name not in self, f"layer {name} registered twice"
        self[name] = layer


def import_layers() -> None:
    """Import every kind of layer, so that its split op is known by name, whatever the model has."""
    for module in pkgutil.iter_modules(weft.layers.__path__, "weft.layers."):
        importlib.import_module(module.name)
