"""What verbs print."""

from __future__ import annotations

import pytest

from weft import report


def test_no_figure_of_a_table_is_cut_off(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """However narrow the terminal is."""
    monkeypatch.setenv("COLUMNS", "40")
    figures = [f"{number},123.45 ms" for number in range(10, 20)]
    report.table("Times", [f"column {number}" for number in range(10)], [figures])
    out = capsys.readouterr().out
    assert "…" not in out and all(figure.split()[0] in out for figure in figures)
