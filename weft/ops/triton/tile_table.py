"""Tables of measured tiles by problem size, and on which GPU those of an H200 hold. Other GPUs take rules."""

import functools
from collections.abc import Mapping
from typing import TypeVar

import torch

from weft.ops.triton.sizes import MULTIPROCESSORS, is_hopper

Tile = TypeVar("Tile")


def choose_tile(table: Mapping[int, Tile], size: int) -> Tile:
    """The entry with the smallest key that is at least ``size``; beyond all keys, the one with the largest."""
    return table[min((limit for limit in table if limit >= size), default=max(table))]


@functools.cache
def has_table(device: torch.device) -> bool:
    """Whether the tables that were measured on an H200 (``*_h200.json``) are for this device: a Hopper GPU with as many
    multiprocessors, as an H100 SXM has. Others, such as an H20 or an H100 PCIe, would have broken last rounds."""
    return is_hopper(device) and torch.cuda.get_device_properties(device).multi_processor_count == MULTIPROCESSORS
