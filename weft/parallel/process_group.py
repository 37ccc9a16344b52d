"""Ranks in processes of their own, with collectives through torch.distributed.

Job: ``TensorParallel`` over NCCL on GPUs and gloo on the CPU. Owns: the process group and its peer memory. Does not
know: who started the processes, layers, graphs.

The dispatcher sees each collective as one operator (``weft::all_reduce_``, ``weft::all_gather``), so the graph emulator
records and replays it as a unit. CUDA graphs capture NCCL's kernels like any others; gloo works on the host. Both
compute the sum of a chunk once and copy it to the other ranks, so every rank has the same bits.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from weft.parallel import peer_memory
from weft.parallel.peer_memory import PeerMemory

logger = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Upper bound on a collective. A rank may compile kernels for minutes while others wait; the executor notices one that
died or hangs."""

_LIBRARY = torch.library.Library("weft", "FRAGMENT")
_GROUPS: dict[str, dist.ProcessGroup] = {}
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name until torch 2.12


class ProcessGroup:
    """The ranks of one model, one per process. A process belongs to one such group at a time.

    Args:
        device: a CUDA device (NCCL) or the CPU (gloo).
        store: the store through which the ranks find each other.
    """

    def __init__(self, rank: int, size: int, device: torch.device, store: dist.Store) -> None:
        self.rank, self.size = rank, size
        self._device = device
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=device if on_gpu else None,
        )
        group = dist.group.WORLD
        assert group is not None
        self._name = group.group_name
        _GROUPS[self._name] = group
        self._peer_memory: PeerMemory | None = None
        self.is_alone = False
        if on_gpu:
            self._take_memory()

    def _take_memory(self) -> None:
        """Make NCCL allocate its memory, by one small and one large message, before caches are sized."""
        for num_elements in (1 << 10, 16 << 20):
            self.all_gather(self.all_reduce(torch.zeros(1, num_elements, dtype=torch.bfloat16, device=self._device)))

    @contextmanager
    def alone(self) -> Iterator[None]:
        self.is_alone = True
        try:
            yield
        finally:
            self.is_alone = False

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.is_alone:
            return x
        torch.ops.weft.all_reduce_(x, self._name)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        if self.is_alone:
            return torch.cat([x] * self.size, dim=-1)
        return torch.ops.weft.all_gather(x, self.size, self._name)

    def peer_memory(self, num_bytes: int) -> Tensor | None:
        if self._device.type != "cuda":
            return None
        memory, reason = None, "another rank has none"
        if self.least(-peer_memory.num_made) < 0:
            reason = "only the first engine of a process can have some"
        else:
            try:
                memory = PeerMemory(num_bytes, self._device, _GROUPS[self._name])
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
        if not self.least(memory is not None) or memory is None:
            logger.warning("no memory that GPUs share, NCCL sums all rows: %s", reason)
            return None
        self._peer_memory = memory
        return memory.addresses

    def least(self, value: int) -> int:
        tensor = torch.tensor([value], dtype=torch.int64, device=self._device)
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=_GROUPS[self._name])
        return int(tensor.item())

    def broadcast(self, x: Tensor) -> Tensor:
        dist.broadcast(x, 0, group=_GROUPS[self._name])
        return x

    def close(self) -> None:
        """Leave the group. On GPUs this does not wait for other ranks, some of which may be gone."""
        del _GROUPS[self._name]
        self._peer_memory = None
        if self._device.type == "cuda":
            dist.distributed_c10d._abort_process_group()  # no wait for kernels that captured graphs may hold
        else:
            dist.destroy_process_group()


def abort_groups() -> None:
    """Abort the collectives of this process after another rank died, so that waiting threads get an error. Callable
    from any thread. On gloo the closed connection has the same effect."""
    for group in _GROUPS.values():
        if dist.get_backend(group) == "nccl":
            group.abort()


def _all_reduce_(x: Tensor, group: str) -> None:
    dist.all_reduce(x, group=_GROUPS[group])


def _all_gather(x: Tensor, size: int, group: str) -> Tensor:
    parts = x.new_empty(size * x.shape[0], *x.shape[1:])
    _gather(parts, x.contiguous(), group=_GROUPS[group])
    return torch.cat(parts.chunk(size), dim=-1)


def _define(schema: str, function: Callable[..., object]) -> None:
    _LIBRARY.define(schema)
    _LIBRARY.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")


_define("all_reduce_(Tensor(a!) x, str group) -> ()", _all_reduce_)
_define("all_gather(Tensor x, int size, str group) -> Tensor", _all_gather)
