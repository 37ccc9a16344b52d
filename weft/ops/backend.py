"""Choice between the implementations of an operation: plain torch or Triton kernels."""

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from enum import StrEnum
from importlib import import_module
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from weft.errors import ConfigError

P = ParamSpec("P")
RunByRow = Callable[..., Any]
"""``(reference, *args, **kwargs)``: runs the reference row by row."""
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Backend(StrEnum):
    """An implementation family. ``TORCH`` runs on every device and is the reference for the others.

    With an invariant backend, a row's bits depend on no other row and not on the number of rows.
    """

    TORCH = "torch"
    TRITON = "triton"
    INVARIANT_TORCH = "invariant torch"
    INVARIANT_TRITON = "invariant triton"

    @property
    def is_invariant(self) -> bool:
        return self in (Backend.INVARIANT_TORCH, Backend.INVARIANT_TRITON)

    @property
    def plain(self) -> "Backend":
        """The same implementations where bits may depend on other rows."""
        return Backend(self.value.removeprefix("invariant "))

    @property
    def is_torch(self) -> bool:
        return self in (Backend.TORCH, Backend.INVARIANT_TORCH)


def resolve_backend(requested: str, device_type: str, *, invariant: bool = False) -> Backend:
    """The backend for a device.

    Args:
        requested: ``"auto"``, ``"torch"`` or ``"triton"``.
        device_type: ``"cpu"`` or ``"cuda"``.
        invariant: whether a row's bits must not depend on other rows.

    Raises:
        ConfigError: an unknown name, or kernels that do not exist for this device.
    """
    if requested not in ("auto", "torch", "triton"):
        raise ConfigError(f"unknown backend {requested!r}; allowed: 'auto', 'torch', 'triton'")
    if requested == "triton" and device_type == "cpu":
        raise ConfigError("backend 'triton' has no kernels for device 'cpu'; use 'torch' or 'auto'")
    if requested == "torch" or (requested == "auto" and device_type == "cpu"):
        return Backend.INVARIANT_TORCH if invariant else Backend.TORCH
    return Backend.INVARIANT_TRITON if invariant else Backend.TRITON


class Operation(Protocol[P, R_co]):
    """A function ``x(..., *, backend)`` with an implementation for every backend.

    Attributes:
        reference: the torch function, to be called without ``backend``.
        kernel: finds the Triton one, with the same parameters.
    """

    @property
    def reference(self) -> Callable[..., R_co]: ...

    @property
    def kernel(self) -> Callable[[], Callable[..., R_co]]: ...

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


def with_kernel(module: str, by_row: RunByRow | None = None) -> Callable[[Callable[P, R]], Operation[P, R]]:
    """Make a torch function ``x(..., *, backend)`` an operation with a Triton kernel.

    The function's own body runs for ``Backend.TORCH`` and is the kernel's reference; it does not read ``backend``. For
    ``Backend.TRITON`` runs ``x_triton`` of ``module``, which is imported at its first call (see ``launches``).

    Args:
        by_row: runs the body for ``Backend.INVARIANT_TORCH``: called with the body, then as the body. None: the
            operation refuses that backend.
    """

    def decorate(function: Callable[P, R]) -> Operation[P, R]:
        reference: Callable[..., R] = functools.partial(function, backend=Backend.TORCH)  # type: ignore[arg-type]

        name, imported = f"{function.__name__}_triton", functools.cache(import_module)

        def kernel() -> Callable[..., R]:
            return getattr(imported(module), name)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            backend = kwargs.pop("backend")
            if backend is Backend.TORCH:
                return reference(*args, **kwargs)
            if backend is Backend.TRITON:
                return kernel()(*args, **kwargs)
            if backend is Backend.INVARIANT_TORCH and by_row is not None:
                return by_row(reference, *args, **kwargs)
            fixed = getattr(kernel(), "invariant", None) if backend is Backend.INVARIANT_TRITON else None
            if fixed is None:
                raise NotImplementedError(f"{function.__name__}: rows depend on their number on backend {backend!r}")
            return kernel()(*args, **kwargs, **fixed)

        call.reference, call.kernel = reference, kernel  # type: ignore[attr-defined]
        return cast(Operation[P, R], call)

    return decorate


def launches(
    operation: Callable[..., Any], *, invariant: Mapping[str, Any] | None = None
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Make a function the one that launches an operation's kernels.

    It names the operation's parameters, all but ``backend``, in their order. Types, defaults and meaning are written
    at the operation alone: the defaults are set here, once, so that a call costs nothing more. Parameters of its own
    (a tile, to be tuned) come last, by keyword, with a default.

    Args:
        invariant: values of these own parameters with which a row's bits depend on no other row, nor on the number of
            rows. Empty if that is so anyhow. None: the kernel refuses ``Backend.INVARIANT_TRITON``.
    """
    given = inspect.signature(operation).parameters
    defaults = {name: p.default for name, p in given.items() if p.default is not inspect.Parameter.empty}

    def decorate(launcher: Callable[..., R]) -> Callable[..., R]:
        assert isinstance(launcher, types.FunctionType)
        taken = inspect.signature(launcher).parameters
        own = {name: p for name, p in taken.items() if name not in given}
        assert [(p.name, p.kind) for p in given.values() if p.name != "backend"] == [
            (p.name, p.kind) for p in taken.values() if p.name not in own
        ], f"{launcher.__name__} does not take what its operation takes"
        assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in own.values())
        positional = [name for name, p in taken.items() if p.kind is not p.KEYWORD_ONLY]
        launcher.__defaults__ = tuple(defaults[name] for name in positional if name in defaults)
        launcher.invariant = invariant  # type: ignore[attr-defined]
        launcher.__kwdefaults__ = {name: p.default for name, p in own.items()} | {
            name: value for name, value in defaults.items() if name not in positional
        }
        return launcher

    return decorate
