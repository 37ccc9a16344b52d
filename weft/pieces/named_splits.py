"""Split ops by name: functions, methods and modules that nobody has decorated.

Job: find the functions and methods that a name of ``splitting_ops`` stands for, and make their calls split ops while a
pass is traced or captured. Owns: the wrappers, which exist only during that time. Does not know: how passes are
captured. These names are understood::

    weft.ops.activation.silu_and_mul    a function, by the path it is imported by
    SparseMoe.forward, GatedDeltaNet.mix  a method of a class of layers
    SparseMoe                            its forward
    model.layers.3.mlp, model.layers.*.mlp   the forward of modules, by their names in the model

A call becomes a split op whose inputs are the tensors with one row per token. ``prepare`` finds the calls in one run
and fixes all other arguments; a later pass with other values is refused. The call must return one tensor
``[T, width]`` of the first input's dtype.
"""

import fnmatch
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import ConfigError
from weft.forward_context import ForwardContext, active_breaks, forward_context, get_forward_context
from weft.graph.split_ops import SplitOp
from weft.pieces.split_points import NAMED_CALL, split_op_of_inputs


@dataclass(eq=False)
class CallSite:
    """One call in a forward pass: the ``layer`` of its split op.

    Attributes:
        name: in the layer table.
        args, kwargs: as they were when the call was found, tensors of a row per token included.
        places: of these tensors: positions in ``args``, and keywords.
        width: columns of the result.
        op: the split op.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    places: tuple[int | str, ...]
    width: int
    op: SplitOp

    def first_other(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        """The first argument that is no input and not what it was when the call was found; None: all are."""
        if len(args) != len(self.args) or kwargs.keys() != self.kwargs.keys():
            return "the number or the names of its arguments"
        for place, new, old in [
            *((i, args[i], self.args[i]) for i in range(len(args))),
            *((key, kwargs[key], self.kwargs[key]) for key in kwargs),
        ]:
            if not (isinstance(new, Tensor) if place in self.places else _is_same(new, old)):
                return f"argument {place}"
        return None

    def run(self, *inputs: Tensor) -> Tensor:
        """The call with other rows."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for place, x in zip(self.places, inputs, strict=True):
            if isinstance(place, int):
                args[place] = x
            else:
                kwargs[place] = x
        result: Tensor = self.function(*args, **kwargs)
        return result


@dataclass(eq=False)
class Target:
    """One place that a name stands for: a function, or a method of one module.

    Attributes:
        given: the name as the user gave it.
        where: the place in words.
        put: installs a wrapper there, and returns the function that removes it.
        sites: its calls in order.
        next: index of the next call in ``sites``.
        other: an argument of a call that differed in a later pass.
    """

    given: str
    where: str
    original: Callable[..., Any]
    put: Callable[[Callable[..., Any]], Callable[[], None]]
    sites: list[CallSite] = field(default_factory=list)
    next: int = 0
    other: str | None = None


class NamedSplits:
    """The split ops that ``names`` mean in a model.

    Args:
        names: of ``splitting_ops``, without those of defined split ops.

    Attributes:
        ops: names of the split ops, known after ``prepare``.

    Raises:
        ConfigError: a name that means nothing here.
    """

    def __init__(self, names: tuple[str, ...], model: nn.Module) -> None:
        self.ops: frozenset[str] = frozenset()
        self._targets = [target for name in names for target in _find(name, model)]
        self._depth = 0

    def prepare(
        self, model: Callable[..., Tensor], context: ForwardContext, num_tokens: int, breaks: frozenset[str]
    ) -> None:
        """Run the model once, uncaptured, to find the calls and the widths of their results.

        Args:
            context: of a captured batch of ``num_tokens`` tokens; its layers learn the calls' names.
            breaks: the other split ops at which the pass will break: calls inside them are theirs.

        Raises:
            ConfigError: a call that cannot be a split op, or a name that no call belongs to.
        """
        ids = torch.zeros(num_tokens, dtype=torch.int64, device=context.batch.positions.device)
        finding = replace(context, breaks=_Finding(self, breaks), any_num_tokens=True)
        with self.installed(), forward_context(finding):
            model(input_ids=ids)
        for target in self._targets:
            if not target.sites and not any(t.sites for t in self._targets if t.given == target.given):
                raise ConfigError(f"splitting_ops names {target.given!r}, which no forward pass of the model calls")
        assert isinstance(context.layers, MutableMapping)
        for target in self._targets:
            context.layers.update({site.name: site for site in target.sites})
        self.ops = frozenset(site.op.name for target in self._targets for site in target.sites)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """In the body, calls of the targets report to the ``breaks`` of the forward context."""
        with ExitStack() as stack:
            for target in self._targets:
                target.next = 0
                stack.callback(target.put(self._wrapper(target)))
            yield

    def check(self) -> None:
        """To be called once a pass is traced; captured ones are checked as they run.

        Raises:
            ConfigError: a call was given something else than when it was found.
        """
        for target in self._targets:
            if target.other is not None:
                raise ConfigError(
                    f"splitting_ops names {target.given!r}, but {target.where} is not given the same for every number "
                    f"of tokens: {target.other} differs from the run that found the call; leave the name out, or name "
                    "what calls it"
                )

    def _wrapper(self, target: Target) -> Callable[..., Any]:
        @functools.wraps(target.original)  # which may have attributes: an operation's reference
        def call(*args: Any, **kwargs: Any) -> Any:
            breaks = active_breaks()
            if isinstance(breaks, _Finding):
                return self._note(target, args, kwargs)
            if breaks is None or not target.sites or target.sites[0].op.name not in breaks.names:
                return target.original(*args, **kwargs)
            site = target.sites[target.next]
            target.next = (target.next + 1) % len(target.sites)
            other = site.first_other(args, kwargs)
            if other is not None:
                target.other = other
                if not torch.compiler.is_compiling():
                    self.check()
            inputs = tuple(args[place] if isinstance(place, int) else kwargs[place] for place in site.places)
            return breaks.at(site.op, site, inputs)

        return call

    def _note(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.inside():
            result = target.original(*args, **kwargs)
        if self._depth == 0:
            target.sites.append(_site(target, args, kwargs, result))
        return result

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The body runs inside a split op, whose calls are not split off again."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


class _Finding:
    """The ``breaks`` of the run that finds the calls: split ops run at once."""

    def __init__(self, splits: NamedSplits, names: frozenset[str]) -> None:
        self.names, self._splits = names, splits

    def at(self, op: SplitOp, layer: Any, inputs: tuple[Tensor, ...]) -> Tensor:
        with self._splits.inside():
            return op.method(layer, *inputs)


def _site(target: Target, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> CallSite:
    rows = get_forward_context().batch.positions.shape[0]

    def by_token(value: Any) -> bool:
        is_input = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        return is_input and value.dim() > 0 and value.shape[0] == rows

    positions = [i for i, x in enumerate(args) if by_token(x)]
    keywords = [key for key, x in kwargs.items() if by_token(x)]
    tensors = [*(args[i] for i in positions), *(kwargs[key] for key in keywords)]
    if not tensors:
        raise ConfigError(
            f"splitting_ops names {target.given!r}, but {target.where} takes no tensor with a row per token"
        )
    wanted = isinstance(result, Tensor) and result.dim() == 2 and result.shape[0] == rows
    if not wanted or result.dtype != tensors[0].dtype:
        raise ConfigError(
            f"splitting_ops names {target.given!r}, but {target.where} returns {_described(result)}; a split op "
            f"returns one tensor [tokens, width] of the dtype of its first input, {tensors[0].dtype}"
        )
    plain = re.sub(r"\W", "_", target.given)
    op = split_op_of_inputs(f"{NAMED_CALL}{plain}_{len(tensors)}", len(tensors))
    name = f"{target.where}#{len(target.sites)}"
    return CallSite(name, target.original, args, dict(kwargs), (*positions, *keywords), result.shape[1], op)


def _is_same(new: Any, old: Any) -> bool:
    """The same object, memory or value; in a trace, which has no memory, tensors of one shape and dtype."""
    if new is old:
        return True
    if isinstance(new, Tensor) and isinstance(old, Tensor):
        if new.shape != old.shape or new.dtype != old.dtype:
            return False
        return torch.compiler.is_compiling() or new.data_ptr() == old.data_ptr()
    if type(new) is type(old) and (parts := _parts(new)) is not None:
        others = _parts(old) or {}
        return parts.keys() == others.keys() and all(_is_same(parts[key], others[key]) for key in parts)
    return not isinstance(new, Tensor) and not isinstance(old, Tensor) and bool(new == old)


def _parts(value: Any) -> dict[Any, Any] | None:
    """Return the parts of a value that may hold tensors, by index, key or name. None if the value has no parts."""
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    if isinstance(value, dict):
        return value
    if is_dataclass(value):
        return {part.name: getattr(value, part.name) for part in fields(value)}
    return None


def _described(result: Any) -> str:
    if isinstance(result, Tensor):
        return f"a tensor {list(result.shape)} of {result.dtype}"
    return f"a {type(result).__name__}"


def _find(name: str, model: nn.Module) -> list[Target]:
    found = _modules(name, model) or _methods(name, model) or _function(name)
    if not found:
        classes = sorted({type(module).__name__ for module in model.modules()})
        raise ConfigError(
            f"splitting_ops names {name!r}, which is no split op, no function that can be imported, and no method, "
            f"class or module of the model; its classes are {', '.join(classes)}, its modules for example "
            f"{', '.join(list(dict(model.named_modules()))[1:4])}"
        )
    return found


def _modules(name: str, model: nn.Module) -> list[Target]:
    names = fnmatch.filter([path for path, _ in model.named_modules() if path], name)
    return [_method_target(name, path, model.get_submodule(path), "forward") for path in names]


def _methods(name: str, model: nn.Module) -> list[Target]:
    kind, _, method = name.partition(".")
    method = method or "forward"
    modules = [(path, m) for path, m in model.named_modules() if type(m).__name__ == kind and hasattr(m, method)]
    return [_method_target(name, path, module, method) for path, module in modules]


def _method_target(given: str, path: str, module: nn.Module, method: str) -> Target:
    def put(wrapper: Callable[..., Any]) -> Callable[[], None]:
        setattr(module, method, wrapper)
        return lambda: delattr(module, method)  # what the class defines is seen again

    return Target(given, f"{path}.{method}", getattr(module, method), put)


def _function(name: str) -> list[Target]:
    path, _, attribute = name.rpartition(".")
    try:
        function = getattr(importlib.import_module(path), attribute) if path else None
    except (ImportError, AttributeError, ValueError):
        return []
    if not callable(function) or inspect.isclass(function):
        return []

    def put(wrapper: Callable[..., Any]) -> Callable[[], None]:
        places = [
            (vars(module), key)
            for module in list(sys.modules.values())
            for key, value in list(getattr(module, "__dict__", {}).items())
            if value is function
        ]
        for namespace, key in places:
            namespace[key] = wrapper

        def restore() -> None:
            for namespace, key in places:
                namespace[key] = function

        return restore

    return [Target(name, name, function, put)]
