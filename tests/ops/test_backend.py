"""Choice of the backend, and of the function that runs for it."""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module
from typing import Any

import pytest

import weft.ops
from weft.errors import ConfigError
from weft.ops.backend import Backend, resolve_backend


@pytest.mark.parametrize("requested", ["auto", "torch"])
def test_the_cpu_runs_torch(requested: str) -> None:
    assert resolve_backend(requested, "cpu") is Backend.TORCH


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown backend 'cuda'; allowed: 'auto', 'torch', 'triton'"):
        resolve_backend("cuda", "cpu")


def operations() -> dict[str, Any]:
    """All operations with a kernel, by name."""
    modules = [import_module(m.name) for m in pkgutil.walk_packages(weft.ops.__path__, "weft.ops.")]
    functions = ((name, f) for module in modules for name, f in vars(module).items() if not isinstance(f, type))
    return {name: f for name, f in functions if hasattr(f, "reference")}


@pytest.mark.parametrize("name", sorted(operations()))
def test_a_kernel_takes_what_its_reference_takes(name: str) -> None:
    """In the same order, with the same defaults; what it takes besides, to be tuned, has a default."""
    operation = operations()[name]
    given = inspect.signature(operation).parameters
    kernel = inspect.signature(operation.kernel()).parameters
    assert [p for p in kernel if p in given] == [p for p in given if p != "backend"]
    for parameter, taken in kernel.items():
        if parameter in given:
            assert (taken.default, taken.kind) == (given[parameter].default, given[parameter].kind), parameter
        else:
            assert taken.default is not inspect.Parameter.empty and taken.kind is inspect.Parameter.KEYWORD_ONLY
