"""Choice of the backend."""

from __future__ import annotations

import pytest

from weft.errors import ConfigError
from weft.ops.backend import Backend, resolve_backend


@pytest.mark.parametrize("requested", ["auto", "torch"])
def test_the_cpu_runs_torch(requested: str) -> None:
    assert resolve_backend(requested, "cpu") is Backend.TORCH


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown backend 'cuda'; allowed: 'auto', 'torch', 'triton'"):
        resolve_backend("cuda", "cpu")
