"""The step's inputs, packed: named arrays in one block of memory, one copy from host to device.

Job: typed slices of one block on the host and of one of the same layout on the device. Owns: both blocks and when a
host block may be filled again. Does not know: what the numbers mean.

On a GPU there are two pinned host blocks, used in turn; a block is filled again only after the copy out of it is done,
so the next step can be prepared while the last one's copy is still waiting in the stream. The event that says so is
recorded behind the step's launches (``mark``): recording it costs the host time for which the device would wait. The
device block never moves: a captured graph reads it. On the CPU host and device block are the same memory and the copy
is nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes; every array starts at a multiple, so that every dtype is aligned and loads can be wide."""

NUM_HOST_BLOCKS = 2

_NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}


class StepBuffers:
    """Named arrays in one block.

    Args:
        arrays: name -> (dtype, largest number of values). The last array is the *tail*: only the part of it that a step
            uses is copied.
        device: where the forward pass runs.
    """

    def __init__(self, arrays: dict[str, tuple[torch.dtype, int]], device: torch.device) -> None:
        self._arrays = arrays
        self._offsets: dict[str, int] = {}
        end = 0
        for name, (dtype, size) in arrays.items():
            self._offsets[name] = end
            end += -(-size * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self._tail = next(reversed(arrays))
        on_gpu = device.type == "cuda"
        self._hosts = [
            torch.zeros(end, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(NUM_HOST_BLOCKS if on_gpu else 1)
        ]
        self._views = [self._numpy_views(host) for host in self._hosts]
        self._copied = [torch.cuda.Event() for _ in self._hosts] if on_gpu else []
        self._device = torch.zeros(end, dtype=torch.uint8, device=device) if on_gpu else self._hosts[0]
        self._parts: dict[int, tuple[Tensor, list[Tensor]]] = {}  # of both blocks, by the size of the tail
        self._is_marked = True
        self._current = 0

    def _numpy_views(self, host: Tensor) -> dict[str, np.ndarray]:
        block = host.numpy()
        views = {}
        for name, (dtype, size) in self._arrays.items():
            start = self._offsets[name]
            views[name] = block[start : start + size * dtype.itemsize].view(_NUMPY[dtype])
        return views

    def begin(self) -> dict[str, np.ndarray]:
        """The host arrays to fill for the next step (waits, if need be, until the last copy out of them is done)."""
        self.mark()
        self._current = (self._current + 1) % len(self._hosts)
        if self._copied:
            self._copied[self._current].synchronize()
        return self._views[self._current]

    def upload(self, tail_size: int) -> None:
        """Copy the filled arrays to the device, of the tail only ``tail_size`` values (asynchronous on a GPU)."""
        if not self._copied:
            return
        if tail_size not in self._parts:
            end = self._offsets[self._tail] + tail_size * self._arrays[self._tail][0].itemsize
            self._parts[tail_size] = self._device[:end], [host[:end] for host in self._hosts]
        device, hosts = self._parts[tail_size]
        device.copy_(hosts[self._current], non_blocking=True)
        self._is_marked = False

    def mark(self) -> None:
        """Note that what is queued by now follows the last ``upload``; ``begin`` does it if nobody has."""
        if not self._is_marked:
            self._copied[self._current].record()
            self._is_marked = True

    @property
    def block(self) -> Tensor:
        """The device block."""
        return self._device

    def device(self, name: str, size: int) -> Tensor:
        """The first ``size`` values of one array on the device; always the same memory."""
        dtype, _ = self._arrays[name]
        start = self._offsets[name]
        return self._device[start : start + size * dtype.itemsize].view(dtype)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A copy of small host data for which the host does not wait: on a GPU, only pinned memory allows that."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def device_ints(values: Sequence[int], device: torch.device) -> Tensor:
    """``[N]`` int64 on the device; the host does not wait for the copy."""
    return to_device(torch.tensor(values, dtype=torch.int64), device)
