"""Graph modes that may be configured, and the rules of each."""

from enum import StrEnum


class GraphMode(StrEnum):
    """How one forward pass runs: each operation launched, in captured pieces between split ops, or as one graph."""

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"


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
