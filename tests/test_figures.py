"""Check that figures in the documents match the named files.

A paragraph, or a point of a list, that names a file of ``benchmarks/results`` must agree with the file. If the text
ends in a colon, the table after it must agree too. Every number with a decimal point must be a number of one of these
files, at its own precision. A new measurement in a file therefore forces a new document.

The unit must agree as well, as far as it is known: the key of a number names its unit (``step_ms``, ``us``, ``bytes``),
and a figure may name its own (``4.97 ms``). A number under a key without a unit matches in any unit. Most columns of
tables name no unit either, so their figures match in each unit that the key converts to. Prose does not name keys, so a
figure may match a number of another key with the same unit. Tables between markers are compared with their keys:
``docs/make_tables.py`` writes them, and ``test_tables_are_written_from_their_files`` compares every cell.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator
from fnmatch import fnmatchcase
from math import isfinite
from pathlib import Path
from typing import Any

import pytest

from docs import make_tables

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

TIMES = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
SIZES = {"bytes": 1.0, "KiB": 2.0**-10, "MiB": 2.0**-20, "GiB": 2.0**-30, "KB": 1e-3, "MB": 1e-6, "GB": 1e-9}
SHARES = {"share": 1.0, "%": 100.0}
RATES = {"per_s": 1.0, "thousand per_s": 1e-3, "million per_s": 1e-6, "billion per_s": 1e-9}
KINDS = (TIMES, SIZES, SHARES, RATES)
"""Convertible units by kind, with the amount of each unit in the first unit."""

UNITS = (1.0, 1e3, 1e6, 1e9, 1e-3, 1e-6, 1e-9, 100.0, 2.0**-20, 2.0**-30)
"""Factors for a number whose key names no unit: seconds to ms and us, bytes to MiB and GiB, shares to percent."""

KEY_UNIT = re.compile(r"(?:^|[_ ,(])(per_s|ns|us|ms|s|bytes|MiB|GiB|MB|GB|share)\)?$")
"""The unit at the end of a key."""

FROM_ELSEWHERE: dict[str, dict[str, str]] = {
    "performance-log.md": {
        "0.4": "no candidate of the tuner gained as many percent: a bound, not a measurement",
        "2.2": "ms of 48 layers, computed from the 12 that were measured",
    }
}
"""By document: figures that no file holds, and why they stand there."""

FIGURE = re.compile(
    r"(?<![\w.,])((?:\d{1,3}(?:,\d{3})+|\d+)\.(\d+))(?![\w.])(?:\s?(%|(?:ns|us|ms|s|[KMGT]i?B)\b(?!/)))?"
)
NAMED = re.compile(r"`(?:benchmarks/results/)?([\w.*-]+\.json)`")
VERSION = re.compile(
    r"\b(?:torch|transformers|Triton|Python|CUDA|flash-linear-attention|vLLM|GLM|Qwen\d?)[ -]?\d+(?:\.\d+)+"
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


def numbers(value: Any, unit: str | None = None) -> Iterator[tuple[float, str | None]]:
    """All numbers of a file with their units; of a kernel's time over several launches also that of one."""
    if isinstance(value, dict):
        if value.keys() >= {"us", "launches"} and value["launches"]:
            yield value["us"] / value["launches"], "us"
        for key, each in value.items():
            named = KEY_UNIT.search(key)
            yield from numbers(each, named[1] if named else unit)
    elif isinstance(value, list):
        for each in value:
            yield from numbers(each, unit)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield float(value), unit


def readings(number: float, unit: str | None, wanted: str | None) -> Iterator[float]:
    """Yield ``number`` in the unit ``wanted``, or without ``wanted`` in each unit that its own unit converts to. If its
    own unit is unknown, yield it times each of ``UNITS``."""
    kind = next((kind for kind in KINDS if unit in kind), None)
    if unit is None or kind is None:
        yield from (number * factor for factor in UNITS)
    elif wanted is None:
        yield from (number / kind[unit] * factor for factor in kind.values())
    elif wanted in kind:
        yield number / kind[unit] * kind[wanted]


def missing(text: str, files: list[Path]) -> list[str]:
    """Figures of a text that none of the files holds."""
    contents = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    known = {number for content in contents for number in numbers(content) if isfinite(number[0])}
    plain = VERSION.sub("", re.sub(r"`[^`]*`", "", text))
    wanted, found = dict[str | None, list[float]](), []
    for figure in FIGURE.finditer(plain):
        unit = figure[3]
        if unit not in wanted:
            wanted[unit] = sorted(reading for number in known for reading in readings(*number, unit))
        value, half = float(figure[1].replace(",", "")), 0.5 * 10.0 ** -len(figure[2]) * (1 + 1e-6)
        at = bisect_left(wanted[unit], value - half)
        if at == len(wanted[unit]) or wanted[unit][at] > value + half:
            found.append(figure[1])
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
    """A document, a script that makes documents, a model card, or a test names it, perhaps as ``name-*.json``."""
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


def test_a_figure_in_another_unit_is_found(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    found = {
        "step_ms": 4.97,
        "kernels": {"gdn us": {"(32, 4)": 138.0}},
        "bytes": 2**30 * 1.5,
        "hit_share": 0.6789,
        "odd": 7.25,
    }
    file.write_text(json.dumps(found), encoding="utf-8")
    right = "4.97 ms or 0.00497 s, 138.0 us or 0.138 ms, 1.5 GiB, 67.89%, 7.25 s, 7.25 ms; in a table 4.97 and 1.5"
    assert missing(right, [file]) == []
    wrong = "4.97 us, 4.97 GiB, 138.0 ms, 1.5 MiB, 1.5 s, 67.89 ms; in a table 497.0 and 0.005"
    assert missing(wrong, [file]) == ["4.97", "4.97", "138.0", "1.5", "1.5", "67.89", "497.0"]


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
