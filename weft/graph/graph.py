"""Capture and replay of device work: real CUDA graphs, and an emulator that behaves alike on the CPU.

Job: one interface over both. Owns: the capture stream and the memory pool that all graphs of an engine share.
Does not know: what is captured.

A captured function reads and writes fixed memory. What it read on the host at capture (Python numbers, which branch was
taken) is frozen; a replay repeats the device work only. The emulator keeps these rules: it records the operations that
reach the dispatcher, with their tensors, and a replay executes that tape and none of the Python. So a value frozen at
capture, a buffer that was rebound instead of copied into, or a host synchronisation inside shows on the CPU as it would
on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


class Graph(Protocol):
    """Recorded device work."""

    def replay(self) -> None:
        """Do the recorded work again, on the same memory."""
        ...


class GraphPool(Protocol):
    """Where graphs come from; graphs of one pool share memory and must not run at the same time."""

    def capture(self, function: Callable[[], T]) -> tuple[Graph, T]:
        """Run ``function`` once, recording its device work.

        Returns:
            The graph, and what the function returned: tensors that a replay fills again.
        """
        ...


def make_pool(device: torch.device) -> GraphPool:
    """CUDA graphs on a GPU, the emulator on the CPU."""
    return CudaGraphPool(device) if device.type == "cuda" else EmulatedGraphPool()


# -- CUDA ------------------------------------------------------------------------------------------------------------


class CudaGraphPool:
    """CUDA graphs that share one memory pool, captured on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._handle = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, function: Callable[[], T]) -> tuple[Graph, T]:
        graph = torch.cuda.CUDAGraph()
        # Raw begin and end: torch.cuda.graph() would collect garbage and empty the allocator's cache at every capture.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
            try:
                outputs = function()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph, outputs


# -- emulator --------------------------------------------------------------------------------------------------------


class EmulatedGraphPool:
    """Tapes of operations; see the module docstring."""

    def capture(self, function: Callable[[], T]) -> tuple[Graph, T]:
        tape = Tape()
        with tape:
            outputs = function()
        return tape, outputs


class Tape(TorchDispatchMode):
    """Records operations while active; ``replay`` executes them on the recorded tensors."""

    FORBIDDEN = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2")
    """Operations whose result the host waits for, or whose output size depends on data. So does indexing by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[tuple[int, Tensor]]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.name() in self.FORBIDDEN or (func.name().startswith("aten::index") and _has_mask(args)):
            raise RuntimeError(
                f"{func.name()} inside a captured graph: the host would have to wait for the device; "
                "use an operation whose sizes and values stay on the device"
            )
        result = func(*args, **kwargs)
        fresh = _fresh_outputs(result, args, kwargs)
        if fresh or not func.is_view:  # "views" such as reshape and to() copy when they must
            self._steps.append((func, args, kwargs, fresh))
        return result

    def replay(self) -> None:
        for func, args, kwargs, outputs in self._steps:
            result = func(*args, **kwargs)
            if outputs:
                leaves = [result] if isinstance(result, Tensor) else tree_leaves(result)
                for place, recorded in outputs:
                    recorded.copy_(leaves[place])


def _has_mask(args: tuple[Any, ...]) -> bool:
    indices = [leaf for arg in args[1:] if isinstance(arg, (list, tuple)) for leaf in arg]
    return any(isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in indices)


def _fresh_outputs(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[int, Tensor]]:
    """The tensors of ``result`` that are not arguments written in place, with their places among its leaves."""
    given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
    tensors = [(place, leaf) for place, leaf in enumerate(tree_leaves(result)) if isinstance(leaf, Tensor)]
    return [(place, t) for place, t in tensors if t.numel() and t.untyped_storage().data_ptr() not in given]
