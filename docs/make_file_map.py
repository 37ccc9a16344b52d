"""Rewrites ``docs/file-map.md`` from the modules' docstrings.

Job: one line per module, between two markers. Run it after adding, moving or renaming a module: ``make docs``.
A test fails while the map is out of date.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "file-map.md"
QUOTES = '"""'
BEGIN, END = "<!-- file map: begin (make docs) -->", "<!-- file map: end -->"


def summary(path: Path) -> str:
    """First line of a module's docstring."""
    text = path.read_text(encoding="utf-8")
    assert text.startswith(QUOTES), f"{path.relative_to(ROOT)} does not begin with a docstring"
    docstring = text[len(QUOTES) : text.index(QUOTES, len(QUOTES))]
    return docstring.splitlines()[0].rstrip(".")


def file_map() -> str:
    """The map: single modules first, then a section per package."""
    lines: list[str] = []
    for path in sorted((ROOT / "weft").glob("*.py")):
        lines.append(f"- `{path.name}`: {summary(path)}")
    for package in sorted({path.parent for path in (ROOT / "weft").rglob("*.py")} - {ROOT / "weft"}):
        modules = [path for path in sorted(package.glob("*.py")) if path.name != "__init__.py"]
        lines += ["", f"**{package.relative_to(ROOT)}/**: {_package_summary(package)}"]
        lines += [""] * bool(modules) + [f"- `{path.name}`: {summary(path)}" for path in modules]
    return "\n".join(lines)


def updated(document: str) -> str:
    """``document`` with a fresh map between the markers."""
    before, rest = document.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{file_map()}\n{END}{after}"


def _package_summary(package: Path) -> str:
    init = package / "__init__.py"
    return summary(init) if init.exists() and init.read_text(encoding="utf-8").strip() else "no description"


if __name__ == "__main__":
    DOCUMENT.write_text(updated(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
