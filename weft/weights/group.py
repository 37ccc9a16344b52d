"""A group of a trainer and the ranks of engines, through which the trainer sends weights.

Job: join the group, broadcast and receive tensors. Owns: the connection. Does not know: the model. A trainer uses
``WeightGroup`` too, as rank 0.
"""

from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from weft.errors import ConfigError, WeightsError
from weft.weights.update import DTYPE_NAMES, Offered, Reader

JOIN_TIMEOUT = timedelta(minutes=5)
"""Upper bound on the wait for other members, and on one broadcast."""


class WeightGroup:
    """One member of a group. Rank 0 sends.

    Args:
        address, port: of the store that rank 0 opens.
        backend: "nccl" for tensors on GPUs, "gloo" for tensors on the CPU.

    Raises:
        ConfigError: the members did not meet.
    """

    def __init__(self, address: str, port: int, rank: int, world_size: int, backend: str, name: str = "weft") -> None:
        if backend not in ("gloo", "nccl"):
            raise ConfigError(f"backend={backend!r} is not valid; allowed are 'gloo' and 'nccl'")
        try:
            store = dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=JOIN_TIMEOUT)
            prefixed = dist.PrefixStore(name, store)
            kind = getattr(dist, "ProcessGroupGloo" if backend == "gloo" else "ProcessGroupNCCL")
            self._group = kind(prefixed, rank, world_size, JOIN_TIMEOUT)
        except (RuntimeError, ValueError, AttributeError) as error:
            raise ConfigError(f"the group of {world_size} at {address}:{port} did not form: {error}") from error
        self.rank, self.world_size = rank, world_size

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Send rank 0's tensor, which is contiguous, into every member's. Returns it."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([tensor.view(-1).view(torch.uint8)], options).wait()
        return tensor


class Received:
    """Tensors that a group's rank 0 broadcasts, in the order of ``names``. ``dtypes`` are those of torch."""

    must_drain = True

    def __init__(
        self,
        group: WeightGroup,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        device: torch.device,
    ) -> None:
        self._group, self._device = group, device
        known = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}
        unknown = {dtype for dtype in dtypes if dtype.removeprefix("torch.") not in known}
        if unknown or not len(names) == len(dtypes) == len(shapes):
            raise WeightsError(
                f"names, dtypes and shapes must be as many, and dtypes among {', '.join(known)}; given were "
                f"{len(names)}, {len(dtypes)} and {len(shapes)}, with unknown dtypes {sorted(unknown)}"
            )
        self._dtypes = [known[dtype.removeprefix("torch.")] for dtype in dtypes]
        self._names, self._shapes = list(names), [tuple(shape) for shape in shapes]

    def drain(self) -> None:
        """Receive all tensors of a refused update, so that rank 0 does not wait."""
        for _ in self:
            pass

    def offered(self) -> list[Offered]:
        whole = zip(self._names, self._shapes, self._dtypes, strict=True)
        return [Offered(name, shape, DTYPE_NAMES[dtype]) for name, shape, dtype in whole]

    def __iter__(self) -> Iterator[tuple[Offered, Reader]]:
        for offered, dtype in zip(self.offered(), self._dtypes, strict=True):
            tensor = torch.empty(offered.shape, dtype=dtype, device=self._device)
            yield offered, self._group.broadcast(tensor).__getitem__
