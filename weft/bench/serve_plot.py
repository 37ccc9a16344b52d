"""A picture of a sweep of ``weft bench serve``: latency and throughput against the load, as one SVG file."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate
from typing import Any

Series = Mapping[str, Sequence[float | None]]
"""Values by name, one per run; None where a run has none."""

WIDTH, HEIGHT = 380, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 52, 46
_COLOURS = ("#1f6fb4", "#d1495b", "#2e8b57", "#8a5fbf")
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.title{font-size:14px;font-weight:600}"
    ".grid{stroke:#ddd}.axis{stroke:#666}polyline{fill:none;stroke-width:2}"
    "@media(prefers-color-scheme:dark){svg{background:#15181f}text{fill:#dde}.grid{stroke:#333}.axis{stroke:#999}}"
)


def picture(title: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """Draw an SVG with a panel each for TTFT, TPOT, end-to-end latency and throughput.

    Args:
        title: text above the panels.
        runs: ``workload`` and ``results`` of each run, as ``weft bench serve --json`` writes them. The load is the
            request rate if every run has one, else the concurrency. A run without a limit is drawn at its number of
            requests.
    """
    label, loads = _loads(runs)
    order = sorted(range(len(runs)), key=lambda i: loads[i])
    xs = [loads[i] for i in order]
    results = [runs[i]["results"] for i in order]
    panels = [
        ("time to first token, ms", _percentiles(results, "ttft_ms")),
        ("time per output token, ms", _percentiles(results, "tpot_ms")),
        ("end to end, ms", _percentiles(results, "e2e_ms")),
        ("requests per second", _rates(results)),
    ]
    return _side_by_side(title, [panel(name, label, xs, series) for name, series in panels])


def over_time(title: str, rows: Sequence[Sequence[float]]) -> str:
    """Draw an SVG of a replayed trace: the share of prompt tokens reused so far, and the time to the first token.

    Args:
        title: text above the panels.
        rows: ``[seconds, first token in ms, prompt tokens, cached tokens]`` of each request.
    """
    ordered = sorted(rows, key=lambda row: row[0])
    xs = [row[0] for row in ordered]
    asked, reused = accumulate(row[2] for row in ordered), accumulate(row[3] for row in ordered)
    shares = [100 * part / max(1, whole) for whole, part in zip(asked, reused, strict=True)]
    panels = [
        ("prompt tokens reused so far, %", {"reused": shares}),
        ("time to first token, ms", {"one request": [row[1] for row in ordered]}),
    ]
    return _side_by_side(title, [panel(name, "seconds", xs, series) for name, series in panels])


def _side_by_side(title: str, panels: Sequence[str]) -> str:
    drawn = [f'<g transform="translate({i * WIDTH},28)">{each}</g>' for i, each in enumerate(panels)]
    width, height = WIDTH * len(panels), HEIGHT + 28
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f'<style>{_STYLE}</style><text class="title" x="12" y="20">{escape(title)}</text>{"".join(drawn)}</svg>\n'
    )


def _loads(runs: Sequence[Mapping[str, Any]]) -> tuple[str, list[float]]:
    rates = [run["workload"]["request_rate"] for run in runs]
    if all(rate is not None for rate in rates):
        return "conversations sent per second", rates
    workloads = [run["workload"] for run in runs]
    return "conversations at a time", [w["concurrency"] or w["num_requests"] for w in workloads]


def _percentiles(results: Sequence[Mapping[str, Any]], name: str) -> Series:
    return {p: [None if r[name] is None else r[name][p] for r in results] for p in ("p50", "p99")}


def _rates(results: Sequence[Mapping[str, Any]]) -> Series:
    served: dict[str, Sequence[float | None]] = {"answered": [r["requests_per_s"] for r in results]}
    if any(r["goodput_per_s"] is not None for r in results):
        served["within the SLO"] = [r["goodput_per_s"] for r in results]
    return served


def panel(title: str, label: str, xs: Sequence[float], series: Series) -> str:
    """One plot of ``WIDTH`` by ``HEIGHT``: values from zero upwards over ``xs`` (ascending), both linear."""
    values = [value for line in series.values() for value in line if value is not None]
    right, top = _ceiling(max(xs, default=1.0)), _ceiling(max(values, default=1.0))

    def to_pixels(x: float, y: float) -> tuple[float, float]:
        across, up = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
        return round(_LEFT + across * x / right, 1), round(HEIGHT - _BOTTOM - up * y / top, 1)

    shapes = [_axes(label, right, top, to_pixels), f'<text class="title" x="{_LEFT}" y="16">{escape(title)}</text>']
    for i, (name, line) in enumerate(series.items()):
        points = [to_pixels(x, y) for x, y in zip(xs, line, strict=True) if y is not None]
        shapes.append(_line(name, points, _COLOURS[i % len(_COLOURS)], _LEFT + 110 * i))
    return "".join(shapes)


def _axes(label: str, right: float, top: float, to_pixels: Any) -> str:
    shapes = []
    for step in range(5):
        x, y = right * step / 4, top * step / 4
        (left, level), (across, bottom) = to_pixels(0, y), to_pixels(x, 0)
        shapes.append(f'<line class="grid" x1="{left}" x2="{WIDTH - _RIGHT}" y1="{level}" y2="{level}"/>')
        shapes.append(f'<text x="{left - 6}" y="{level + 4}" text-anchor="end">{y:g}</text>')
        shapes.append(f'<text x="{across}" y="{bottom + 16}" text-anchor="middle">{x:g}</text>')
    left, bottom = to_pixels(0, 0)
    shapes.append(f'<line class="axis" x1="{left}" x2="{WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    shapes.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(label)}</text>')
    return "".join(shapes)


def _line(name: str, points: Sequence[tuple[float, float]], colour: str, legend_x: float) -> str:
    path = " ".join(f"{x},{y}" for x, y in points)
    dots = "".join(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in points)
    legend = (
        f'<circle cx="{legend_x + 4}" cy="32" r="4" fill="{colour}"/><text x="{legend_x + 12}" y="36">{name}</text>'
    )
    return f'<polyline points="{path}" stroke="{colour}"/>{dots}{legend}'


def _ceiling(value: float) -> float:
    """The next larger number that four equal steps divide into round ones."""
    if value <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(unit * step for step in (1, 2, 4, 6, 8, 10) if unit * step >= value * 0.999)
