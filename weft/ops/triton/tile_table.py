"""Tile shapes by problem size.

Job: look up the measured tile for a size. Owns: the meaning of a table's keys. Does not know: what a tile is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Tile = TypeVar("Tile")


def choose_tile(table: Mapping[int, Tile], size: int) -> Tile:
    """The entry with the smallest key that is at least ``size``; beyond all keys, the one with the largest."""
    return table[min((limit for limit in table if limit >= size), default=max(table))]
