"""The sizes of each kind of graph that a start captures, by pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.config import EngineConfig
from weft.config.graph_modes import CudaGraphMode, GraphMode
from weft.errors import ConfigError
from weft.graph.batch_descriptor import MeasuredModes

MAX_DECODE_SIZE = 1024
"""Largest decode batch that is captured by default."""

_STEPS = ((8, 8), (16, 64), (32, 128), (64, 256), (128, 512))
"""``(step, from)`` pairs after 1, 2, 4, 8: spacing 8 up to 64, 16 up to 128, and so on: little padding."""


def decode_sizes(max_num_seqs: int, given: Sequence[int] | None = None, largest: int | None = None) -> list[int]:
    """Ascending batch sizes to capture.

    Args:
        max_num_seqs: the largest batch that can occur.
        given: the user's own list; sizes above ``max_num_seqs`` are left out.
        largest: the largest size to capture (default 1,024, or the largest given).

    Raises:
        ConfigError: the user's list holds no usable size.
    """
    if given is not None:
        return _usable("cuda_graph_bs", given, min(max_num_seqs, largest or max_num_seqs))
    limit = min(max_num_seqs, largest or MAX_DECODE_SIZE)
    sizes_wanted = {1, 2, 4, 8, limit}
    for i, (step, start) in enumerate(_STEPS):
        end = _STEPS[i + 1][1] if i + 1 < len(_STEPS) else MAX_DECODE_SIZE
        sizes_wanted.update(range(start + step, end + 1, step))
    return sorted(size for size in sizes_wanted if size <= limit)


def token_sizes(max_num_tokens: int, given: Sequence[int] | None = None, largest: int | None = None) -> list[int]:
    """Ascending token counts (buckets) to capture in pieces: powers of two up to 16, then four per doubling.

    Args:
        max_num_tokens: the largest step that can occur.
        given: the user's own list; sizes above the limit are left out.
        largest: the largest size to capture (default: ``max_num_tokens``).

    Raises:
        ConfigError: the user's list holds no usable size.
    """
    limit = min(max_num_tokens, largest or max_num_tokens)
    if given is not None:
        return _usable("piecewise_cuda_graph_tokens", given, limit)
    wanted = {1, 2, 4, 8, 16, limit}
    start = 16
    while start < limit:
        wanted.update(range(start, 2 * start, start // 4))
        start *= 2
    return sorted(size for size in wanted if size <= limit)


def _usable(name: str, given: Sequence[int], limit: int) -> list[int]:
    sizes = sorted({size for size in given if 0 < size <= limit})
    if not sizes:
        raise ConfigError(f"{name}={list(given)} has no size from 1 to {limit}; name some, or leave it out")
    return sizes


@dataclass(frozen=True, slots=True)
class CaptureSizes:
    """Ascending sizes, empty where nothing is captured.

    Attributes:
        decode: batch sizes of full decode graphs.
        verification: batch sizes of steps in which every sequence verifies drafts.
        forward, pieces: token counts of any batch's forward pass, as full graphs and in pieces.
        samples: how many tokens are sampled after those.
    """

    decode: Sequence[int] = ()
    forward: Sequence[int] = ()
    pieces: Sequence[int] = ()
    samples: Sequence[int] = ()
    verification: Sequence[int] = ()

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest forward pass that is captured apart from its sampling; 0 without any."""
        return max((*self.forward, *self.pieces), default=0)

    @staticmethod
    def of(
        config: EngineConfig,
        max_num_seqs: int,
        table: MeasuredModes | None = None,
        *,
        max_model_len: int | None = None,
    ) -> CaptureSizes:
        """Return the sizes that the configured mode uses.

        Args:
            max_num_seqs, max_model_len: the largest batch and the longest sequence, after clamping to the caches.
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
            forward = table.token_sizes(GraphMode.FULL, forward)
            pieces = table.token_sizes(GraphMode.PIECEWISE, pieces)
        samples = sequences if forward or pieces else ()
        verification: list[int] = []
        if config.verifies and GraphMode.FULL in mode.decode:
            room, longest = config.max_num_batched_tokens, max_model_len or config.max_model_len
            drafts = ((size, config.num_drafts_at(size)) for size in sequences)
            verification = [size for size, count in drafts if 0 < count < longest and size * (1 + count) <= room]
        return CaptureSizes(decode, forward, pieces, samples, verification)
