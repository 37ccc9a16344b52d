"""Tables of measured tiles by problem size, and on which GPU those of an H200 hold."""

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
