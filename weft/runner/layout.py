"""Offsets of requests on a step's flat token axis."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.messages import ScheduledRequest


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the requests of a step lie, ``[S]`` int64 each.

    Attributes:
        rows: of the runner's tables.
        first: position of the first token to run.
        counts: tokens to run.
        seq_lens: tokens after this step.
        bounds: ``[S + 1]``, where each request begins on the flat token axis, and the end.
    """

    rows: np.ndarray
    first: np.ndarray
    counts: np.ndarray
    seq_lens: np.ndarray
    bounds: np.ndarray

    @staticmethod
    def of(requests: list[ScheduledRequest]) -> Layout:
        rows, first, counts = (
            np.array(column, dtype=np.int64)
            for column in ([r.row for r in requests], [r.start for r in requests], [r.num_tokens for r in requests])
        )
        bounds = np.zeros(len(requests) + 1, dtype=np.int64)
        np.cumsum(counts, out=bounds[1:])
        return Layout(rows, first, counts, first + counts, bounds)
