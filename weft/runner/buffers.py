"""The step's inputs, packed: one int32 buffer on the host, its twin on the device, one copy between them.

Job: named slices of one buffer. Owns: both buffers. Does not know: what the numbers mean.
On the CPU host and device buffer are the same memory and the copy is nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class StepBuffers:
    """Named int32 arrays in one allocation.

    Args:
        sizes: name -> number of int32 values.
        device: where the forward pass runs.
    """

    def __init__(self, sizes: dict[str, int], device: torch.device) -> None:
        total = sum(sizes.values())
        self._host = torch.zeros(total, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = self._host if device.type == "cpu" else torch.zeros(total, dtype=torch.int32, device=device)
        self._slices: dict[str, slice] = {}
        offset = 0
        for name, size in sizes.items():
            self._slices[name] = slice(offset, offset + size)
            offset += size
        self._arrays: dict[str, np.ndarray] = {name: self._host.numpy()[s] for name, s in self._slices.items()}

    def host(self, name: str) -> np.ndarray:
        """The host side of one array, to be filled."""
        return self._arrays[name]

    def upload(self) -> None:
        """Copy everything to the device (asynchronous on a GPU)."""
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)

    def device(self, name: str, size: int) -> Tensor:
        """The first ``size`` values of one array on the device."""
        start = self._slices[name].start
        return self._device[start : start + size]
