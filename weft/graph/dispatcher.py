"""The dispatcher: from a batch's sizes to a graph mode and a captured size, as a pure function.

The rules of each mode are in ``config/graph_modes.py``. Knows no graphs, devices or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.config.graph_modes import BatchDescriptor, CudaGraphMode, GraphMode, MeasuredModes
from weft.graph.capture_sizes import MAX_PREFILLS, chunk_capacity, smallest_fitting

MAX_PADDING = 2
"""A batch whose tokens would be padded to more than this multiple runs without a graph."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How a batch runs: ``size`` is what it is padded to (sequences in a full decode graph, otherwise tokens)."""

    mode: GraphMode
    size: int


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """The captured sizes and the rules over them.

    Attributes:
        mode: as configured.
        decode_sizes: ascending batch sizes of full decode graphs.
        token_sizes: ascending token counts captured in pieces.
        full_token_sizes: ascending token counts with a full graph for any batch; only where every operation of the
            model is graph-safe.
        table: measured modes; they go before the rules, and before the limit of padding.
    """

    mode: CudaGraphMode
    decode_sizes: Sequence[int] = ()
    token_sizes: Sequence[int] = ()
    full_token_sizes: Sequence[int] = ()
    table: MeasuredModes | None = None

    def choose(self, batch: BatchDescriptor) -> Choice:
        """The measured mode, or the first one that the rules allow, if its captured sizes hold the batch; otherwise
        none."""
        measured = self.table.mode(batch) if self.table is not None else None
        if measured is GraphMode.NONE:
            return Choice(GraphMode.NONE, batch.num_tokens)
        if measured is not None and (size := self._size(measured, batch, max_padding=None)) is not None:
            return Choice(measured, size)
        for mode in self.mode.decode if batch.uniform_decode else self.mode.mixed:
            size = self._size(mode, batch)
            if size is not None:
                return Choice(mode, size)
        return Choice(GraphMode.NONE, batch.num_tokens)

    def _size(self, mode: GraphMode, batch: BatchDescriptor, max_padding: int | None = MAX_PADDING) -> int | None:
        if mode is GraphMode.FULL and batch.uniform_decode:
            return smallest_fitting(self.decode_sizes, batch.num_tokens)
        sizes = self.full_token_sizes if mode is GraphMode.FULL else self.token_sizes
        size = smallest_fitting(sizes, batch.num_tokens)
        if size is None or (max_padding is not None and size > max_padding * batch.num_tokens):
            return None
        fits = batch.num_chunks <= chunk_capacity(size)
        return size if fits and batch.num_prefills <= MAX_PREFILLS else None
