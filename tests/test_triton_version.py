"""The version of Triton decides between kernels, and that is said."""

from __future__ import annotations

import re

import pytest
import triton

from weft.config import resolution, resolve
from weft.triton_version import is_known, kernel_choice, triton_version


def test_the_installed_version_is_the_one_that_is_imported() -> None:
    assert triton_version() == triton.__version__


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("3.6.0", "Triton 3.6.0: all kernels"),
        ("3.7.1", r"Triton 3.7.1 is not 3\.6\.x: kernels in Gluon give way .*, launches go through Triton"),
        (None, "not installed"),
    ],
)
@pytest.mark.parametrize("given", [{}, {"backend": "triton"}])
def test_the_reason_for_the_backend_names_kernels(
    monkeypatch: pytest.MonkeyPatch, version: str | None, said: str, given: dict[str, str]
) -> None:
    monkeypatch.setattr(resolution, "cuda_available", lambda: True)
    monkeypatch.setattr(resolution, "triton_version", lambda: version)
    reason = resolve(device="cuda", **given).reasons["backend"]
    assert reason.endswith(kernel_choice(version)) and reason.startswith("given" if given else "the Triton kernels")
    assert re.search(said, reason)
    assert version is None or is_known(version) == (version == "3.6.0")
