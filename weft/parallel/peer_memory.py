"""Memory that the GPUs of a group map from each other (torch's symmetric memory, without multicast).

Job: allocate the same buffer on every rank and exchange addresses. Owns: the buffer and its lifetime. Does not know:
what is exchanged through the buffer (``ops/collectives``).
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor

num_made = 0
"""Number of buffers made by this process. torch counts address exchanges per process, so ranks with different counts
would wait for each other forever."""


class PeerMemory:
    """A zeroed buffer of ``num_bytes`` on every rank. Every rank must make it.

    Attributes:
        addresses: ``[size]`` int64 on the device: the address of every rank's buffer on this rank.

    Raises:
        RuntimeError: the GPUs cannot reach each other's memory.
    """

    def __init__(self, num_bytes: int, device: torch.device, group: dist.ProcessGroup) -> None:
        global num_made
        num_made += 1
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # nothing here uses it
        import torch.distributed._symmetric_memory as symmetric_memory

        self._buffer: Tensor = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        self._buffer.zero_()
        torch.cuda.synchronize(device)  # no rank gets the address before all flags are zero
        self._handle = symmetric_memory.rendezvous(self._buffer, group)
        self.addresses = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device)
