"""The table of graph modes by measured milliseconds.

Between two measured sizes, each mode's time is interpolated linearly. Within one captured size a step without a graph
computes its real rows, and a graph takes nearly the same time whatever its padding. The two lines cross where padding
costs more than it saves. So the smallest and the largest batch of every captured size are measured, and in a wide size
every doubling between them. The doublings are needed because a step without a graph takes the host's launch time until
the device's time is longer, and that is not linear.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from weft.config.graph_modes import GraphMode
from weft.config.graph_profile import GraphProfile, Timing
from weft.graph.batch_descriptor import BatchDescriptor

TIE = 1.01
"""Modes within this factor of the fastest count as equal; then the one that keeps the least memory goes first."""

_BY_MEMORY = (GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL)

Limits = tuple[tuple[int, GraphMode], ...]
"""``(up to so many tokens, mode)``, ascending."""


@dataclass(frozen=True, slots=True)
class ModeTable:
    """The measured mode of each batch, by the number of its tokens.

    Attributes:
        prefill, mixed, decode: of batches of prompts, of prompts and decodes, of decodes alone.
    """

    prefill: Limits = ()
    mixed: Limits = ()
    decode: Limits = ()

    @staticmethod
    def of(profile: GraphProfile) -> ModeTable:
        """The table that a profile's figures give."""
        return ModeTable(_limits(profile.prefill), _limits(profile.mixed), _limits(profile.decode))

    @staticmethod
    def always(mode: GraphMode, num_tokens: int) -> ModeTable:
        """Make a table with one mode for every batch of at most ``num_tokens`` tokens."""
        limits = ((num_tokens, mode),)
        return ModeTable(limits, limits, limits)

    def mode(self, batch: BatchDescriptor) -> GraphMode | None:
        """The fastest mode; None for a batch larger than those that were measured."""
        if batch.is_decode:
            return _find(self.decode, batch.num_tokens)
        return _find(self.mixed if batch.num_decodes else self.prefill, batch.num_tokens)

    def decode_sizes(self, sizes: Sequence[int]) -> list[int]:
        """Select the sizes of full decode graphs that some batch will use. ``sizes`` ascend."""
        return _used([self.decode], GraphMode.FULL, sizes)

    def token_sizes(self, mode: GraphMode, sizes: Sequence[int]) -> list[int]:
        """Select the token counts captured for ``mode`` that some batch will use. ``sizes`` ascend."""
        tables = [self.prefill, self.mixed]
        if mode is GraphMode.PIECEWISE:  # also decodes may run in pieces
            tables.append(self.decode)
        return _used(tables, mode, sizes)


def _used(tables: Sequence[Limits], mode: GraphMode, sizes: Sequence[int]) -> list[int]:
    return [
        size
        for before, size in pairwise([0, *sizes])
        if any(_find(limits, n) is mode for limits in tables for n in range(before + 1, size + 1))
    ]


def _find(limits: Limits, num_tokens: int) -> GraphMode | None:
    at = bisect.bisect_left(limits, num_tokens, key=lambda limit: limit[0])
    return limits[at][1] if at < len(limits) else None


def _limits(timings: Sequence[Timing]) -> Limits:
    """The fastest mode of every number of tokens up to the largest measured one; runs of the same mode are joined."""
    fastest: list[tuple[int, GraphMode]] = [(t.num_tokens, _fastest(t.ms)) for t in timings[:1]]
    for low, high in pairwise(timings):
        fastest += ((n, _fastest(_between(low, high, n))) for n in range(low.num_tokens + 1, high.num_tokens + 1))
    return tuple(_last(run) for _, run in groupby(fastest, key=lambda entry: entry[1]))


def _between(low: Timing, high: Timing, num_tokens: int) -> dict[str, float]:
    """Milliseconds of the modes that were measured at ``high`` (whose captured size the batch needs)."""
    share = (num_tokens - low.num_tokens) / (high.num_tokens - low.num_tokens)
    return {
        mode: ms if mode not in low.ms else low.ms[mode] + share * (ms - low.ms[mode]) for mode, ms in high.ms.items()
    }


def _fastest(ms: Mapping[str, float]) -> GraphMode:
    limit = TIE * min(ms.values())
    return next(mode for mode in _BY_MEMORY if ms.get(mode, float("inf")) <= limit)


def _last(run: Iterable[tuple[int, GraphMode]]) -> tuple[int, GraphMode]:
    *_, last = run
    return last


def points_to_measure(sizes: Sequence[int]) -> list[int]:
    """The smallest and the largest batch of each of the ascending captured sizes, and from the second size on every
    doubling of the smallest between them."""
    points = {n for before, size in pairwise([0, *sizes]) for n in (before + 1, size)}
    for before, size in pairwise(sizes):
        between = 2 * (before + 1)
        while between < size:
            points.add(between)
            between *= 2
    return sorted(points)
