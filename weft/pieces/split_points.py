"""Where a pass is split: the names that ``splitting_ops`` may hold, and an operator for each split op.

Job: choose the split ops that break a pass, and register an operation ``weft::<name>_with_output`` for each, which
writes into the caller's memory. Does not know: how pieces are captured or compiled.

A split op gets the real rows of the running batch only. The operation cuts the inputs to these rows and zeroes the
output's other rows, so that no later operation reads unwritten memory.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.errors import ConfigError
from weft.forward_context import get_forward_context
from weft.graph.split_ops import DEFAULT_SPLIT_OPS, SplitOp, known_split_ops, register, split_op_named

OUTPUT_SUFFIX = "_with_output"
"""Suffix of the name of a split op's operator, whose caller provides the output's memory."""

NAMED_CALL = "named_"
"""Prefix of the names of split ops that ``splitting_ops`` made of functions, methods and modules."""

_LIBRARY = torch.library.Library("weft", "FRAGMENT")


def select_split_ops(
    given: Iterable[str] | None = None, also: Iterable[str] = ()
) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the ops that break a pass, and names that are no op: functions, methods and modules (``named_splits.py``).

    Args:
        given: names of ops, as ``attention`` or ``weft::attention_with_output``, and paths. They replace the default
            list, or extend it if the first name starts with ``+``. None stands for the default list.
        also: ops that the default list has besides ``DEFAULT_SPLIT_OPS``.

    Raises:
        ConfigError: a name is neither an op nor a path.
    """
    defaults = frozenset(DEFAULT_SPLIT_OPS) | frozenset(also)
    if given is None:
        return defaults, ()
    names = list(given)
    extends = bool(names) and names[0].startswith("+")
    short = [n.removeprefix("+").removeprefix("weft::").removesuffix(OUTPUT_SUFFIX) for n in names]
    defined = [name for name in known_split_ops() if not name.startswith(NAMED_CALL)]  # those are of earlier models
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


def split_op_of_inputs(name: str, num_inputs: int) -> SplitOp:
    """Return the split op ``name`` of layers with ``run(*inputs)`` and ``width``; its first use registers it."""
    if name not in known_split_ops():
        inputs = tuple(f"x{number}" for number in range(num_inputs))
        register(SplitOp(name, lambda site: site.width, lambda site, *xs: site.run(*xs), inputs))
    return split_op_named(name)


def write_real_rows(op: SplitOp, layer: Any, inputs: Sequence[Tensor], out: Tensor) -> None:
    """Run the layer's method on the real rows, write its result to ``out``, and zero the other rows of ``out``."""
    count = get_forward_context().batch.num_tokens
    out[:count].copy_(op.method(layer, *(x[:count] for x in inputs)))
    out[count:].zero_()


def output_like(op: SplitOp, layer: Any, inputs: Sequence[Tensor]) -> Tensor:
    """Return fresh, unwritten memory for an op's output: ``[T, width]``."""
    return inputs[0].new_empty(inputs[0].shape[0], op.width(layer))


@functools.cache
def operator_of(op: SplitOp) -> Callable[..., None]:
    """Return the operator ``weft::<name>_with_output(*inputs, out, layer_name)``, defined at its first use.

    It declares that it writes ``out``, looks the layer up by name, and runs ``write_real_rows``.
    """

    def run(*arguments: Any) -> None:
        *inputs, out, layer_name = arguments
        write_real_rows(op, get_forward_context().layers[layer_name], inputs, out)

    inputs = "".join(f"Tensor {name}, " for name in op.inputs)
    full_name = f"{op.name}{OUTPUT_SUFFIX}"
    _LIBRARY.define(f"{full_name}({inputs}Tensor(a!) out, str layer_name) -> ()")
    _LIBRARY.impl(full_name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"weft::{full_name}", lambda *_: None, lib=_LIBRARY)
    operator: Callable[..., None] = getattr(torch.ops.weft, full_name).default
    return operator
