"""The doctor names what the machine has, and says what to do about missing parts."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest

from weft.cli import main
from weft.cli.doctor import Finding, _kernels, _numbers, _package, examine, largest_models, model_fits


def test_a_machine_that_runs_these_tests_lacks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for what in ("Python", "torch", "GPU", "kernels", "C compiler", "memory", "disk", "kernel cache", "open files"):
        assert f" {what}" in out
    assert " weft-mini" in out
    assert all(line.split()[0] in ("ok", "note") for line in out.splitlines())


def test_a_model_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "weft-mini", "--quantization", "int4"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"ok +weft-mini int4 +0\.0 GB of weights, room for [\d,]+ tokens", line)


def test_a_model_that_does_not_fit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.cli.doctor.capacity", lambda config: {"error": "the weights take more than there is"})
    assert main(["doctor", "weft-mini"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("the weights take more than there is")


@pytest.mark.parametrize(("capability", "others"), [((9, 0), False), ((8, 6), True), ((12, 0), True)])
def test_kernels_for_hopper(capability: tuple[int, int], others: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.config.resolution.cuda_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    assert ("those for Hopper give way to others" in _kernels().found) is others
    assert ("FP8 weights and caches are refused" in _kernels().found) is (capability < (8, 9))


def test_room_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages get the memory that weights and one recurrent state do not use."""
    costs = {"weight_bytes": 15.1e9, "free_bytes": 10_500, "state_slot_bytes": 500, "kv_page_bytes": 100}
    monkeypatch.setattr("weft.cli.doctor.capacity", lambda config: costs)
    assert model_fits("weft-mini", None).found == "15.1 GB of weights, room for 1,600 tokens"
    costs["kv_page_bytes"] = 0
    assert model_fits("weft-mini", None).found == "15.1 GB of weights, room for any number of tokens"


def test_the_largest_models() -> None:
    forms = "room for 40 billion in bfloat16, 80 billion in fp8, 155 billion"
    assert largest_models(100_000_000_000, fp8=True).startswith(forms)
    assert "fp8" not in largest_models(100_000_000_000, fp8=False)


def test_what_is_missing_or_too_old() -> None:
    absent = _package("no-such-package", "no-such-package>=2", None)
    assert absent.verdict == "missing" and "pip install 'no-such-package>=2'" in absent.remedy
    optional = _package("no-such-package", "no-such-package>=2; extra == 'server'", "server")
    assert optional.verdict == "note" and "weft[server]" in optional.remedy
    old = _package("pytest", "pytest>=999", None)
    assert old.verdict == "missing" and "older than 999" in old.found


def test_a_machine_with_little_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "not" / "there"))
    monkeypatch.setattr("weft.cli.doctor._MIN_FREE_DISK_GIB", 1e9)
    found = {finding.what: finding for finding in examine()}
    assert found["C compiler"].verdict == "note" and "gcc" in found["C compiler"].remedy
    assert found["disk"].verdict == "note" and str(tmp_path) in found["disk"].found


def test_a_kernel_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def found() -> Finding:
        return next(finding for finding in examine() if finding.what == "kernel cache")

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "not" / "there"))
    assert found().verdict == "ok" and str(tmp_path) in found().found
    monkeypatch.setattr("weft.cli.doctor._MIN_FREE_CACHE_GIB", 1e9)
    assert found().verdict == "note" and "make room" in found().remedy
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    assert found().verdict == "note" and "cannot be written" in found().found and "TRITON_CACHE_DIR" in found().remedy


@pytest.mark.parametrize(
    ("version", "verdict", "found", "remedy"),
    [
        ("3.6.0", "ok", "all kernels", ""),
        ("3.7.1", "ok", "all kernels", ""),
        ("3.8.0", "note", "give way", "torch 2.11"),
        ("4.0.0", "note", "slower", "torch 2.11"),
        (None, "note", "not installed", "torch requires"),
    ],
)
def test_what_a_triton_means(
    monkeypatch: pytest.MonkeyPatch, version: str | None, verdict: str, found: str, remedy: str
) -> None:
    monkeypatch.setattr("weft.cli.doctor.triton_version", lambda: version)
    finding = next(finding for finding in examine() if finding.what == "kernels")
    assert finding.verdict == verdict and found in finding.found and remedy in finding.remedy


def test_modules_that_every_start_compiles_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.cli.doctor.has_bytecode", lambda: False)
    for may_keep, verdict in ((True, "ok"), (False, "note")):
        monkeypatch.setattr(sys, "dont_write_bytecode", not may_keep)
        finding = next(finding for finding in examine() if finding.what == "bytecode")
        assert finding.verdict == verdict and ("compileall" in finding.remedy) is not may_keep


def test_versions_compare_by_number() -> None:
    assert _numbers("2.10.0+cpu") > _numbers("2.9") and _numbers("3.11.0rc1") >= _numbers("3.11")


def test_without_metadata_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    assert any(finding.what == "weft" and finding.verdict == "note" for finding in examine())
