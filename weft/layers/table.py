"""The layer table: every layer that split ops find by name, in model order."""

import importlib
import pkgutil
from typing import Any

import weft.layers


class LayerTable(dict[str, Any]):
    """The layers of a model by name. Each layer registers itself while the model is built.

    Layers with a cache have the names of ``ModelConfig.layer_specs``.
    """

    def register(self, name: str, layer: Any) -> None:
        assert name not in self, f"layer {name} registered twice"
        self[name] = layer


def import_layers() -> None:
    """Import every kind of layer, so that its split op is known by name, whatever the model has."""
    for module in pkgutil.iter_modules(weft.layers.__path__, "weft.layers."):
        importlib.import_module(module.name)
