"""The sum over ranks: one object that the layers of a model share.

Job: sum over the ranks in the way that is fastest for the number of rows. Owns: the memory through which ranks exchange
few rows. Does not know: how a sum is formed.

Where it is asked for, few rows on GPUs are summed, added to the residual stream and normalised by one kernel over peer
memory. Everything else goes through the group's own all-reduce, which is a split op, so that passes can break there
where it cannot be captured (gloo).
"""

from typing import Self

from torch import Tensor

from weft.forward_context import get_forward_context
from weft.graph.split_ops import split_op
from weft.layers.context import ModelContext
from weft.ops.collectives.peer_buffers import PeerBuffers, SentRows, buffer_bytes, make_counters, takes_packets

NAME = "all_reduce"

_MOST_BYTES = 32 * 2**20
"""Upper bound on a message of two ranks. Up to there, where measuring ended, the kernel beat NCCL and a norm."""

_MOST_BYTES_READ = 3 * 2**20
"""Upper bound on the messages that a rank reads, with more than two ranks. With four ranks, NCCL was faster from 512
rows of 4 KiB on."""


def max_rows(size: int, row_bytes: int) -> int:
    """Return the rows above which NCCL and a norm are faster than the fused kernel (docs/parallelism.md)."""
    return max(1, (_MOST_BYTES if size == 2 else _MOST_BYTES_READ // (size - 1)) // row_bytes)


class AllReduce:
    """``[T, width] -> [T, width]``: sums every rank's rows, in place where no graph is broken.

    Layers share the object, so it is not a submodule of any layer.
    """

    def __init__(self, width: int, context: ModelContext, name: str = NAME) -> None:
        self.name, self.width, self._tp, self._dtype = name, width, context.tp, context.dtype
        self._peers: PeerBuffers | None = None
        self._in_order = context.backend.is_invariant
        if context.custom_all_reduce and name == NAME and not self._in_order:
            self._peers = self._make_peers(context)

    def _make_peers(self, context: ModelContext) -> PeerBuffers | None:
        tp = context.tp
        most = max_rows(tp.size, self.width * context.dtype.itemsize)
        addresses = tp.peer_memory(buffer_bytes(tp.size, self.width, context.dtype, most))
        if addresses is None:
            return None
        return PeerBuffers(addresses, make_counters(context.device), tp.rank, tp.size, self.width, most)

    @classmethod
    def over_ranks(cls, width: int, context: ModelContext) -> Self | None:
        """Return the model's all-reduce; None with one rank."""
        return cls._registered(NAME, width, context)

    @classmethod
    def inside_a_layer(cls, width: int, context: ModelContext) -> Self | None:
        """Return the all-reduce of ``width`` columns that layers need whole; None with one rank.

        It always goes through the group. Layers share one object per width.
        """
        return cls._registered(f"{NAME}.{width}", width, context)

    @classmethod
    def _registered(cls, name: str, width: int, context: ModelContext) -> Self | None:
        """Return the all-reduce ``name``, made and registered at its first use."""
        if context.tp.size == 1:
            return None
        if name not in context.layers:
            context.layers.register(name, cls(width, context, name))
        found = context.layers[name]
        assert isinstance(found, cls) and found.width == width
        return found

    def peers(self, x: Tensor | SentRows) -> PeerBuffers | None:
        """Return the memory for the fused kernel, or None if the kernel does not sum ``x``.

        It sums few rows, and none in a pass that breaks at sums.
        """
        if self._peers is None or self._tp.is_alone:
            return None
        breaks = get_forward_context().breaks
        if breaks is not None and NAME in breaks.names:
            return None
        return self._peers if x.shape[-2] <= self._peers.max_rows else None

    def peers_to_send(self, x: Tensor) -> PeerBuffers | None:
        """Return the memory for the fused kernel, if the kernel that computes a row from each of ``x [T, *]`` sends it.

        None where the following norm gets other rows, or where a split op reads the output.
        """
        peers = self.peers(x)
        context = get_forward_context()
        if peers is None or context.any_num_tokens or context.batch.logits_rows is not None:
            return None
        return peers if takes_packets(x.shape[0], self.width, self._dtype, peers.size) else None

    @split_op(NAME, width=lambda layer: layer.width)
    def __call__(self, x: Tensor) -> Tensor:
        return self._sum_in_order(x) if self._in_order else self._tp.all_reduce(x)

    def _sum_in_order(self, x: Tensor) -> Tensor:
        """The sum over ranks by rank. An all-reduce adds in an order that depends on an element's place in the message,
        and so on the number of rows."""
        first, *others = self._tp.all_gather(x).unflatten(-1, (self._tp.size, -1)).unbind(-2)
        total = first.float().contiguous()
        for part in others:
            total += part
        return total.to(x.dtype)
