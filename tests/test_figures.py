"""Figures in the documents are those of the files that they name.

A paragraph, or a point of a list, that names a file of ``benchmarks/results`` is held to it, with the table that
follows where it ends in a colon: every number with a decimal point is a number of one of these files, at its own
precision, in whatever unit. So a file that is overwritten by a new measurement takes the document along.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from docs import make_tables

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

UNITS = (1.0, 1e3, 1e6, 1e9, 1e-3, 1e-6, 1e-9, 100.0, 2.0**-20, 2.0**-30)
"""Seconds to ms and us, bytes to MiB and GiB, shares to percent."""

FROM_ELSEWHERE: dict[str, dict[str, str]] = {}
"""By document: figures that no file holds, and why they stand there."""

FIGURE = re.compile(r"(?<![\w.,])(\d{1,3}(?:,\d{3})+|\d+)\.(\d+)(?![\w.])")
NAMED = re.compile(r"`(?:benchmarks/results/)?([\w.*-]+\.json)`")
VERSION = re.compile(
    r"\b(?:torch|transformers|Triton|Python|CUDA|flash-linear-attention|vLLM|Qwen\d?)[ -]?\d+(?:\.\d+)+"
)


def statements(path: Path) -> Iterator[tuple[str, list[Path]]]:
    """Texts that name result files, with these files."""
    blocks = re.split(r"\n\s*\n", path.read_text(encoding="utf-8"))
    for block, following in zip(blocks, [*blocks[1:], ""], strict=True):
        points = re.split(r"\n(?=\* |- )", block) if re.match(r"[*-] ", block) else [block]
        for point in points:
            files = [file for name in NAMED.findall(point) for file in RESULTS.glob(name)]
            if files:
                table = following if point.rstrip().endswith(":") and following.startswith("|") else ""
                yield f"{point}\n{table}", files


def numbers(value: Any) -> Iterator[float]:
    """All numbers of a file; of a kernel's time over several launches also that of one."""
    if isinstance(value, dict):
        if value.keys() >= {"us", "launches"} and value["launches"]:
            yield value["us"] / value["launches"]
        for each in value.values():
            yield from numbers(each)
    elif isinstance(value, list):
        for each in value:
            yield from numbers(each)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield float(value)


def missing(text: str, files: list[Path]) -> list[str]:
    """Figures of a text that none of the files holds."""
    known = [n * unit for file in files for n in set(numbers(json.loads(file.read_text()))) for unit in UNITS]
    plain = VERSION.sub("", re.sub(r"`[^`]*`", "", text))
    found = []
    for figure in FIGURE.finditer(plain):
        value, half = float(figure.group(0).replace(",", "")), 0.5 * 10.0 ** -len(figure.group(2))
        if not any(abs(n - value) <= half * (1 + 1e-6) for n in known):
            found.append(figure.group(0))
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_figures_stand_in_the_files_that_are_named(path: Path) -> None:
    excused = FROM_ELSEWHERE.get(path.name, {})
    wrong = {figure: text[:200] for text, files in statements(path) for figure in missing(text, files)}
    assert not {figure: text for figure, text in wrong.items() if figure not in excused}
    assert excused.keys() <= wrong.keys(), f"found in a file after all: {excused.keys() - wrong.keys()}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(path: Path) -> None:
    named = re.findall(r"benchmarks/results/([\w.*-]+\.json)", path.read_text(encoding="utf-8"))
    assert all(list(RESULTS.glob(name)) for name in named), named


def test_every_file_of_results_is_named() -> None:
    """By a document, a script that makes documents, a model card, or a test; perhaps as ``name-*.json``."""
    pages = ("docs/*.py", "demo/*.md", "weft/assets/*/*.md", "tests/**/*.py")
    places = [*DOCUMENTS, *(place for page in pages for place in ROOT.glob(page))]
    patterns = {name for place in places for name in re.findall(r"[\w.*-]+\.json", place.read_text(encoding="utf-8"))}
    patterns = {name for name in patterns if not name.startswith("*")}
    files = [file.name for file in RESULTS.iterdir()]
    assert [name for name in files if not any(fnmatchcase(name, pattern) for pattern in patterns)] == []


def test_a_wrong_figure_is_found() -> None:
    file = RESULTS / "w5-h200.json"
    found = json.loads(file.read_text(encoding="utf-8"))["results"]
    said = f"{found['ttft_ms']:.1f} ms and {found['total_s']:.2f} s, {100 * found['cached_share']:.2f}%"
    assert missing(f"{said}; torch 2.11.0 (`x 1.5`)", [file]) == []
    assert missing("77.5 ms and 99.86 s", [file]) == ["77.5", "99.86"]


def test_tables_are_written_from_their_files() -> None:
    """``make docs`` changes nothing."""
    named = []
    for path in make_tables.DOCUMENTS:
        document = path.read_text(encoding="utf-8")
        assert make_tables.updated(document) == document
        named += re.findall(r"<!-- table ([\w-]+): begin", document)
    assert sorted(named) == sorted([*make_tables.TABLES, "summary"])


def test_a_row_behind_a_peer_and_a_missed_goal_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        ("decode of A", "1", 2.0, [1.9, 3.0], 2.5),
        ("decode of A", "8", 2.0, [2.1], 1.0),
        ("throughput of A", "", -100.0, [-90.0], -100.0),
    ]
    monkeypatch.setattr(make_tables, "compared", lambda: rows)
    behind, reached, missed = make_tables.summary().splitlines()
    assert behind.endswith("tables: decode of A at 1.") and reached.endswith("decode of A at 1; throughput of A.")
    assert missed.endswith("missed: decode of A at 8.")
