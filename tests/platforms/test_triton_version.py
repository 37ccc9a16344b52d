"""The version of Triton decides between kernels, and that is said."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from itertools import chain
from pathlib import Path

import pytest
import torch
import triton
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from weft.config import resolution, resolve
from weft.ops.fp8 import E4M3
from weft.ops.linear import fp8 as fp8_linear
from weft.ops.linear.fp8_few_rows import HopperRows
from weft.ops.triton import hopper
from weft.platforms.triton_version import is_known, kernel_choice, triton_version


def test_the_installed_version_is_the_one_that_is_imported() -> None:
    assert triton_version() == triton.__version__


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("3.6.0", "Triton 3.6.0: all kernels"),
        ("3.7.1", "Triton 3.7.1: all kernels"),
        ("3.8.0", r"Triton 3.8.0: launched by Weft .* Gluon, tested .* Triton 3\.6\.x and 3\.7\.x alone, give way"),
        ("4.0.0", r"Triton 4.0.0 is not 3\.6\.x or .*: kernels in Gluon give way .*, launches go through Triton"),
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
    assert version is None or is_known(version) == (version != "4.0.0")


@pytest.mark.parametrize(("version", "runs"), [("3.6.0", True), ("3.7.1", True), ("3.9.0", False)])
def test_kernels_in_gluon_run_under_a_triton_with_which_they_were_tested(
    monkeypatch: pytest.MonkeyPatch, version: str, runs: bool
) -> None:
    monkeypatch.setattr(hopper.triton, "__version__", version)
    monkeypatch.setattr(hopper, "is_hopper", lambda device: device.type == "cuda")
    assert hopper.runs_gluon.__wrapped__(torch.device("cuda", 0)) == runs
    assert not hopper.runs_gluon.__wrapped__(torch.device("cpu"))
    monkeypatch.setattr(fp8_linear, "has_table", lambda device: True)
    monkeypatch.setattr(fp8_linear, "runs_gluon", lambda device: runs)
    weight = torch.empty(2048, 4096, dtype=E4M3, device="meta")
    assert isinstance(fp8_linear.choose_config(weight, 4, False, 128), HopperRows) == runs
    few_alone = {(2048, 4096, False, 128): {8: HopperRows(16, 8, None)}}  # not for more rows, whatever a table says
    monkeypatch.setattr(fp8_linear, "load_table", lambda: few_alone)
    assert not isinstance(fp8_linear.choose_config(weight, 32, False, 128), HopperRows)


REQUIRED = {"2.11.0": "==3.6.0", "2.12.1": "==3.7.1", "2.13.0": "==3.7.1", "2.14.1": "~=3.8.0", "2.15.0": "~=3.9.0"}
"""Versions of Triton that torch's wheels with CUDA require, by their metadata on the package index (2026-11-23)."""

ROOT = Path(__file__).parents[2]


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==", 1) for line in lines if line and not line.startswith("#"))


def test_the_tested_versions_can_be_installed_together() -> None:
    """On a machine with a GPU too: wheels for the CPU name no Triton."""
    versions = pinned()
    assert SpecifierSet(REQUIRED[versions["torch"]]).contains(versions["triton"])


def test_every_torch_that_may_be_installed_brings_a_triton_that_is_known() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = project["dependencies"], *project["optional-dependencies"].values()
    wanted = {name: [r for r in map(Requirement, chain(*groups)) if r.name == name] for name in ("torch", "triton")}
    assert wanted["torch"] and wanted["triton"]
    for torch_version, required in REQUIRED.items():
        version = required[2:]
        assert is_known(version) and all(r.specifier.contains(version) for r in wanted["triton"])
        assert all(r.specifier.contains(torch_version) for r in wanted["torch"])


def test_the_installed_torch_requires_what_is_noted() -> None:
    version = metadata.version("torch").partition("+")[0]
    required = [r for r in map(Requirement, metadata.requires("torch") or []) if r.name == "triton"]
    assert version not in REQUIRED or all(r.specifier == SpecifierSet(REQUIRED[version]) for r in required)
