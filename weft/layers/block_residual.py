"""Residuals over blocks of layers: what a half of a layer reads of the stream of now and of before (Inkling 2).

Job: the read before each half and at the model's end, with its norms. Owns: their weights, whole on every rank. Does
not know: which states are kept, what a half computes.
"""

import torch
from torch import Tensor, nn

from weft.config.model import ModelConfig
from weft.layers.context import ModelContext
from weft.layers.weight import WeightLayout, WeightModule, WeightPiece, empty_parameter, whole
from weft.ops.block_residual import read_blocks
from weft.ops.norm import rms_norm


class BlockRead(WeightModule):
    """``(blocks [T, B, hidden_size], stream [T, hidden_size]) -> [Q, T, hidden_size]``: a norm's output for each query.

    Attributes:
        query: ``[Q, hidden_size]`` in float32. None where there is no block yet: the norms read the stream alone.
    """

    def __init__(self, count: int, config: ModelConfig, context: ModelContext, *, has_query: bool = True) -> None:
        super().__init__()
        self._eps, self._backend, shape = config.rms_norm_eps, context.backend, (count, config.hidden_size)
        self.weight = empty_parameter(*shape, dtype=context.dtype, device=context.device)
        self.query: nn.Parameter | None = None
        if has_query:
            self.query = empty_parameter(*shape, dtype=torch.float32, device=context.device)

    def forward(self, blocks: Tensor | None, stream: Tensor) -> Tensor:
        if self.query is None or blocks is None:
            normed = [rms_norm(stream, weight, self._eps, backend=self._backend) for weight in self.weight]
            return torch.stack(normed)
        return read_blocks(blocks, stream, self.query, self.weight, self._eps, backend=self._backend)

    @property
    def query_piece(self) -> WeightPiece:
        """The piece of the queries. A file has a single query without a first dimension."""
        assert self.query is not None
        return whole(self.query if len(self.query) > 1 else self.query[0])

    def layouts(self) -> tuple[WeightLayout, ...]:
        names = ["weight"] if len(self.weight) == 1 else [f"{i}.weight" for i in range(len(self.weight))]
        return ({name: whole(weight) for name, weight in zip(names, self.weight, strict=True)},)

    def initial_range(self, name: str) -> tuple[float, float]:
        return (0.9, 1.1) if name == "weight" else super().initial_range(name)


class BlockEnd(BlockRead):
    """The model's final norm."""

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """``(norm, blocks)`` of the stream ``x`` and the blocks ``residual``."""
        return self(residual, x)[0], residual


class BlockQueries(WeightModule):
    """The names of all layers' queries, which checkpoints store together. Each ``BlockRead`` owns its own."""

    def __init__(self, reads: dict[str, BlockRead]) -> None:
        super().__init__()
        self._reads = reads

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({name: read.query_piece for name, read in self._reads.items()},)
