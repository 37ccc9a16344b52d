"""Recording what captured graphs consist of: operations as readable code, and the time of each replay.

Job: a graph pool around another one that notes every operation while it is recorded, and every replay while a stopwatch
is on. Owns: the notes. Does not know: models, layers, why something is captured.

Operations are seen where they reach torch's dispatcher, Triton kernels where they are launched. Notes keep shapes and
addresses and no tensor, so that memory is given back in the capture as it is without them.
"""

from __future__ import annotations

import itertools
import math
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.graph.graph import Graph, GraphPool, Recording

T = TypeVar("T")

Note = Callable[[str, tuple[Any, ...], Mapping[str, Any]], None]
"""``(kernel, args, kwargs)``: notes a launch."""
LaunchWatch = Callable[[Note], AbstractContextManager[None]]
"""A scope in which launches of kernels are noted, and done."""

_GATHERS = ("aten.embedding", "aten.index_select", "aten.index", "aten.gather")
"""Operations that read of their first argument only as much as they return."""


Place = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Address, shape and strides: two tensors at one place are one."""


def place_of(tensor: Tensor) -> Place:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that an operation takes or makes.

    Attributes:
        number: tells tensors apart, over all graphs of a pool.
        place: of its elements.
        storage: address of the memory that it is a part of.
        dtype: as ``float32``.
        num_bytes: of its elements.
    """

    number: int
    place: Place
    storage: int
    dtype: str
    num_bytes: int

    @property
    def type_text(self) -> str:
        """Return dtype and shape, for example ``float32[512, 64]``."""
        return f"{self.dtype}{list(self.place[1])}"

    def name(self, names: Mapping[Place, str]) -> str:
        """Its name in ``Operation.code``."""
        return names.get(self.place, f"v{self.number}")


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation, in order.

    Attributes:
        name: ``aten.mm``, or ``kernel[grid]`` of a Triton kernel.
        args, kwargs: with a ``Value`` in the place of each tensor.
        results: tensors that are new, or new views.
        is_kernel: it does work on the device; a view does not.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Value, ...]
    is_kernel: bool

    @property
    def inputs(self) -> list[Value]:
        return [leaf for leaf in tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, Value)]

    def num_bytes(self, without: Collection[int] = ()) -> int:
        """Return the bytes of the operation's inputs and results. Each tensor counts once and whole.

        Of a table that a gather reads, as many bytes count as the gather returns.

        Args:
            without: storages that do not count.
        """
        if not self.is_kernel:
            return 0
        made = sum(value.num_bytes for value in self.results)
        given = {value.number: value.num_bytes for value in self.inputs if value.storage not in without}
        if self.name in _GATHERS and self.inputs[0].number in given:
            given[self.inputs[0].number] = made
        return made + sum(given.values())

    @property
    def signature(self) -> tuple[object, ...]:
        """The same for operations that do the same work on other tensors."""
        return (self.name, *((value.dtype, value.place[1]) for value in (*self.inputs, *self.results)))

    def code(self, names: Mapping[Place, str]) -> str:
        """The operation as a line of Python; tensors at no named place are ``v<number>``."""
        words = [_word(arg, names) for arg in self.args]
        words += [f"{name}={_word(value, names)}" for name, value in self.kwargs.items()]
        call = f"{self.name}({', '.join(words)})"
        if not self.results:
            return call
        left = ", ".join(value.name(names) for value in self.results)
        return f"{left} = {call}  # {', '.join(value.type_text for value in self.results)}"


def _word(value: Any, names: Mapping[Place, str]) -> str:
    match value:
        case Value():
            return value.name(names)
        case list() | tuple():
            return f"[{', '.join(_word(item, names) for item in value)}]"
        case float() if not math.isfinite(value):
            return f'float("{value}")'
        case None | bool() | int() | float() | str() | torch.dtype() | torch.device():
            return repr(value)
        case _:
            return repr(str(value))


class _Numbers:
    """Numbers of live tensors; a dead tensor's number is not given again."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._next = itertools.count()

    def value(self, tensor: Tensor) -> Value:
        reference, number = self._known.get(id(tensor), (None, -1))
        if reference is None or reference() is not tensor:
            number = next(self._next)
            self._known[id(tensor)] = (weakref.ref(tensor), number)
        return Value(
            number,
            place_of(tensor),
            tensor.untyped_storage().data_ptr(),
            str(tensor.dtype).removeprefix("torch."),
            tensor.numel() * tensor.element_size(),
        )


class _Notes(TorchDispatchMode):
    """Notes operations while active."""

    def __init__(self, numbers: _Numbers) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._numbers = numbers

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        noted = self._noted(args), {name: self._noted(value) for name, value in kwargs.items()}
        result = func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        fresh = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and all(leaf is not g for g in given)]
        old = {tensor.untyped_storage().data_ptr() for tensor in given}
        makes_memory = any(leaf.numel() and leaf.untyped_storage().data_ptr() not in old for leaf in fresh)
        is_kernel = makes_memory or not func.is_view  # "views" such as reshape and to() copy when they must
        if fresh or is_kernel:
            values = tuple(self._numbers.value(leaf) for leaf in fresh)
            self.operations.append(Operation(str(func).removesuffix(".default"), *noted, values, is_kernel))
        return result

    def launched(self, kernel: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        noted = {name: self._noted(value) for name, value in kwargs.items()}
        self.operations.append(Operation(kernel, self._noted(args), noted, (), is_kernel=True))

    def _noted(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._numbers.value(value)
        if isinstance(value, (list, tuple)):
            return tuple(self._noted(item) for item in value)
        return value


@dataclass(slots=True)
class Stopwatch:
    """Moments of replays, while ``on``: ``(graph, begin, end)``, in order."""

    device: torch.device
    on: bool = False
    laps: list[tuple[GraphWithOps, Any, Any]] = field(default_factory=list)

    def moment(self) -> Any:
        """Now, on the device's own time line."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, begin: Any, end: Any) -> float:
        """Milliseconds between two moments; on a GPU after a synchronisation."""
        return begin.elapsed_time(end) if self.device.type == "cuda" else (end - begin) * 1e3


class GraphWithOps:
    """A graph that knows its operations."""

    def __init__(self, graph: Graph, operations: Sequence[Operation], stopwatch: Stopwatch) -> None:
        self.operations = tuple(operations)
        self._graph, self._stopwatch = graph, stopwatch

    def replay(self) -> None:
        if not self._stopwatch.on:
            self._graph.replay()
            return
        begin = self._stopwatch.moment()
        self._graph.replay()
        self._stopwatch.laps.append((self, begin, self._stopwatch.moment()))


class OpRecordingPool:
    """Graphs of another pool, as ``GraphWithOps``.

    Args:
        launch_watch: how kernels are seen that do not reach torch's dispatcher; None: there are none.
    """

    def __init__(self, pool: GraphPool, device: torch.device, launch_watch: LaunchWatch | None = None) -> None:
        self.stopwatch = Stopwatch(device)
        self._pool, self._numbers, self._launch_watch = pool, _Numbers(), launch_watch

    @contextmanager
    def recording(self) -> Iterator[OpRecording]:
        with self._pool.recording() as recording:
            recorder = OpRecording(recording, self._numbers, self.stopwatch, self._launch_watch)
            try:
                yield recorder
            finally:
                recorder.abandon()


class OpRecording:
    """Another recording, with notes."""

    def __init__(
        self, recording: Recording, numbers: _Numbers, stopwatch: Stopwatch, launch_watch: LaunchWatch | None
    ) -> None:
        self._recording, self._numbers, self._stopwatch = recording, numbers, stopwatch
        self._launch_watch = launch_watch
        self._notes = _Notes(numbers)
        self._active: AbstractContextManager[Any] | None = None

    def begin(self) -> None:
        self._recording.begin()
        self._notes = _Notes(self._numbers)
        with ExitStack() as stack:
            if self._launch_watch is not None:
                stack.enter_context(self._launch_watch(self._notes.launched))
            stack.enter_context(self._notes)
            self._active = stack.pop_all()

    def end(self) -> Graph:
        self.abandon()
        return GraphWithOps(self._recording.end(), self._notes.operations, self._stopwatch)

    def abandon(self) -> None:
        """Take no more notes."""
        active, self._active = self._active, None
        if active is not None:
            active.__exit__(None, None, None)
