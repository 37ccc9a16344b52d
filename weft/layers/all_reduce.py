"""The sum over ranks, as a layer of its own.

Job: make the all-reduce a split op, so that passes can break there where it cannot be captured (gloo). Owns: nothing.
Does not know: how a sum is formed.
"""

from __future__ import annotations

from torch import Tensor, nn

from weft.graph.split_ops import split_op
from weft.layers.context import ModelContext

NAME = "all_reduce"


class AllReduce(nn.Module):
    """``[T, width] -> [T, width]``: the sum of every rank's rows, written in place where no graph is broken."""

    def __init__(self, width: int, context: ModelContext) -> None:
        super().__init__()
        self.name, self.width, self._tp = NAME, width, context.tp

    @classmethod
    def shared(cls, width: int, context: ModelContext) -> AllReduce:
        """The one of the model; registered on first use."""
        found = context.layers.get(NAME)
        if found is None:
            found = cls(width, context)
            context.layers.register(NAME, found)
        assert isinstance(found, cls) and found.width == width
        return found

    def forward(self, x: Tensor) -> Tensor:
        return self.sum(x)

    @split_op(NAME, width=lambda layer: layer.width)
    def sum(self, x: Tensor) -> Tensor:
        return self._tp.all_reduce(x)
