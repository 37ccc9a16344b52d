"""The dispatcher: from a batch's sizes to a graph mode and a captured size, as a pure function.

The rules of each mode are in ``config/graph_modes.py``. Knows no graphs, devices or requests.
"""

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weft.config.graph_modes import CudaGraphMode, GraphMode
from weft.graph.batch_descriptor import MAX_PREFILLS, BatchDescriptor, MeasuredModes, chunk_capacity

MAX_PADDING = 2
"""A batch whose tokens would be padded to more than this multiple runs without a graph."""


def smallest_fitting(sizes: Sequence[int], wanted: int) -> int | None:
    """Return the smallest of the ascending ``sizes`` that holds ``wanted``, or None."""
    at = bisect.bisect_left(sizes, wanted)
    return sizes[at] if at < len(sizes) else None


@dataclass(frozen=True, slots=True)
class Choice:
    """How a batch runs.

    Attributes:
        size: what the batch is padded to: sequences where all decode or verify drafts in a graph, otherwise tokens.
    """

    mode: GraphMode
    size: int


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """The captured sizes and the rules over them.

    Attributes:
        mode: as configured.
        decode_sizes: ascending batch sizes of full decode graphs.
        token_sizes: ascending token counts captured in pieces.
        full_token_sizes: ascending token counts with a full graph for any batch.
        table: measured modes; they go before the rules, and before the limit of padding.
        verification_sizes: ascending batch sizes of graphs in which every sequence verifies drafts, each with the
            tokens of a sequence.
    """

    mode: CudaGraphMode
    decode_sizes: Sequence[int] = ()
    token_sizes: Sequence[int] = ()
    full_token_sizes: Sequence[int] = ()
    table: MeasuredModes | None = None
    verification_sizes: Mapping[int, int] = field(default_factory=dict)

    def choose(self, batch: BatchDescriptor) -> Choice:
        """Choose the measured mode, or the first mode of the rules, whose captured sizes hold the batch.

        Verifications are not measured: they run in a full graph or in none.
        """
        measured = self.table.mode(batch) if self.table is not None and not batch.query_len else None
        if measured is GraphMode.NONE:
            return Choice(GraphMode.NONE, batch.num_tokens)
        if measured is not None and (size := self._size(measured, batch, max_padding=None)) is not None:
            return Choice(measured, size)
        for mode in self.mode.decode if batch.is_uniform else self.mode.mixed:
            size = self._size(mode, batch)
            if size is not None:
                return Choice(mode, size)
        return Choice(GraphMode.NONE, batch.num_tokens)

    def _size(self, mode: GraphMode, batch: BatchDescriptor, max_padding: int | None = MAX_PADDING) -> int | None:
        if batch.query_len:
            return self._verification_size(batch) if mode is GraphMode.FULL else None
        if mode is GraphMode.FULL and batch.is_decode:
            return smallest_fitting(self.decode_sizes, batch.num_tokens)
        sizes = self.full_token_sizes if mode is GraphMode.FULL else self.token_sizes
        size = smallest_fitting(sizes, batch.num_tokens)
        if size is None or (max_padding is not None and size > max_padding * batch.num_tokens):
            return None
        fits = batch.num_chunks <= chunk_capacity(size)
        return size if fits and batch.num_prefills <= MAX_PREFILLS else None

    def _verification_size(self, batch: BatchDescriptor) -> int | None:
        """Return the smallest captured batch size, if its graph verifies as many drafts as the batch."""
        size = smallest_fitting(tuple(self.verification_sizes), batch.num_seqs)
        return size if size is not None and self.verification_sizes[size] == batch.query_len else None
