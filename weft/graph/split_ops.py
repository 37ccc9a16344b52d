"""Split ops: methods of layers at which a forward pass can be split into pieces.

Job: mark such methods, and decide per call whether the method runs at once or the pass breaks there. Owns: the registry
of split ops by name. Does not know: what a layer computes, how a broken pass goes on (``weft/pieces``).

A split op may read host values of the batch (lengths, counts), which a captured graph would freeze::

    class Mixer(nn.Module):
        @split_op("mixer", width=lambda layer: layer.size)
        def mix(self, x: Tensor) -> Tensor: ...     # [T, *] -> [T, size], looks the batch up in the forward context

Outside a broken pass ``layer.mix(x)`` is the plain method call. The layer needs a ``name`` and must be registered under
it in the table that the forward context carries.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from weft.forward_context import get_forward_context

Method = TypeVar("Method", bound=Callable[..., Tensor])

DEFAULT_SPLIT_OPS = ("attention",)
"""Ops that break a pass unless ``splitting_ops`` says otherwise. Gated DeltaNet finds all sizes on the device and stays
inside; it can be split off by name. Attention stays inside too if the list does not name it."""


@dataclass(frozen=True, slots=True)
class SplitOp:
    """One kind of break.

    Attributes:
        name: as ``splitting_ops`` names it.
        width: columns of the output, from the layer.
        method: ``(layer, *inputs) -> output``, as the layer's class defines it.
        inputs: names of the inputs, in order.
    """

    name: str
    width: Callable[[Any], int]
    method: Callable[..., Tensor]
    inputs: tuple[str, ...]


_OPS: dict[str, SplitOp] = {}


def split_op(name: str, *, width: Callable[[Any], int]) -> Callable[[Method], Method]:
    """Make a method a split op.

    Args:
        name: unique.
        width: ``layer -> columns of the output``. Its rows and dtype are those of the first input.

    The method takes tensors ``[T, *]``, all with one row per token, and returns ``[T, width]``.
    """

    def decorate(method: Method) -> Method:
        _, *inputs = inspect.signature(method).parameters
        op = register(SplitOp(name, width, method, tuple(inputs)))

        @functools.wraps(method)
        def call(layer: Any, *inputs: Tensor) -> Tensor:
            return run_split_op(op, layer, inputs)

        call.split_op = name  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return decorate


def register(op: SplitOp) -> SplitOp:
    """Add ``op`` to the registry. Returns ``op``."""
    assert op.name not in _OPS, f"split op {op.name!r} is defined twice"
    _OPS[op.name] = op
    return op


def run_split_op(op: SplitOp, layer: Any, inputs: tuple[Tensor, ...]) -> Tensor:
    """Run the op's method; or break the pass there, if the context says that it breaks at this op."""
    breaks = get_forward_context().breaks
    if breaks is None or op.name not in breaks.names:
        return op.method(layer, *inputs)
    return breaks.at(op, layer, inputs)


def split_op_named(name: str) -> SplitOp:
    return _OPS[name]


def split_ops_of(layers: Iterable[object]) -> tuple[str, ...]:
    """Return the sorted names of the split ops that these layers define."""
    classes = {base for layer in layers for base in type(layer).__mro__}
    methods = (method for kind in classes for method in vars(kind).values())
    return tuple(sorted({method.split_op for method in methods if hasattr(method, "split_op")}))


def known_split_ops() -> tuple[str, ...]:
    """Return the sorted names of all split ops that are defined."""
    return tuple(sorted(_OPS))
