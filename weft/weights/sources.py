"""Where the tensors of an update come from: objects in this process, files, another rank.

Job: yield tensors with their names. Does not know: the model.
"""

from collections.abc import Iterable, Iterator, Mapping, Sized
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from weft.errors import WeightsError
from weft.parallel.tensor_parallel import TensorParallel
from weft.weights.safetensors_folder import SafetensorsFolder
from weft.weights.update import DTYPE_NAMES, Offered, Reader

HEADER_BYTES = 1024
"""Bytes in which rank 0 announces a tensor to the other ranks. Zeros announce the end."""


class Source(Protocol):
    """The tensors of one update.

    Attributes:
        must_drain: every rank has to receive all tensors, even after an error.
    """

    must_drain: bool

    def offered(self) -> list[Offered] | None:
        """All tensors, if they are known before the first is read."""
        ...

    def __iter__(self) -> Iterator[tuple[Offered, Reader]]: ...


class Tensors:
    """Tensors of this process. A collection is checked as a whole before the first copy; an iterator cannot be."""

    must_drain = False

    def __init__(self, items: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor]) -> None:
        self._items = items.items() if isinstance(items, Mapping) else items

    def offered(self) -> list[Offered] | None:
        return [_offered(item) for item in self._items] if isinstance(self._items, Sized) else None

    def __iter__(self) -> Iterator[tuple[Offered, Reader]]:
        for item in self._items:
            yield _offered(item), item[1].detach().__getitem__


def _offered(item: object) -> Offered:
    if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], Tensor)):
        raise WeightsError(
            f"an update consists of pairs (name, torch.Tensor), not of {type(item).__name__}: {item!r:.80}"
        )
    name, tensor = item
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise WeightsError(
            f"{name} is a {type(tensor).__name__}; give a plain tensor with all rows, as DTensor.full_tensor() returns"
        )
    return Offered.of(name, tensor)


class Files:
    """The safetensors files of a checkpoint folder. Only the rows that this rank needs are read."""

    must_drain = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def offered(self) -> list[Offered]:
        with SafetensorsFolder(self._folder) as checkpoint:
            return [_stored(checkpoint, name) for name in checkpoint.names]

    def __iter__(self) -> Iterator[tuple[Offered, Reader]]:
        with SafetensorsFolder(self._folder) as checkpoint:
            for name in checkpoint.names:
                yield _stored(checkpoint, name), partial(checkpoint.read, name)


def _stored(checkpoint: SafetensorsFolder, name: str) -> Offered:
    return Offered(name, checkpoint.shape(name), checkpoint.dtype(name))


class Relayed:
    """The tensors of rank 0, sent to every rank one by one.

    Args:
        source: the tensors; None on the other ranks.
    """

    def __init__(self, source: Source | None, tp: TensorParallel, device: torch.device) -> None:
        self._source, self._tp, self._device = source, tp, device
        self.must_drain = source is None

    def offered(self) -> list[Offered] | None:
        return self._source.offered() if self._source is not None else None

    def __iter__(self) -> Iterator[tuple[Offered, Reader]]:
        return self._receive() if self._source is None else self._send(self._source)

    def _send(self, source: Source) -> Iterator[tuple[Offered, Reader]]:
        try:
            for tensor, read in source:
                values = read((slice(None),) * len(tensor.shape)).to(self._device).contiguous()
                self._announce(msgspec.msgpack.encode((tensor.name, tensor.shape, tensor.dtype)))
                self._tp.broadcast(values.view(-1).view(torch.uint8))
                yield tensor, values.__getitem__
        finally:
            self._announce(b"")

    def _announce(self, header: bytes) -> None:
        if len(header) > HEADER_BYTES - 2:
            raise WeightsError(f"the name or shape of a tensor is too long: {header!r:.80}")
        block = len(header).to_bytes(2, "little") + header.ljust(HEADER_BYTES - 2, b"\0")
        self._tp.broadcast(torch.frombuffer(bytearray(block), dtype=torch.uint8).to(self._device))

    def _receive(self) -> Iterator[tuple[Offered, Reader]]:
        dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
        while True:
            block = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=self._device)
            header = self._tp.broadcast(block).cpu().numpy().tobytes()
            length = int.from_bytes(header[:2], "little")
            if not length:
                return
            name, shape, dtype = msgspec.msgpack.decode(header[2 : 2 + length])
            values = torch.empty(shape, dtype=dtypes[dtype], device=self._device)
            self._tp.broadcast(values.view(-1).view(torch.uint8))
            yield Offered(name, tuple(shape), dtype), values.__getitem__
