"""Which sizes of which graphs a start captures.

Job: from settings and measured modes to four lists. Owns: what a mode captures. Does not know: graphs, devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.config import EngineConfig
from weft.forward_context import GraphMode
from weft.graph.dispatcher import CudaGraphMode
from weft.graph.profile import ModeTable
from weft.graph.sizes import decode_sizes, token_sizes


@dataclass(frozen=True, slots=True)
class CaptureSizes:
    """Ascending sizes, empty where nothing is captured.

    Attributes:
        decode: batch sizes of full decode graphs.
        forward, pieces: token counts of any batch's forward pass, as full graphs and in pieces.
        samples: how many tokens are drawn after those.
    """

    decode: Sequence[int] = ()
    forward: Sequence[int] = ()
    pieces: Sequence[int] = ()
    samples: Sequence[int] = ()

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest captured forward pass; 0 without any."""
        return max((*self.forward, *self.pieces), default=0)


def capture_sizes(config: EngineConfig, max_num_seqs: int, table: ModeTable | None = None) -> CaptureSizes:
    """What the configured mode uses.

    Args:
        max_num_seqs: the largest batch, after clamping to the caches.
        table: measured modes; sizes that no batch will run in are left out.
    """
    mode = CudaGraphMode(config.cuda_graph_mode)
    if mode is CudaGraphMode.NONE:
        return CaptureSizes()
    sequences = decode_sizes(max_num_seqs, config.cuda_graph_bs, config.cuda_graph_max_bs)
    tokens: list[int] = []
    if mode.mixed:
        given, largest = config.piecewise_cuda_graph_tokens, config.piecewise_cuda_graph_max_tokens
        tokens = token_sizes(config.max_num_batched_tokens, given, largest)
    decode = sequences if GraphMode.FULL in mode.decode else []
    forward = tokens if GraphMode.FULL in mode.mixed else []
    pieces = tokens if GraphMode.PIECEWISE in mode.mixed else []
    if table is not None:
        decode = table.decode_sizes(decode)
        forward, pieces = (
            table.token_sizes(m, s) for m, s in ((GraphMode.FULL, forward), (GraphMode.PIECEWISE, pieces))
        )
    return CaptureSizes(decode, forward, pieces, sequences if forward or pieces else ())
