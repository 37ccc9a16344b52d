"""What verbs print."""

from __future__ import annotations

import pytest

from weft.bench import report


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
