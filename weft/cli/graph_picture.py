"""A page that shows a pass in pieces: a picture, a table, and the code.

Job: HTML with an inline SVG, complete in one file. Owns: the layout. Does not know: how a pass is split.

Repeated parts are folded. Consecutive pairs of a split op and the piece after it that do the same work for different
layers are drawn once, with their number.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.bench.graph_dump import GraphDump, Part

_WIDTH, _BOX, _GAP, _LEFT = 760, 58, 16, 20
_BAR = 150
"""Width of the longest bar of time."""

_LEGEND = (
    "Solid: captured, replayed with one call. Dashed: a split op, run between two pieces on the real rows of a batch. "
    "Bars: time. Bytes: of all tensors that the operations take and make; what they touch of KV and states is left out."
)

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #1c2230;
  background: #fff; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: right; padding: .2rem .6rem; }
th { border-bottom: 2px solid #aab; } td { border-bottom: 1px solid #dde; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
pre { overflow-x: auto; background: #f3f4f8; padding: .8rem; font-size: 12px; } summary { cursor: pointer; }
svg { width: 100%; height: auto; } svg text { font: 14px system-ui, sans-serif; fill: #1c2230; }
svg .small { font-size: 12px; fill: #5a6275; } .piece { fill: #dbe9ff; stroke: #3b6fc4; }
.split { fill: #fff1d6; stroke: #b9770a; stroke-dasharray: 5 3; } .arrow { stroke: #8a92a6; stroke-width: 2; }
.bar { fill: #3b6fc4; } .splitbar { fill: #b9770a; } .group { fill: none; stroke: #8a92a6; stroke-width: 2; }
@media (prefers-color-scheme: dark) { body { background: #14171f; color: #dfe3ee; } pre { background: #1d212c; }
  svg text { fill: #dfe3ee; } svg .small { fill: #9aa3b8; } .piece { fill: #1d2f4d; } .split { fill: #3a2c10; }
  td { border-color: #2c3242; } th { border-color: #4a5268; } }
"""


@dataclass(frozen=True, slots=True)
class Fold:
    """Parts that are drawn once.

    Attributes:
        rows: one list per drawn box, with the parts that the box represents, in order.
    """

    rows: tuple[tuple[Part, ...], ...]

    @property
    def count(self) -> int:
        return len(self.rows[0])


def fold(parts: Sequence[Part]) -> list[Fold]:
    """Fold the first piece, then each run of equal pairs of split op and piece."""
    pairs = list(zip(parts[1::2], parts[2::2], strict=True))
    folds = [Fold(((parts[0],),))]
    for _, run in groupby(pairs, key=lambda pair: (pair[0].signature, pair[1].signature)):
        folds.append(Fold(tuple(zip(*run, strict=True))))
    return folds


def page(title: str, facts: Sequence[tuple[str, str]], dump: GraphDump) -> str:
    """The whole page.

    Args:
        facts: name and value of facts that the reader needs beside the figures.
    """
    rows = "".join(f'<tr><td>{_text(name)}</td><td class="text">{_text(value)}</td></tr>' for name, value in facts)
    body = [
        f"<h1>{_text(title)}</h1><table>{rows}</table>",
        "<h2>The pass</h2>",
        _picture(dump),
        f"<p>{_text(_LEGEND)}</p>",
        "<h2>Parts</h2>",
        _table(dump),
        "<h2>Code</h2>",
        *(_code(piece.name, dump.code(piece)) for piece in dump.pieces),
        *(_code(f"traced part {number}", code) for number, code in enumerate(dump.traced)),
    ]
    head = f'<meta charset="utf-8"/><title>{_text(title)}</title><style>{_STYLE}</style>'
    inner = "\n".join(body)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n{inner}\n</body></html>\n'


def _text(value: object) -> str:
    return html.escape(str(value))


def _code(name: str, code: str) -> str:
    return f"<details><summary>{_text(name)}</summary><pre>{_text(code)}</pre></details>"


def _picture(dump: GraphDump) -> str:
    folds = fold(dump.parts)
    longest = max(sum(p.ms for p in row) for f in folds for row in f.rows) or 1.0
    shapes: list[str] = []
    top = _GAP
    for number, one in enumerate(folds):
        if number:
            shapes.append(_arrow(top - _GAP))
        begin = top
        for i, row in enumerate(one.rows):
            if i:
                shapes.append(_arrow(top - _GAP))
            shapes.append(_box(row, top, longest))
            top += _BOX + _GAP
        if one.count > 1:
            shapes.append(_bracket(begin, top - _GAP, one.count))
    label = _text(f"{len(dump.pieces)} pieces and {len(dump.parts) - len(dump.pieces)} split ops")
    return f'<svg viewBox="0 0 {_WIDTH} {top}" role="img" aria-label="{label}">{"".join(shapes)}</svg>'


def _box(row: Sequence[Part], top: int, longest: float) -> str:
    part, width = row[0], _WIDTH - 2 * _LEFT - 60
    ms = sum(p.ms for p in row)
    kind, bar = ("piece", "bar") if part.captured else ("split", "splitbar")
    first = f"{_span(row)}: {_figures(part)}" if part.captured else f"{part.name}, not captured"
    second = ", ".join(f"{name} ×{count}" for name, count in part.counts[:6]) if part.captured else _layers(row)
    length = max(1, round(_BAR * ms / longest))
    return (
        f"<g><title>{_text(_span(row))}</title>"
        f'<rect class="{kind}" x="{_LEFT}" y="{top}" width="{width}" height="{_BOX}" rx="8"/>'
        f'<text x="{_LEFT + 12}" y="{top + 23}">{_text(first)}</text>'
        f'<text class="small" x="{_LEFT + 12}" y="{top + 44}">{_text(_short(second, 74))}</text>'
        f'<rect class="{bar}" x="{_LEFT + width - _BAR - 12}" y="{top + 10}" width="{length}" height="8" rx="2"/>'
        f'<text class="small" x="{_LEFT + width - _BAR - 12}" y="{top + 33}">{_text(_ms(ms))}</text></g>'
    )


def _arrow(top: int) -> str:
    middle = (_WIDTH - 60) // 2
    return f'<line class="arrow" x1="{middle}" y1="{top}" x2="{middle}" y2="{top + _GAP}"/>'


def _bracket(top: int, bottom: int, count: int) -> str:
    x = _WIDTH - _LEFT - 50
    path = f"M {x} {top} h 10 v {bottom - top} h -10"
    return (
        f'<path class="group" d="{path}"/><text x="{x + 16}" y="{(top + bottom) // 2 + 5}">{_text(f"×{count}")}</text>'
    )


def _span(row: Sequence[Part]) -> str:
    return row[0].name if len(row) == 1 else f"{row[0].name} … {row[-1].name}"


def _layers(row: Sequence[Part]) -> str:
    return row[0].layer if len(row) == 1 else f"{row[0].layer} … {row[-1].layer}"


def _figures(part: Part) -> str:
    return f"{len(part.kernels)} kernels, {_mib(part.num_bytes)}"


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def _ms(ms: float) -> str:
    return f"{ms:.3f} ms"


def _table(dump: GraphDump) -> str:
    heads = ("part", "layer", "captured", "kernels", "bytes", "ms", "share")
    cells = "".join(f'<th class="text">{head}</th>' if head == "layer" else f"<th>{head}</th>" for head in heads)
    rows = "".join(_row(part, dump.ms) for part in dump.parts)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{rows}{_total(dump)}</tbody></table>"


def _row(part: Part, total_ms: float) -> str:
    figures = (str(len(part.kernels)), _mib(part.num_bytes)) if part.captured else ("", "")
    words = ("yes" if part.captured else "no", *figures, f"{part.ms:.3f}", f"{100 * part.ms / (total_ms or 1):.1f}%")
    return f'<tr><td>{_text(part.name)}</td><td class="text">{_text(part.layer)}</td>{_cells(words)}</tr>'


def _total(dump: GraphDump) -> str:
    pieces = dump.pieces
    kernels, num_bytes = sum(len(p.kernels) for p in pieces), sum(p.num_bytes for p in pieces)
    words = (f"{len(pieces)} pieces", f"{kernels:,}", _mib(num_bytes), f"{dump.ms:.3f}", "100%")
    return f"<tr><td>all</td><td></td>{_cells(words)}</tr>"


def _cells(words: Iterable[str]) -> str:
    return "".join(f"<td>{_text(word)}</td>" for word in words)
