"""Capture and replay of device work: real CUDA graphs, and an emulator that behaves alike on the CPU.

Job: one interface over both. Owns: the capture stream and the memory pool that all graphs of an engine share.
Does not know: what is captured.

A captured function reads and writes fixed memory. Its host values at capture (Python numbers, branches taken) are
frozen; a replay repeats the device work only. The emulator keeps these rules. It records the operations that reach the
dispatcher, with their tensors; a replay executes the tape and no Python. So the CPU shows the same errors as a GPU: a
value frozen at capture, a buffer that was rebound instead of copied into, or a host synchronisation inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")


class Graph(Protocol):
    """Recorded device work."""

    def replay(self) -> None:
        """Do the recorded work again, on the same memory."""
        ...


class Recording(Protocol):
    """A stretch of device work of which parts become graphs, in order."""

    def begin(self) -> None:
        """Record device work from here on."""
        ...

    def end(self) -> Graph:
        """Return the graph of the work since ``begin``, and stop recording until the next ``begin``."""
        ...


class GraphPool(Protocol):
    """Records graphs. The graphs of a pool share memory and must not run at the same time."""

    def recording(self) -> AbstractContextManager[Recording]:
        """A scope in which graphs are recorded one after the other. Tensors that outlive a graph keep their memory."""
        ...


def capture(pool: GraphPool, function: Callable[[], T]) -> tuple[Graph, T]:
    """Run ``function`` once, recording all of its device work as one graph.

    Returns:
        The graph, and what the function returned: tensors that a replay fills again.
    """
    with pool.recording() as recording:
        recording.begin()
        outputs = function()
        return recording.end(), outputs


def make_pool(device: torch.device) -> GraphPool:
    """CUDA graphs on a GPU, the emulator on the CPU."""
    return CudaGraphPool(device) if device.type == "cuda" else EmulatedGraphPool()


class CudaGraphPool:
    """CUDA graphs that share one memory pool, captured on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._handle = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def recording(self) -> Iterator[CudaRecording]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            recording = CudaRecording(self._handle)
            try:
                yield recording
            finally:
                recording.abandon()
        torch.cuda.current_stream().wait_stream(self._stream)


class CudaRecording:
    """Raw stream capture. ``torch.cuda.graph()`` would collect garbage and empty the allocator's cache every time."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._graph: torch.cuda.CUDAGraph | None = None

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")

    def end(self) -> Graph:
        graph, self._graph = self._graph, None
        assert graph is not None, "end without begin"
        graph.capture_end()
        return graph

    def abandon(self) -> None:
        """End a capture that an exception left open."""
        if self._graph is not None:
            self.end()


class EmulatedGraphPool:
    """Tapes of operations; see the module docstring."""

    @contextmanager
    def recording(self) -> Iterator[EmulatedRecording]:
        recording = EmulatedRecording()
        try:
            yield recording
        finally:
            recording.abandon()


class EmulatedRecording:
    """Records one tape after the other."""

    def __init__(self) -> None:
        self._tape: Tape | None = None

    def begin(self) -> None:
        self._tape = Tape()
        self._tape.__enter__()

    def end(self) -> Graph:
        tape, self._tape = self._tape, None
        assert tape is not None, "end without begin"
        tape.__exit__(None, None, None)
        return tape

    def abandon(self) -> None:
        if self._tape is not None:
            self.end()


class Tape(TorchDispatchMode):
    """Records operations while active; ``replay`` executes them on the recorded tensors."""

    FORBIDDEN = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2")
    """Operations whose result the host waits for, or whose output size depends on data, as in indexing by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[tuple[int, Tensor]]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.name() == "aten::lift_fresh" and args[0].dim():
            raise RuntimeError(
                "a list of numbers becomes a tensor inside a captured graph: a GPU refuses to copy it from the host; "
                "make the tensor before, or by operations on the device"
            )
        if func.name() in self.FORBIDDEN or (func.name().startswith("aten::index") and _has_mask(args)):
            raise RuntimeError(
                f"{func.name()} inside a captured graph: the host would have to wait for the device; "
                "use an operation whose sizes and values stay on the device"
            )
        result = func(*args, **kwargs)
        fresh = _fresh_outputs(result, args, kwargs)
        if fresh or not func.is_view:  # "views" such as reshape and to() copy when they must
            self.steps.append((func, args, kwargs, fresh))
        return result

    def replay(self) -> None:
        for func, args, kwargs, outputs in self.steps:
            result = func(*args, **kwargs)
            if outputs:
                tensors = [*_tensors((result,))]
                for place, recorded in outputs:
                    _stored(recorded).copy_(_stored(tensors[place]))


def _stored(tensor: Tensor) -> Tensor:
    """A tensor without the repetitions of expanded dimensions."""
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


def _has_mask(args: tuple[Any, ...]) -> bool:
    indices = [leaf for arg in args[1:] if isinstance(arg, (list, tuple)) for leaf in arg]
    return any(isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in indices)


def _fresh_outputs(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[int, Tensor]]:
    """The tensors of ``result`` that are not arguments written in place, with their places among its tensors."""
    tensors = [(place, t) for place, t in enumerate(_tensors((result,))) if t.numel()]
    if not tensors:
        return []
    given = {t.untyped_storage().data_ptr() for t in _tensors((*args, *kwargs.values()))}
    return [(place, t) for place, t in tensors if t.untyped_storage().data_ptr() not in given]


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operation's arguments or results, also those in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
