"""Short convolutions with a residual connection: of any channels, and at the end of a mixer or an MLP (Inkling).

Job: the taps, with the sum over ranks before the convolution of an output. Does not know: how states are allocated or
forked; a layer finds them by its own name in the forward context.
"""

from dataclasses import replace

import torch
from torch import Tensor

from weft.config.inkling import OutputConvConfig
from weft.config.model import ModelConfig
from weft.forward_context import get_forward_context
from weft.graph.split_ops import split_op
from weft.layers.all_reduce import AllReduce
from weft.layers.context import ModelContext
from weft.layers.short_conv import convolve_rows
from weft.layers.weight import RowMap, WeightLayout, WeightModule, WeightPiece, empty_parameter, whole_rows


class TapsWithInput:
    """Receives the taps ``[C, 1, W]`` of a convolution, adds 1 to the last tap for the input, and scales all."""

    def __init__(self, taps: Tensor, scale: float) -> None:
        self._taps, self._scale = taps, scale

    def copy_(self, source: Tensor) -> None:
        self._taps.copy_(source)
        self._taps[..., -1] += 1.0
        self._taps *= self._scale


class ResidualConv(WeightModule):
    """``scale * (x + conv(x))``, depthwise and causal: ``[T, C] -> [T, C]``; padding rows are zero.

    Args:
        parts: the prefix of each part's tensors -> where its channels go.
    """

    def __init__(self, parts: dict[str, RowMap], kernel: int, context: ModelContext, *, scale: float = 1.0) -> None:
        super().__init__()
        self._parts, self._backend, self._scale = parts, context.backend, scale
        channels = sum(rows.count for rows in parts.values())
        # The taps of the sum with the input. They need more digits than a model's dtype may have beside the 1.
        self.weight = empty_parameter(channels, kernel, dtype=torch.float32, device=context.device)

    def convolve(self, x: Tensor, state: Tensor) -> Tensor:
        """Convolve the rows of this step's batch. ``state [num_slots, C, W - 1]`` is read and updated."""
        return convolve_rows(x, self.weight, None, state, silu=False, backend=self._backend)

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({f"{part}weight": self._piece(rows) for part, rows in self._parts.items()},)

    def _piece(self, rows: RowMap) -> WeightPiece:
        piece = rows.piece(self.weight, middle=(1,))
        return replace(
            piece, copies=tuple((source, TapsWithInput(self.weight[run.target_rows, None], self._scale))
                                for (source, _), run in zip(piece.copies, rows.runs, strict=True))
        )  # fmt: skip


class OutputConv(WeightModule):
    """``[T, hidden_size]``, a rank's part of a sum, to the convolved sum ``[T, hidden_size]``; padding rows are zero.

    Args:
        name: key of the layer's state and of its entry in the layer table, for example ``model.layers.3.mlp_sconv``.
    """

    def __init__(self, geometry: OutputConvConfig, config: ModelConfig, context: ModelContext, name: str) -> None:
        super().__init__()
        self.name, self.width = name, geometry.num_channels
        self._all_reduce = AllReduce.over_ranks(geometry.num_channels, context)
        parts = {"": whole_rows(geometry.num_channels)}
        self.conv1d = ResidualConv(parts, geometry.kernel, context, scale=geometry.scale)
        context.layers.register(name, self)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x if self._all_reduce is None else self._all_reduce(x))

    @split_op("output_conv", width=lambda layer: layer.width)
    def mix(self, x: Tensor) -> Tensor:
        """The convolution: ``[T, hidden_size] -> [T, hidden_size]``."""
        return self.conv1d.convolve(x, get_forward_context().caches[self.name]["conv"])

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({},)
