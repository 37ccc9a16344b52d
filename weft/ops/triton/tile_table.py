"""Tile shapes by problem size.

Job: look up the measured tile for a size. Owns: the meaning of a table's keys, and where the tables of an H200 hold.
Does not know: what a tile is.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TypeVar

import torch

Tile = TypeVar("Tile")


def choose_tile(table: Mapping[int, Tile], size: int) -> Tile:
    """The entry with the smallest key that is at least ``size``; beyond all keys, the one with the largest."""
    return table[min((limit for limit in table if limit >= size), default=max(table))]


@functools.cache
def has_table(device: torch.device) -> bool:
    """Whether the tables that were measured on an H200 (``*_h200.json``) are for this device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
