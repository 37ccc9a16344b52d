"""Does the measured choice of graphs ever lose? Every fixed mode against the tuned one, length by length.

python benchmarks/tuned_choice.py --model benchmarks/configs/qwen3-0.6b --load-format dummy --json FILE

One engine holds the graphs of every mode. It is tuned first, or reads ``--graph-profile``. Then every length runs in
every fixed mode and in the tuned mode, in interleaved rounds: prompts alone, prompts with decodes, decodes alone.

A length holds if the tuned median is at most 3% above that of the fastest mode in which it ran. If the rounds of that
mode scatter more (the distance of their quartiles over their median), the limit is the scatter. The exit status is 1
if a length does not hold, or if one mode was the fastest everywhere: whoever always chose that mode could not have
lost. Few captured sizes, such as ``--piecewise-cuda-graph-tokens 128 4096``, make batches that are faster without a
graph than padded.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec

from weft.bench import report
from weft.bench.step_timing import Change, Effort, StepMaker, compare, measure_modes, time_step
from weft.cli.flags import add_engine_flags, engine_settings
from weft.cli.tune import CONTEXT, tuning_config
from weft.config.graph_modes import CudaGraphMode
from weft.config.graph_profile import GraphProfile, empty_profile, read_profile
from weft.messages import SchedulerOutput
from weft.pieces.mode_table import ModeTable
from weft.runner.model_runner import ModelRunner

FIXED = (CudaGraphMode.NONE, CudaGraphMode.PIECEWISE, CudaGraphMode.FULL)
"""Modes without a choice. Under any other mode, a batch runs in one of these."""

TUNED = str(CudaGraphMode.TUNED)
ALLOWED = 0.03

LENGTHS = (16, 32, 64, 100, 128, 256, 500, 512, 1000, 1024, 2048, 3000, 4096, 8192)
BATCHES = (1, 2, 3, 8, 9, 32, 33, 64, 128, 256)


def candidates(profile: GraphProfile) -> dict[str, Change]:
    """The fixed modes by their rules, and the tuned one by its table."""
    table = ModeTable.of(profile)
    found: dict[str, Change] = {str(mode): partial(dataclasses.replace, mode=mode, table=None) for mode in FIXED}
    return found | {TUNED: lambda d: dataclasses.replace(d, table=table)}


def judge(kind: str, size: int, times: dict[str, list[float]], ran: dict[str, str]) -> dict[str, Any]:
    """Return one row of figures, in milliseconds. ``ran``: the mode in which each candidate ran the batch. Candidates
    with the same mode are pooled: the best of three medians of the same thing would be below the true median."""
    ms = {name: median(values) for name, values in times.items()}
    rounds: dict[str, list[float]] = {}
    for mode in map(str, FIXED):
        rounds.setdefault(ran[mode], []).extend(times[mode])
    best = min(rounds, key=lambda mode: median(rounds[mode]))
    spread, best_ms = _spread(rounds[best]), median(rounds[best])
    excess = ms[TUNED] / best_ms - 1
    return {
        "kind": kind,
        "tokens": size,
        "ms": {name: round(value, 4) for name, value in ms.items()},
        "best": best,
        "best_ms": round(best_ms, 4),
        "chosen": ran[TUNED],
        "excess": round(excess, 4),
        "spread": round(spread, 4),
        "holds": excess <= max(ALLOWED, spread),
        "repeats_ms": {name: [round(value, 4) for value in values] for name, values in times.items()},
    }


def _spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = quantiles(values, n=4)
    return (high - low) / median(values)


def run_all(
    runner: ModelRunner, profile: GraphProfile, effort: Effort, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Figures of every length and batch size that the runner can hold."""
    maker = StepMaker(runner, effort.context)
    most_tokens, most_seqs = runner.config.max_num_batched_tokens, runner.plan.max_num_seqs
    lengths = [n for n in args.lengths if n <= most_tokens]
    work: list[tuple[str, Callable[[int], SchedulerOutput], int]] = []
    work += [("decode", maker.decode, n) for n in sorted(args.batches, reverse=True) if n <= most_seqs]
    work += [("mixed", maker.mixed, n) for n in lengths if n > 1 and most_seqs > 1]
    work += [("prefill", maker.prefill, n) for n in lengths]
    everyone, rows = candidates(profile), []
    for kind, make, size in work:
        step, ran = make(size), {}
        for name, change in everyone.items():
            with runner.graphs.dispatching(change):
                _, ran[name] = time_step(runner, step)
        times = compare(runner, step, everyone, effort.repeats, effort.max_s)
        rows.append(judge(kind, size, times, ran))
    return rows


def verdict(rows: Sequence[dict[str, Any]]) -> tuple[int, str]:
    """Exit status, and what to say."""
    lost = [f"{row['kind']} of {row['tokens']}" for row in rows if not row["holds"]]
    said = f"Slower than the best fixed mode by more than is allowed: {', '.join(lost) or 'nowhere'}."
    best = {mode: sum(row["best"] == mode for row in rows) for mode in sorted({row["best"] for row in rows})}
    said += f" Best: {', '.join(f'{mode} {count} times' for mode, count in best.items())}."
    if len(best) < 2:
        said += " One mode was the best everywhere, so no choice was tested; give other lengths or captured sizes."
    return int(bool(lost) or len(best) < 2), said


def show(rows: Sequence[dict[str, Any]], device: str) -> None:
    names = [*map(str, FIXED), TUNED]
    table = [
        [
            row["kind"],
            str(row["tokens"]),
            *(f"{row['ms'][name]:.3f}" for name in names),
            row["chosen"],
            f"{100 * row['excess']:+.1f}%",
            f"{100 * row['spread']:.1f}%",
            "yes" if row["holds"] else "NO",
        ]
        for row in rows
    ]
    columns = ("batch", "tokens", *names, "it chose", "over best", "spread", "holds")
    report.table(f"Fixed modes and the tuned one on {device}: ms per step", columns, table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="N")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, metavar="N", help="decodes")
    parser.add_argument("--repeats", type=int, default=25, metavar="N")
    parser.add_argument("--seconds", type=float, default=1.5, metavar="X", help="most time per row; 5 rounds at least")
    parser.add_argument("--context", type=int, metavar="N", help="tokens of a decoding sequence")
    parser.add_argument("--json", metavar="FILE")
    add_engine_flags(parser)
    args = parser.parse_args(argv)
    json_path = report.open_json(args.json)
    settings = engine_settings(args)
    stored = settings.pop("graph_profile", None)
    config = tuning_config(settings)
    runner = ModelRunner(config)
    effort = Effort(args.repeats, args.seconds, args.context or CONTEXT[config.device])
    if stored is not None:
        profile = read_profile(Path(stored))
    else:
        values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        quick = dataclasses.replace(effort, repeats=min(15, effort.repeats), max_s=min(0.5, effort.max_s))
        profile = measure_modes(runner, empty_profile(values, config.model_config), quick, show_progress=os.isatty(2))
    rows = run_all(runner, profile, effort, args)
    head = {"benchmark": "tuned_choice"} | report.provenance(config.device) | {"config": report.settings(config)}
    report.write_json(json_path, head | {"profile": msgspec.to_builtins(profile), "results": rows})
    show(rows, report.device_name(config.device))
    status, said = verdict(rows)
    print(said)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
