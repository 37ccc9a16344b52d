"""The layer table: every layer that keeps a cache, by name, with its kind.

Job: let a model announce its token-mixing layers in order, and others find them without looking into the model.
Owns: names and order. Does not know: what a layer computes or how its cache is stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from weft.config.model import LayerType


@dataclass(frozen=True, slots=True)
class LayerEntry:
    """One layer with a cache: KV pages if ``kind`` is full attention, state slots if it is linear attention."""

    name: str
    kind: LayerType
    layer: nn.Module


class LayerTable:
    """Entries in model order; names are unique."""

    def __init__(self) -> None:
        self._entries: dict[str, LayerEntry] = {}
        self._others: dict[str, nn.Module] = {}

    def register(self, name: str, kind: LayerType, layer: nn.Module) -> None:
        assert name not in self._entries, f"layer {name} registered twice"
        self._entries[name] = LayerEntry(name, kind, layer)

    def register_other(self, name: str, layer: nn.Module) -> None:
        """A layer without a cache, which the forward context must find by name (see ``graph/split_ops.py``)."""
        assert name not in self._others, f"layer {name} registered twice"
        self._others[name] = layer

    def other(self, name: str) -> nn.Module | None:
        """The layer without a cache that is registered under ``name``."""
        return self._others.get(name)

    def __iter__(self) -> Iterator[LayerEntry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, name: str) -> LayerEntry:
        return self._entries[name]

    def names(self, kind: LayerType) -> tuple[str, ...]:
        """Names of the layers of one kind, in model order."""
        return tuple(entry.name for entry in self if entry.kind == kind)

    def by_name(self) -> dict[str, Any]:
        """Name -> layer, as the forward context carries it."""
        return {entry.name: entry.layer for entry in self} | self._others
