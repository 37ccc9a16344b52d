"""A callable that replays a graph where there is one for the running batch.

Job: capture a function for several batches, and per call either replay or run it, as the forward context says.
Owns: the captured entries. Does not know: how graphs are recorded, what the function computes, which batch runs how.

A wrapper has one run-time mode and is transparent in every other: with ``FULL`` wrapped around ``PIECEWISE``, a full
graph records the operations of the model itself, because the inner wrapper steps aside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.forward_context import BatchDescriptor, GraphMode, get_forward_context
from weft.graph.graph import Graph

Signature = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int]
"""Shape, strides, dtype, address."""


@dataclass(frozen=True, slots=True)
class _Entry:
    graph: Graph
    output: Tensor
    signatures: Mapping[str, Signature]


@dataclass(slots=True)
class WrapperCounters:
    """Totals: graphs captured, calls that replayed one, calls that ran the function."""

    captures: int = 0
    replays: int = 0
    plain_calls: int = 0


class GraphWrapper:
    """``function(**tensors) -> tensor``, replayed in ``mode``.

    Args:
        function: reads its arguments' memory; the arguments of a replay must be those of the capture.
        mode: the mode of the forward context in which graphs are replayed.
        capture: records one run of a callable; returns the graph and the memory of its result.
        debug: check the arguments (and ``watched``) against the capture at every replay.
        watched: other tensors that the function reads, by name; their memory must not move either.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        mode: GraphMode,
        capture: Callable[[Callable[[], Tensor]], tuple[Graph, Tensor]],
        *,
        debug: bool = False,
        watched: Mapping[str, Tensor] | None = None,
    ) -> None:
        assert mode is not GraphMode.NONE, "a graph wrapper needs a mode in which it replays"
        self.counters = WrapperCounters()
        self._function, self._mode, self._record = function, mode, capture
        self._debug, self._watched = debug, watched or {}
        self._entries: dict[BatchDescriptor, _Entry] = {}

    @property
    def descriptors(self) -> tuple[BatchDescriptor, ...]:
        """Batches that have a graph, in the order of capture."""
        return tuple(self._entries)

    def graph(self, descriptor: BatchDescriptor) -> Graph:
        """What is replayed for a captured batch."""
        return self._entries[descriptor].graph

    def capture(self, descriptor: BatchDescriptor, **tensors: Tensor) -> None:
        """Record the function on these tensors as the graph of ``descriptor``."""
        assert descriptor not in self._entries, f"{descriptor} is captured already"
        graph, output = self._record(lambda: self._function(**tensors))
        self._entries[descriptor] = _Entry(graph, output, self._signatures(tensors))
        self.counters.captures += 1

    def __call__(self, **tensors: Tensor) -> Tensor:
        """Replay the graph of the context's batch, or run the function if the context's mode is another.

        Returns:
            The function's result; after a replay valid until the next one.

        Raises:
            RuntimeError: in debug mode, a tensor that is not where the capture read it.
        """
        context = get_forward_context()
        if context.mode is not self._mode:
            self.counters.plain_calls += 1
            return self._function(**tensors)
        assert context.descriptor in self._entries, f"{context.descriptor} has no {self._mode} graph"
        entry = self._entries[context.descriptor]
        if self._debug:
            self._check(entry, tensors)
        entry.graph.replay()
        self.counters.replays += 1
        return entry.output

    def _signatures(self, tensors: Mapping[str, Tensor]) -> dict[str, Signature]:
        every = {**tensors, **self._watched}
        return {name: (tuple(t.shape), t.stride(), t.dtype, t.data_ptr()) for name, t in every.items()}

    def _check(self, entry: _Entry, tensors: Mapping[str, Tensor]) -> None:
        now = self._signatures(tensors)
        for name, then in entry.signatures.items():
            if name not in now:
                raise RuntimeError(f"the captured graph read {name}, which this call does not give")
            if now[name] == then:
                continue
            what = zip(("shape", "strides", "dtype", "address"), then, now[name], strict=True)
            changes = ", ".join(f"{part} {old} is now {new}" for part, old, new in what if old != new)
            raise RuntimeError(
                f"{name} is not the tensor that the captured graph reads ({changes}); copy into the static tensor"
            )
