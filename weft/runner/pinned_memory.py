"""Large blocks of host memory that a device can read and write.

Job: allocate and pin. Does not know: what the memory holds.
"""

import mmap
import weakref
from contextlib import suppress

import torch
from torch import Tensor

from weft.errors import CapacityError


def allocate_host(num_bytes: int, purpose: str, *, pin: bool, owner: object) -> Tensor:
    """Allocate host memory. Pinned memory has huge pages where the system allows them, and is unpinned with ``owner``.

    torch's own allocator of pinned memory rounds sizes up to powers of two. Forked processes do not get the memory. The
    system would copy all pinned pages for each of them at once.

    Args:
        purpose: what the memory is for, named in errors.

    Raises:
        CapacityError: the host lacks the memory.
    """
    try:
        block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise CapacityError(
            f"the host lacks {num_bytes / 2**30:.2f} GiB for {purpose} ({error}); give a smaller one"
        ) from error
    with suppress(OSError, AttributeError):
        block.madvise(mmap.MADV_DONTFORK)
    if not pin:
        return torch.frombuffer(block, dtype=torch.uint8)
    with suppress(OSError, AttributeError):
        block.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(block, dtype=torch.uint8)
    memory.zero_()  # all threads touch the pages, which pinning would do with one
    runtime = torch.cuda.cudart()
    status = runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0)
    if int(status) != 0:
        raise CapacityError(
            f"{num_bytes / 2**30:.2f} GiB for {purpose} cannot be pinned (CUDA error {int(status)}); "
            "give a smaller one, or raise the limit of locked memory (ulimit -l)"
        )
    weakref.finalize(owner, _unpin, memory)
    return memory


def _unpin(memory: Tensor) -> None:
    with suppress(RuntimeError):  # the device has failed, and copies nothing any more
        torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
