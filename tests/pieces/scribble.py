"""Rubbish in the memory of graphs and pieces, as graphs that share memory leave it: nothing may depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from weft.graph.graph import EmulatedGraphPool, EmulatedRecording, Graph, Tape
from weft.pieces.capture import CrossingBuffers


class ScribblingPool(EmulatedGraphPool):
    """Remembers its tapes."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []

    @contextmanager
    def recording(self) -> Iterator[EmulatedRecording]:
        with super().recording() as recording:
            end = recording.end

            def noted() -> Graph:
                tape = end()
                assert isinstance(tape, Tape)
                self.tapes.append(tape)
                return tape

            recording.end = noted  # type: ignore[method-assign]
            yield recording

    def scribble(self) -> None:
        """Overwrite all that graphs of this pool computed with NaN, or the lowest number."""
        for tape in self.tapes:
            for _, _, _, outputs in tape.steps:
                for _, tensor in outputs:
                    tensor.fill_(_rubbish(tensor.dtype))


def scribble_buffers(buffers: CrossingBuffers) -> None:
    """Overwrite the floating-point tensors that cross breaks with NaN."""
    for buffer in buffers.named().values():
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)


def num_bytes(buffers: CrossingBuffers) -> int:
    return sum(buffer.nbytes for buffer in buffers.named().values())


def _rubbish(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).min
