"""The layer table: every layer that split ops find by name, in model order."""

from __future__ import annotations

from torch import nn


class LayerTable(dict[str, nn.Module]):
    """Layers announce themselves here while a model is built. Those that keep a cache have it under the same name.

    The names of layers with a cache are those of ``ModelConfig.layer_specs``.
    """

    def register(self, name: str, layer: nn.Module) -> None:
        assert name not in self, f"layer {name} registered twice"
        self[name] = layer
