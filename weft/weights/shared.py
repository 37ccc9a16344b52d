"""CUDA tensors of another process on the same GPU, by handles.

Job: describe tensors so that another process can open them, and open them. Owns: the form of the description, which is
plain data and no pickle. Does not know: the model, how descriptions travel.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from weft.errors import WeightsError
from weft.weights.update import DTYPE_NAMES, Offered, Reader

StorageHandle = tuple[bytes, int, int, bytes, int]
"""Handle, bytes and offset of a storage, and its reference counter, as torch shares them."""


class SharedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A CUDA tensor of a process that keeps it alive.

    Attributes:
        device: the GPU's UUID. Processes may number GPUs differently.
        storage: the storage. Tensors may be views of one.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: str
    device: str
    storage: StorageHandle


def share_weights(items: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor]) -> bytes:
    """Describe CUDA tensors for ``update_weights_from_ipc`` of an engine on the same GPU.

    The caller must not free or change the tensors before the update is done.
    """
    pairs = items.items() if isinstance(items, Mapping) else items
    storages: dict[int, StorageHandle] = {}
    shared = [_share(name, tensor.detach(), storages) for name, tensor in pairs]
    torch.cuda.synchronize()  # the values are written
    return msgspec.msgpack.encode(shared)


def _share(name: str, tensor: Tensor, storages: dict[int, StorageHandle]) -> SharedTensor:
    """Describe a tensor. ``storages``: those shared before, by address; each is shared once for all of its views."""
    if tensor.device.type != "cuda":
        raise WeightsError(
            f"{name} is on {tensor.device}; only CUDA tensors have handles that other processes can open"
        )
    storage = tensor.untyped_storage()
    if storage.data_ptr() not in storages:
        storages[storage.data_ptr()] = storage._share_cuda_()[1:6]  # without torch's event: share_weights waits
    shape, stride = tuple(tensor.shape), tensor.stride()
    dtype = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
    device, handle = _uuid(tensor.device.index), storages[storage.data_ptr()]
    return SharedTensor(name, shape, stride, int(tensor.storage_offset()), dtype, device, handle)


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


class Handles:
    """The tensors of descriptions that are on one GPU.

    Each storage is opened once, and closed after the last tensor. Closing waits for all copies on the stream.

    Args:
        descriptions: results of ``share_weights``. Ranks on several GPUs need one from each GPU.
        device: this rank's GPU.
    """

    must_drain = False

    def __init__(self, descriptions: Sequence[bytes], device: torch.device) -> None:
        self._device = device
        try:
            found = [msgspec.msgpack.decode(each, type=list[SharedTensor]) for each in descriptions]
            self._tensors = [tensor for tensors in found for tensor in tensors]
        except msgspec.MsgspecError as error:
            raise WeightsError(f"the handles are not those of share_weights: {error}") from error

    def offered(self) -> list[Offered]:
        if self._device.type != "cuda":
            raise WeightsError("handles of CUDA tensors need an engine on a GPU; use update_weights on the CPU")
        own = _uuid(self._device.index or 0)
        others = {tensor.device for tensor in self._tensors}
        self._tensors = [tensor for tensor in self._tensors if tensor.device == own]
        if not self._tensors and others:
            raise WeightsError(
                f"tensors are on GPU {', '.join(others)}, and this rank is on {own}; both must be the same"
            )
        return [Offered(t.name, t.shape, t.dtype) for t in self._tensors]

    def __iter__(self) -> Iterator[tuple[Offered, Reader]]:
        dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
        opened: dict[StorageHandle, Any] = {}
        for shared in self._tensors:
            if shared.storage not in opened:
                index = self._device.index or 0
                opened[shared.storage] = torch.UntypedStorage._new_shared_cuda(index, *shared.storage, b"", False)
            empty = torch.empty(0, dtype=dtypes[shared.dtype], device=self._device)
            tensor = empty.set_(opened[shared.storage], shared.offset, shared.shape, shared.stride)
            yield Offered(shared.name, shared.shape, shared.dtype), tensor.__getitem__
