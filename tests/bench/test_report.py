"""Test the output of verbs."""

from __future__ import annotations

import importlib.machinery
import subprocess
import sys
import types
from pathlib import Path

import pytest

from weft.bench import report

ROOT = Path(__file__).resolve().parents[2]


def test_no_figure_of_a_table_is_cut_off(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """However narrow the terminal is; nor is a heading."""
    monkeypatch.setenv("COLUMNS", "40")
    figures = [f"{number},123.45 ms" for number in range(10, 20)]
    report.table("Times", [f"column {number}" for number in range(10)], [figures])
    out = capsys.readouterr().out
    assert all(text in out for number, figure in enumerate(figures) for text in (figure, f"column {number}"))
    headings = ("rate", "concurrency", "requests/s", "output tok/s", "goodput/s", "TTFT p50 p99")
    report.table("Load", headings, [["", "1", "10.0", "350", "", "1,234.5 2,345.6 ms"]])
    out = capsys.readouterr().out
    assert all(text in out for text in (*headings, "1,234.5 2,345.6 ms"))


def test_a_measurement_names_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The repository's, or the one that the environment names where there is no repository."""
    monkeypatch.delenv(report.COMMIT_VARIABLE, raising=False)
    if (ROOT / ".git").exists():
        head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        found = report.origin()["commit"].removesuffix("-dirty")
        assert len(found) >= 8 and head.stdout.startswith(found)
    monkeypatch.setenv(report.COMMIT_VARIABLE, "0123abcd")
    assert report.provenance("cpu")["commit"] == "0123abcd"


@pytest.mark.parametrize(
    ("module", "program", "command"),
    [
        ("weft.__main__", "/x/weft/__main__.py", "weft --json 'a b'"),
        ("benchmarks.vision", "/x/benchmarks/vision.py", "python -m benchmarks.vision --json 'a b'"),
        (None, str(ROOT / "benchmarks" / "vision.py"), "python benchmarks/vision.py --json 'a b'"),
        (None, "/usr/bin/weft", "weft --json 'a b'"),
    ],
)
def test_a_measurement_names_its_script(
    monkeypatch: pytest.MonkeyPatch, module: str | None, program: str, command: str
) -> None:
    """Scripts are named by path or module in the repository, so that no script of the same name elsewhere is meant."""
    main = types.ModuleType("__main__")
    main.__spec__ = module and importlib.machinery.ModuleSpec(module, None)  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", [program, "--json", "a b"])
    assert report.origin()["command"] == command
