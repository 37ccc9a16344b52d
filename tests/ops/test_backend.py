"""Choice of the backend, and of the function that runs for it."""

from __future__ import annotations

import inspect
import pkgutil
from functools import cache
from importlib import import_module
from typing import Any

import pytest

import weft.ops
from weft.errors import ConfigError
from weft.ops.backend import Backend, launches, resolve_backend, with_kernel


@pytest.mark.parametrize("requested", ["auto", "torch"])
def test_the_cpu_runs_torch(requested: str) -> None:
    assert resolve_backend(requested, "cpu") is Backend.TORCH


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown backend 'cuda'; allowed: 'auto', 'torch', 'triton'"):
        resolve_backend("cuda", "cpu")


@cache
def operations() -> dict[str, Any]:
    """All operations with a kernel, by name."""
    modules = [import_module(m.name) for m in pkgutil.walk_packages(weft.ops.__path__, "weft.ops.")]
    functions = ((name, f) for module in modules for name, f in vars(module).items() if not isinstance(f, type))
    return {name: f for name, f in functions if hasattr(f, "reference")}


@pytest.mark.parametrize("name", sorted(operations()))
def test_a_launcher_takes_what_its_operation_takes(name: str) -> None:
    """In the same order, with the same defaults; what it takes besides, to be tuned, has a default."""
    operation = operations()[name]
    given = inspect.signature(operation).parameters
    launcher = inspect.signature(operation.kernel()).parameters
    assert [p for p in launcher if p in given] == [p for p in given if p != "backend"]
    for parameter, taken in launcher.items():
        if parameter in given:
            assert (taken.default, taken.kind) == (given[parameter].default, given[parameter].kind), parameter
        else:
            assert taken.default is not inspect.Parameter.empty and taken.kind is inspect.Parameter.KEYWORD_ONLY


def test_a_launcher_has_the_defaults_of_its_operation() -> None:
    @with_kernel("nowhere")
    def scaled(x: int, factor: int = 2, *, offset: int, power: int = 3, backend: Backend) -> int: ...

    @launches(scaled)
    def scaled_triton(x, factor, *, offset, power, tile: int = 8):  # type: ignore[no-untyped-def]
        return x, factor, offset, power, tile

    assert scaled_triton(1, offset=4) == (1, 2, 4, 3, 8)
    assert scaled_triton(1, 5, offset=4, power=6, tile=7) == (1, 5, 4, 6, 7)
    with pytest.raises(TypeError, match="offset"):
        scaled_triton(1)


def test_a_launcher_that_takes_something_else_is_rejected() -> None:
    @with_kernel("nowhere")
    def scaled(x: int, factor: int = 2, *, backend: Backend) -> int: ...

    for other in (
        lambda factor, x: x,
        lambda x: x,
        lambda x, *, factor: x,
        lambda x, factor, *, tile: x,
    ):
        with pytest.raises(AssertionError):
            launches(scaled)(other)


def test_an_operation_that_states_nothing_refuses_an_invariant_backend() -> None:
    """Rather than compute rows that depend on their number."""
    module = "weft.ops.linear.skinny"

    @with_kernel(module)
    def linear_parts(x: int, *, backend: Backend) -> int:
        return x

    assert linear_parts(3, backend=Backend.TORCH) == 3
    for backend in (Backend.INVARIANT_TORCH, Backend.INVARIANT_TRITON):
        with pytest.raises(NotImplementedError, match="linear_parts: rows depend on their number"):
            linear_parts(3, backend=backend)


def test_an_invariant_backend_gives_the_kernel_its_fixed_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.ops.vision import kernels

    @with_kernel(kernels.__name__, lambda reference, x: ("rows", reference(x)))
    def tripled(x: int, *, backend: Backend) -> Any:
        return 3 * x

    @launches(tripled, invariant={"tile": 5})
    def tripled_triton(x, *, tile: int = 8):  # type: ignore[no-untyped-def]
        return x, tile

    monkeypatch.setattr(kernels, "tripled_triton", tripled_triton, raising=False)
    assert tripled(2, backend=Backend.TRITON) == (2, 8)
    assert tripled(2, backend=Backend.INVARIANT_TRITON) == (2, 5)
    assert tripled(2, backend=Backend.INVARIANT_TORCH) == ("rows", 6)


@pytest.mark.parametrize(
    ("requested", "device"), [("auto", "cpu"), ("torch", "cpu"), ("auto", "cuda"), ("triton", "cuda")]
)
def test_an_invariant_backend_is_chosen_alike(requested: str, device: str) -> None:
    plain = resolve_backend(requested, device)
    fixed = resolve_backend(requested, device, invariant=True)
    assert fixed.is_invariant and not plain.is_invariant and fixed.is_torch == plain.is_torch
