"""Device memory that is given back while the engine sleeps, and comes back at the same addresses.

Job: move weights and caches to memory that can be given back, give it back, restore it. Owns: host copies of weights
while they are away. Does not know: why the engine sleeps, graphs, requests.

On a GPU the library torch_memory_saver unmaps physical memory and keeps its addresses, so captured graphs stay valid.
On the CPU the system takes the pages back (``madvise``). In both cases a tensor's address never changes.
"""

import ctypes
import itertools
import mmap
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from weft.errors import ConfigError
from weft.runner.memory import wait_for_steps
from weft.runner.pinned_memory import allocate_host

Tag = Literal["weights", "kv_cache"]
TAGS: tuple[Tag, ...] = ("weights", "kv_cache")

_PAGE = mmap.PAGESIZE
_NUMBERS = itertools.count()
_LIBC = ctypes.CDLL(None, use_errno=True)


class SleepMemory:
    """Weights and caches of one rank, by tag.

    Raises:
        ConfigError: on a GPU without the library.
    """

    def __init__(self, device: torch.device) -> None:
        self._saver = _saver() if device.type == "cuda" else None
        self._number = next(_NUMBERS)  # the library knows tags of the whole process
        self._storages: dict[Tag, list[torch.UntypedStorage]] = {}
        self._saved: _HostCopy | None = None
        self._away: set[Tag] = set()

    def move(self, tag: Tag, tensors: Iterable[Tensor]) -> None:
        """Move the memory of ``tensors`` to where it can be given back. All views of it move too. Nobody may know
        their addresses yet."""
        storages = self._storages[tag] = _unique(tensors)
        if self._saver is None:
            return
        for storage in storages:
            size, content = storage.nbytes(), storage.clone()
            storage.resize_(0)
            torch.cuda.empty_cache()
            with self._saver.region(self._name(tag)):
                storage.resize_(size)
            storage.copy_(content)
        del content
        torch.cuda.empty_cache()

    def _name(self, tag: Tag) -> str:
        return f"weft {self._number} {tag}"

    def close(self) -> None:
        """Give back, at the end of the engine, what is not given back yet."""
        with suppress(RuntimeError):  # the device has failed, and the process will end
            for tag in self._storages if self._saver is not None else ():
                if tag not in self._away:
                    self.give_back(tag)

    def save(self) -> None:
        """Copy the weights to host memory, which is pinned on a GPU."""
        self._saved = _HostCopy(self._storages["weights"], pin=self._saver is not None)
        self._saved.save()

    def forget(self) -> None:
        """Free the host copy."""
        self._saved = None

    def give_back(self, tag: Tag) -> None:
        """Give the memory of a tag back. Its content is lost."""
        self._away.add(tag)
        if self._saver is None:
            for storage in self._storages[tag]:
                _discard(storage)
            return
        torch.cuda.synchronize()
        self._saver.pause(self._name(tag))

    def restore(self, tag: Tag) -> None:
        """Get the memory of a tag back: weights as they were saved, everything else zero."""
        self._away.discard(tag)
        if self._saver is not None:
            self._saver.resume(self._name(tag))
        if tag == "weights" and self._saved is not None:
            self._saved.restore()
            self._saved = None
        elif self._saver is not None:
            for storage in self._storages[tag]:
                _bytes(storage).zero_()


class _HostCopy:
    """A copy of storages in host memory. The memory is freed with this object."""

    def __init__(self, storages: list[torch.UntypedStorage], *, pin: bool) -> None:
        self._device_bytes = [_bytes(storage) for storage in storages]
        sizes = [content.numel() for content in self._device_bytes]
        block = allocate_host(max(1, sum(sizes)), "a copy of the weights", pin=pin, owner=self)
        self._host_bytes = block[: sum(sizes)].split(sizes)

    def save(self) -> None:
        for host, content in zip(self._host_bytes, self._device_bytes, strict=True):
            host.copy_(content, non_blocking=True)
        wait_for_steps()

    def restore(self) -> None:
        for host, content in zip(self._host_bytes, self._device_bytes, strict=True):
            content.copy_(host, non_blocking=True)
        wait_for_steps()


@cache
def _saver() -> Any:
    try:
        from torch_memory_saver import torch_memory_saver
    except ImportError as error:
        raise ConfigError(
            "enable_sleep_mode needs torch_memory_saver on a GPU; install it with: pip install 'weft[sleep]'"
        ) from error
    with suppress(AttributeError):  # somebody else in this process has chosen already
        torch_memory_saver.hook_mode = "torch"
    # Its pools are never destroyed. Freed by torch, they ended the process on an H200 (torch 2.11).
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(torch_memory_saver))
    return torch_memory_saver


def _unique(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The storages of ``tensors``, each once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return [storage for storage in storages.values() if storage.nbytes()]


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _discard(storage: torch.UntypedStorage) -> None:
    """Make the content of a CPU storage zero, and give its whole pages back to the system."""
    start, size = storage.data_ptr(), storage.nbytes()
    first, last = -(-start // _PAGE) * _PAGE, (start + size) // _PAGE * _PAGE
    if first >= last:
        ctypes.memset(start, 0, size)
        return
    ctypes.memset(start, 0, first - start)
    ctypes.memset(last, 0, start + size - last)
    if _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED):
        ctypes.memset(first, 0, last - first)
