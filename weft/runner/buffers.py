"""The step's inputs, packed: named arrays in one block of memory, brought to the device at once.

Job: typed slices of one block on the host and of one of the same layout on the device. Owns: both blocks and when a
host block may be filled again. Does not know: what the numbers mean.

On a GPU there are two pinned host blocks, used in turn, so that the next step can be prepared before the device has
read the last one's inputs. A block is filled again only after the device has read it. ``mark`` records the event for
that after the step's launches, when the device does not wait for the host. The device block never moves, because
captured graphs read it. On the CPU, host and device block are the same memory.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from weft.ops.backend import Backend
from weft.ops.steps import load_step_inputs

ALIGNMENT = 16
"""Bytes; every array starts at a multiple, so that every dtype is aligned and loads can be wide."""

NUM_HOST_BLOCKS = 2

PAGE_UPDATES = "page_updates"
"""Name of the host array of entries for the page table: pairs of an index in the flat table and a page, int64."""

_NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}


class StepBuffers:
    """Named arrays in one block.

    Args:
        arrays: name -> (dtype, largest number of values). The first ``num_token_arrays`` are int64 and have a value for
            every token of a step; of these only what a step has is copied.
        num_updates: most entries of the page table that a step writes.
        device, backend: where the block goes, and how.
    """

    def __init__(
        self,
        arrays: dict[str, tuple[torch.dtype, int]],
        num_token_arrays: int,
        num_updates: int,
        device: torch.device,
        backend: Backend,
    ) -> None:
        self._arrays, self._backend = arrays, backend
        self._offsets: dict[str, int] = {}
        end = 0
        for name, (dtype, size) in arrays.items():
            self._offsets[name] = end
            end += -(-size * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        starts = [*self._offsets.values(), end]
        self._token_arrays = num_token_arrays, starts[1] // 8
        assert starts[num_token_arrays] == num_token_arrays * starts[1], "arrays with a value per token are alike"
        on_gpu = device.type == "cuda"
        self._hosts = [
            torch.zeros(end // 8 + 2 * num_updates, dtype=torch.int64, pin_memory=on_gpu)
            for _ in range(NUM_HOST_BLOCKS if on_gpu else 1)
        ]
        self._views = [self._numpy_views(host, end) for host in self._hosts]
        self._copied = [torch.cuda.Event() for _ in self._hosts] if on_gpu else []
        self._words = torch.zeros(end // 8, dtype=torch.int64, device=device) if on_gpu else self._hosts[0][: end // 8]
        self._device = self._words.view(torch.uint8)
        self._is_marked = True
        self._current = 0

    def _numpy_views(self, host: Tensor, end: int) -> dict[str, np.ndarray]:
        block = host.numpy().view(np.uint8)
        views = {}
        for name, (dtype, size) in self._arrays.items():
            start = self._offsets[name]
            views[name] = block[start : start + size * dtype.itemsize].view(_NUMPY[dtype])
        return views | {PAGE_UPDATES: host.numpy()[end // 8 :]}

    def begin(self) -> dict[str, np.ndarray]:
        """The host arrays to fill for the next step (waits, if need be, until the device has read the last step there):
        those given, and ``PAGE_UPDATES``."""
        self.mark()
        self._current = (self._current + 1) % len(self._hosts)
        if self._copied:
            self._copied[self._current].synchronize()
        return self._views[self._current]

    def upload(self, num_tokens: int, num_updates: int, page_table: Tensor) -> None:
        """Bring the arrays of ``num_tokens`` tokens to the device, and the updates into the page table there
        (asynchronous on a GPU)."""
        host, sizes = self._hosts[self._current], (*self._token_arrays, num_tokens, num_updates)
        load_step_inputs(host, self._words, page_table, *sizes, backend=self._backend)
        self._is_marked = not self._copied

    def mark(self) -> None:
        """Note that what is queued by now follows the last ``upload``; ``begin`` does it if nobody has."""
        if not self._is_marked:
            self._copied[self._current].record()
            self._is_marked = True

    @property
    def block(self) -> Tensor:
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
