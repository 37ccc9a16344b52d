"""Facts for ``test_layer_kind.py`` about a new kind of layer, and about a model that mixes it with other kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.x_matrix import Reference
from weft.config.families import FAMILIES
from weft.config.family import Family
from weft.layers.weight import WeightTable
from weft.models.decoder import MIXERS
from weft.models.weight_names import WEIGHT_TABLES


@dataclass(frozen=True)
class LayerKind:
    """A kind of layer that Weft does not have yet, in an architecture of its own.

    Attributes:
        architecture, family, weight_table: the entries of ``FAMILIES`` and ``WEIGHT_TABLES``.
        geometry, layer: the entry of ``MIXERS``.
        make_reference: saves a checkpoint in a folder, and returns transformers' model of the same weights.
        layers: names of the layers that keep a cache, in order.
        module: what a layer of the kind is called in its decoder layer.
        slot_bytes, token_bytes: what one layer of the kind stores of a sequence, and of each token.
    """

    architecture: str
    family: Family
    weight_table: WeightTable
    geometry: type[Any]
    layer: type[Any]
    make_reference: Callable[[Path], Reference]
    layers: tuple[str, ...]
    module: str
    slot_bytes: int
    token_bytes: int = 0

    @contextmanager
    def registered(self) -> Iterator[None]:
        """In the body Weft knows the architecture and the kind."""
        FAMILIES[self.architecture], WEIGHT_TABLES[self.architecture] = self.family, self.weight_table
        MIXERS[self.geometry] = self.layer
        yield
        del FAMILIES[self.architecture], WEIGHT_TABLES[self.architecture], MIXERS[self.geometry]
