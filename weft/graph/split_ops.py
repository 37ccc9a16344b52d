"""Split ops: the parts of a layer that stay outside captured pieces, made from one decorator on a method.

Job: turn a layer's method into an operation ``weft::<name>_with_output`` that writes into the caller's memory, and
decide per call whether the method runs at once or the pass breaks there. Owns: the registry of split ops by name, and
which ones break a pass. Does not know: what a layer computes, how pieces are captured or compiled.

A split op may read host values of the batch (lengths, counts), which a captured graph would freeze. It always sees the
real rows of the running batch and nothing else: the operation cuts its inputs to them, and zeroes the other rows of the
output, so that nothing downstream reads memory that nobody wrote.

    class Mixer(nn.Module):
        @split_op("mixer", width=lambda layer: layer.size)
        def mix(self, x: Tensor) -> Tensor: ...     # [T, *] -> [T, size], looks the batch up in the forward context

Outside a broken pass ``layer.mix(x)`` is the plain method call. The layer needs a ``name`` and must be registered under
it in the table that the forward context carries.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.errors import ConfigError
from weft.forward_context import NAMED_CALL, get_forward_context

Method = TypeVar("Method", bound=Callable[..., Tensor])

DEFAULT_SPLIT_OPS = ("attention",)
"""Ops that break a pass unless ``splitting_ops`` says otherwise. Gated DeltaNet finds all sizes on the device and stays
inside; it can be split off by name. So do the kernels of attention: a list without it leaves it inside."""


OUTPUT_SUFFIX = "_with_output"
"""Ends the name of a split op's operator, whose caller provides the output's memory."""


@dataclass(frozen=True, slots=True)
class SplitOp:
    """One kind of break.

    Attributes:
        name: as ``splitting_ops`` names it.
        width: columns of the output, from the layer.
        method: ``(layer, *inputs) -> output``, as the layer's class defines it.
        fill: ``(layer, inputs, out)``: run the layer's method on the real rows, write them, zero the others.
        operator: ``weft::<name>_with_output(*inputs, out, layer_name)``: ``fill`` with the layer looked up by name.
    """

    name: str
    width: Callable[[Any], int]
    method: Callable[..., Tensor]
    fill: Callable[[Any, Sequence[Tensor], Tensor], None]
    operator: Callable[..., None]


_LIBRARY = torch.library.Library("weft", "FRAGMENT")
_OPS: dict[str, SplitOp] = {}


def split_op(name: str, *, width: Callable[[Any], int]) -> Callable[[Method], Method]:
    """Make a method a split op.

    Args:
        name: unique; the operation is ``weft::<name>_with_output``.
        width: ``layer -> columns of the output``. Its rows and dtype are those of the first input.

    The method takes tensors ``[T, *]``, all with one row per token, and returns ``[T, width]``.
    """

    def decorate(method: Method) -> Method:
        assert name not in _OPS, f"split op {name!r} is defined twice"
        _, *parameters = inspect.signature(method).parameters
        op = _OPS[name] = _register(name, width, method, parameters)

        @functools.wraps(method)
        def call(layer: Any, *inputs: Tensor) -> Tensor:
            return run_split_op(op, layer, inputs)

        call.split_op = name  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return decorate


def run_split_op(op: SplitOp, layer: Any, inputs: tuple[Tensor, ...]) -> Tensor:
    """Run the op's method; or break the pass there, if the context says that it breaks at this op."""
    breaks = get_forward_context().breaks
    if breaks is None or op.name not in breaks.names:
        return op.method(layer, *inputs)
    return breaks.at(op, layer, inputs)


def split_op_named(name: str) -> SplitOp:
    """The split op that is defined under ``name``."""
    return _OPS[name]


def split_op_of_inputs(name: str, num_inputs: int) -> SplitOp:
    """The split op ``name`` whose layers have ``run(*inputs)`` and ``width``, registered at its first use."""
    if name not in _OPS:
        inputs = [f"x{number}" for number in range(num_inputs)]
        _OPS[name] = _register(name, lambda site: site.width, lambda site, *xs: site.run(*xs), inputs)
    return _OPS[name]


def _register(
    name: str, width: Callable[[Any], int], method: Callable[..., Tensor], parameters: Sequence[str]
) -> SplitOp:
    """Register the operation with its schema (``out`` is written), its implementation and its fake."""

    def fill(layer: Any, inputs: Sequence[Tensor], out: Tensor) -> None:
        count = get_forward_context().batch.num_tokens
        out[:count].copy_(method(layer, *(x[:count] for x in inputs)))
        out[count:].zero_()

    def run(*arguments: Any) -> None:
        *inputs, out, layer_name = arguments
        fill(get_forward_context().layers[layer_name], inputs, out)

    inputs = "".join(f"Tensor {parameter}, " for parameter in parameters)
    full_name = f"{name}{OUTPUT_SUFFIX}"
    _LIBRARY.define(f"{full_name}({inputs}Tensor(a!) out, str layer_name) -> ()")
    _LIBRARY.impl(full_name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"weft::{full_name}", lambda *_: None, lib=_LIBRARY)
    return SplitOp(name, width, method, fill, getattr(torch.ops.weft, full_name).default)


def output_like(op: SplitOp, layer: Any, inputs: Sequence[Tensor]) -> Tensor:
    """Fresh, unwritten memory for an op's output: ``[T, width]``."""
    return inputs[0].new_empty(inputs[0].shape[0], op.width(layer))


def split_ops_of(layers: Iterable[object]) -> tuple[str, ...]:
    """Names of the split ops that these layers define, sorted."""
    classes = {base for layer in layers for base in type(layer).__mro__}
    methods = (method for kind in classes for method in vars(kind).values())
    return tuple(sorted({method.split_op for method in methods if hasattr(method, "split_op")}))


def known_split_ops() -> tuple[str, ...]:
    """Names of all split ops that are defined, sorted."""
    return tuple(sorted(_OPS))


def select_split_ops(
    given: Iterable[str] | None = None, also: Iterable[str] = ()
) -> tuple[frozenset[str], tuple[str, ...]]:
    """The ops that break a pass, and names that are no op: of functions, methods and modules (``named_splits.py``).

    Args:
        given: names of ops, as ``attention`` or ``weft::attention_with_output``, and others. They replace the default
            list; if the first one starts with ``+``, they extend it. None: the default list.
        also: what the default list has beside ``DEFAULT_SPLIT_OPS``.

    Raises:
        ConfigError: a name that can be nothing of that.
    """
    defaults = frozenset(DEFAULT_SPLIT_OPS) | frozenset(also)
    if given is None:
        return defaults, ()
    names = list(given)
    extends = bool(names) and names[0].startswith("+")
    short = [n.removeprefix("+").removeprefix("weft::").removesuffix(OUTPUT_SUFFIX) for n in names]
    defined = [name for name in _OPS if not name.startswith(NAMED_CALL)]  # the others are calls in earlier models
    others = tuple(name for name in short if name not in defined)
    for name in others:
        if "." not in name and not name[:1].isupper():
            raise ConfigError(
                f"splitting_ops names {name!r}, which is no split op; there are {', '.join(defined)}. Other functions, "
                "methods and modules are named by their paths, as weft.ops.moe.fused_moe, SparseMoe.forward, "
                "model.layers.*.mlp"
            )
    chosen = frozenset(short).intersection(defined) | (defaults if extends else frozenset())
    return chosen, others
