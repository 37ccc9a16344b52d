"""Memory that the GPUs of a group map from each other (torch's symmetric memory, without multicast).

Job: allocate the same buffer on every rank and exchange addresses. Owns: the buffer and its lifetime. Does not know:
what is exchanged through it (``ops/all_reduce.py``).
"""

from __future__ import annotations

import os
import uuid

import torch
import torch.distributed as dist
from torch import Tensor


class PeerMemory:
    """A zeroed buffer of ``num_bytes`` on every rank. Every rank must make it.

    Args:
        store: the ranks', for this buffer alone.

    Attributes:
        addresses: ``[size]`` int64 on the device: every rank's buffer, as seen from here.

    Raises:
        RuntimeError: the GPUs cannot reach each other's memory.
    """

    def __init__(self, num_bytes: int, device: torch.device, rank: int, size: int, store: dist.Store) -> None:
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # nothing here uses it
        from torch._C._distributed_c10d import _SymmetricMemory

        # torch remembers by name which store a group has, as long as the process lives: a group of its own each time
        if rank == 0:
            store.set("name", uuid.uuid4().hex)
        name = f"weft-{store.get('name').decode()}"
        _SymmetricMemory.set_group_info(name, rank, size, store)
        self._buffer: Tensor = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        self._buffer.zero_()
        torch.cuda.synchronize(device)  # nobody is told the address before all flags are zero
        self._handle = _SymmetricMemory.rendezvous(self._buffer, name)
        self.addresses = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device)
