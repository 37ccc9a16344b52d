"""Graph modes: their names, the rules of each, and the batch sizes that the rules use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class GraphMode(StrEnum):
    """How one forward pass runs: each operation launched, in captured pieces between split ops, or as one graph."""

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """The sizes of a batch that decide which graph runs.

    Attributes:
        num_tokens: tokens of the batch.
        uniform_decode: every sequence brings one token to an existing state and samples one.
        num_prefills: sequences that do not decode.
        num_chunks: number of chunks of these sequences; 0 without recurrent layers.
        num_decodes: sequences that decode.
    """

    num_tokens: int
    uniform_decode: bool = False
    num_prefills: int = 0
    num_chunks: int = 0
    num_decodes: int = 0


class MeasuredModes(Protocol):
    """Graph modes that a profile of ``weft tune`` chooses (``pieces/mode_table.py``)."""

    def mode(self, batch: BatchDescriptor) -> GraphMode | None:
        """Return the fastest mode; None for a batch larger than the measured ones."""
        ...

    def decode_sizes(self, sizes: Sequence[int]) -> list[int]:
        """Return those of the ascending ``sizes`` of full decode graphs that some batch runs in."""
        ...

    def token_sizes(self, mode: GraphMode, sizes: Sequence[int]) -> list[int]:
        """Return those of the ascending token counts captured for ``mode`` that some batch runs in."""
        ...


class CudaGraphMode(StrEnum):
    """The configured mode: the rules by which batches run as graphs."""

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"
    TUNED = "TUNED"
    """The modes of a profile of ``weft tune``. A profile selects it; users cannot name it."""

    @property
    def decode(self) -> tuple[GraphMode, ...]:
        """Graphs for a batch of decodes alone, best first."""
        return _RULES[self][0]

    @property
    def mixed(self) -> tuple[GraphMode, ...]:
        """Graphs for a batch with prefills, best first."""
        return _RULES[self][1]


_FULL, _PIECES = GraphMode.FULL, GraphMode.PIECEWISE
_RULES: dict[CudaGraphMode, tuple[tuple[GraphMode, ...], tuple[GraphMode, ...]]] = {
    CudaGraphMode.NONE: ((), ()),
    CudaGraphMode.PIECEWISE: ((_PIECES,), (_PIECES,)),
    CudaGraphMode.FULL: ((_FULL,), (_FULL,)),
    CudaGraphMode.FULL_DECODE_ONLY: ((_FULL,), ()),
    CudaGraphMode.FULL_AND_PIECEWISE: ((_FULL, _PIECES), (_PIECES,)),
    CudaGraphMode.TUNED: ((_FULL, _PIECES), (_FULL, _PIECES)),
}
