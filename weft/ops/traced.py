"""Operations that a tracer sees as one: ``weft::<name>``, generated from the function itself.

Job: keep Dynamo out of a function that launches kernels or decides by sizes on the host. Called in a trace, it
appears in the graph as one operator; called anywhere else, it is the plain function. Owns: the names of these
operations. Does not know: what an operation computes, what becomes of the graph.

The schema comes from the annotations, the fake from the torch reference, which has the same signature but for
``backend`` and returns the same shapes:

    @traced_op(fusible=True)
    @with_kernel("weft.ops.norm.kernels")
    def rms_norm(x: Tensor, weight: Tensor, eps: float, *, backend: Backend) -> Tensor: ...

A tracer for a compiler that fuses may want to see through some of them: it then finds the reference instead.
"""

import functools
import inspect
import types
import typing
from collections.abc import Callable, Sequence, Set
from enum import Enum
from typing import Any, TypeVar, Union, cast

import torch
from torch import Tensor

from weft.forward_context import get_forward_context

Function = TypeVar("Function", bound=Callable[..., Any])

_LIBRARY = torch.library.Library("weft", "FRAGMENT")
_FUSIBLE: dict[str, bool] = {}


def traced_op(
    reference: Callable[..., Any] | None = None, *, fusible: bool = False, fake: Callable[..., Any] | None = None
) -> Callable[[Function], Function]:
    """Make a function an operator to tracers.

    Args:
        reference: its torch reference; None: that of an operation with a kernel (``with_kernel``).
        fusible: whether the function is bound by memory, so that fusing it with its neighbours is faster.
        fake: shapes and dtypes of the results, called as the reference. Default: the reference, which then must run on
            fake tensors.

    The function takes tensors, numbers, truth values, enumerations of texts and named tuples of these, and returns
    tensors that are new. A parameter that is a number or a tensor has to be a tensor in a trace: a number would be
    frozen. The operator takes field ``f`` of a named tuple ``p`` as a parameter ``p_f``.

    In a trace, the call is an operator if the ``breaks`` of the forward context name the function, else the reference.
    """

    def decorate(function: Function) -> Function:
        name = function.__name__
        _FUSIBLE[name] = fusible
        plain_function = reference or function.reference  # type: ignore[attr-defined]
        dropped = _parameters(function) - _parameters(plain_function) | {"backend"}
        operator = _register(function, dropped, fake or plain_function)
        hints = typing.get_type_hints(function)
        fields = {parameter: hint._fields for parameter, hint in hints.items() if _is_group(hint)}

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_dynamo_compiling():
                return function(*args, **kwargs)
            breaks = get_forward_context().breaks
            if breaks is not None and name not in breaks.names:
                return plain_function(*args, **{p: v for p, v in kwargs.items() if p not in dropped})
            plain: dict[str, Any] = {}
            for p, v in kwargs.items():
                if p in fields:  # torch 2.11 traces no hasattr, nor methods of named tuples
                    plain |= {f"{p}_{field}": x for field, x in zip(fields[p], v, strict=True)}
                else:
                    plain[p] = _plain(v)
            results = operator(*(x for v in args for x in (v if isinstance(v, tuple) else [_plain(v)])), **plain)
            return results[0] if len(results) == 1 else tuple(results)

        return cast(Function, call)

    return decorate


def opaque_ops(*, fusible: bool) -> frozenset[str]:
    """Names of all such operations, or of those alone that are not fusible.

    Args:
        fusible: whether fusible operations are wanted too.
    """
    return frozenset(name for name, is_fusible in _FUSIBLE.items() if fusible or not is_fusible)


def _parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _is_group(hint: Any) -> bool:
    """Whether a type is one of named tuples."""
    return hasattr(hint, "_fields")


def _as_declared(
    parameters: Sequence[inspect.Parameter], hints: dict[str, Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The function's arguments from those of its operator: enumerations and named tuples are made of their parts."""
    rest, given, named = list(args), [], dict(kwargs)
    for name, kind, hint, default in ((p.name, p.kind, hints[p.name], p.default) for p in parameters):
        if _is_group(hint) and kind is not inspect.Parameter.KEYWORD_ONLY:
            given.append(hint(*rest[: len(hint._fields)]))
            del rest[: len(hint._fields)]
        elif _is_group(hint):
            values = {f: named.pop(f"{name}_{f}") for f in hint._fields if f"{name}_{f}" in named}
            named[name] = hint(**values) if default is inspect.Parameter.empty else default._replace(**values)
        elif kind is not inspect.Parameter.KEYWORD_ONLY and rest:
            given.append(rest.pop(0))
        elif name in named and isinstance(hint, type) and issubclass(hint, Enum):
            named[name] = hint(named[name])
    return given, named


def _register(function: Callable[..., Any], dropped: Set[str], fake: Callable[..., Any]) -> Callable[..., Any]:
    """The operator of a function, with its fake, which does not take the parameters in ``dropped``."""
    name, hints = function.__name__, typing.get_type_hints(function)
    parameters = list(inspect.signature(function).parameters.values())

    def run(*args: Any, **kwargs: Any) -> list[Tensor]:
        given, named = _as_declared(parameters, hints, args, kwargs)
        return _listed(function(*given, **named))

    def shapes(*args: Any, **kwargs: Any) -> list[Tensor]:
        given, named = _as_declared(parameters, hints, args, kwargs)
        return [x.contiguous() for x in _listed(fake(*given, **{p: v for p, v in named.items() if p not in dropped}))]

    _LIBRARY.define(f"{name}({_schema(function, hints)}) -> Tensor[]")
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"weft::{name}", shapes, lib=_LIBRARY)
    return getattr(torch.ops.weft, name).default


def _listed(results: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def _schema(function: Callable[..., Any], hints: dict[str, Any]) -> str:
    """The parameters in the words of torch's operator schemas."""
    parts, keyword_only = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
            parts.append("*")
            keyword_only = True
        name, hint, default = parameter.name, hints[parameter.name], parameter.default
        if _is_group(hint):
            of_fields = typing.get_type_hints(hint)
            values = {} if default is inspect.Parameter.empty else default._asdict()
            parts += [_declaration(of_fields[f], f"{name}_{f}", values.get(f, default)) for f in hint._fields]
        else:
            parts.append(_declaration(hint, name, default))
    return ", ".join(parts)


def _declaration(hint: Any, name: str, default: Any) -> str:
    return f"{_type_name(hint)} {name}" + ("" if default is inspect.Parameter.empty else f"={default}")


_TYPE_NAMES: dict[Any, str] = {Tensor: "Tensor", int: "SymInt", float: "float", bool: "bool"}


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) in (Union, types.UnionType):
        members = typing.get_args(hint)
        optional = "?" if type(None) in members else ""
        first = Tensor if Tensor in members else next(m for m in members if m is not type(None))
        return _type_name(first) + optional
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "str"
    assert hint in _TYPE_NAMES, f"an operator cannot take a parameter of type {hint}"
    return _TYPE_NAMES[hint]
