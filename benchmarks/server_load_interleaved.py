"""``benchmarks.server_load`` of several trees or settings in turn: what else the machine does falls on all alike.

    python -m benchmarks.server_load_interleaved before=DIR now=. now-2=.:2 --rounds 4 --json FILE

``LABEL=TREE[:N]``: a checkout, and how many API processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from weft.bench import report
from weft.platforms.cpu import cpu_name


def measure(tree: str, count: str, arguments: list[str]) -> dict[str, Any]:
    """One command in one tree."""
    folder = Path(tree).resolve()
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "figures.json"
        command = [sys.executable, "-m", "benchmarks.server_load", "--json", str(file), *arguments]
        command += ["--api-server-count", count] if count else []
        env = os.environ | {"PYTHONPATH": str(folder)}
        subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True)
        figures = json.loads(file.read_text())
    return {name: figures[name] for name in ("load_average", "throughput", "latency")}


def medians(runs: list[dict[str, Any]]) -> dict[str, float]:
    rates = [repeat for run in runs for repeat in run["throughput"]]
    cost = [rate["processor_us_per_chat"] for rate in rates]
    return {
        "chats_per_s": statistics.median(rate["chats_per_s"] for rate in rates),
        "server_us_per_chat": statistics.median(us["server"] for us in cost),
        "lowest_server_us_per_chat": min(us["server"] for us in cost),
        "highest_server_us_per_chat": max(us["server"] for us in cost),
        "all_us_per_chat": statistics.median(sum(us.values()) for us in cost),
        "added_ms_p50": statistics.median(run["latency"]["added_ms"]["p50"] for run in runs),
        "added_ms_p99": statistics.median(run["latency"]["added_ms"]["p99"] for run in runs),
        "lowest_added_ms_p99": min(run["latency"]["added_ms"]["p99"] for run in runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", metavar="LABEL=TREE[:N]")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", default="2", help="of the throughput run, per round")
    parser.add_argument("--seconds", default="3")
    parser.add_argument("--tokens", default="300", help="per stream of the latency run")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    arguments = ["--repeats", args.repeats, "--seconds", args.seconds, "--tokens", args.tokens]
    runs: dict[str, list[dict[str, Any]]] = {what.partition("=")[0]: [] for what in args.what}
    for number in range(args.rounds):
        for what in args.what:
            label, _, place = what.partition("=")
            tree, _, count = place.partition(":")
            runs[label].append(measure(tree, count, arguments))
            print(f"round {number + 1}, {label}: {json.dumps(medians(runs[label][-1:]))}", file=sys.stderr)
    figures = {"processor": cpu_name(), "processors": os.cpu_count()} | report.origin()
    figures |= {"medians": {label: medians(several) for label, several in runs.items()}, "runs": runs}
    print(json.dumps(figures["medians"], indent=1))
    if args.json:
        report.write_json(report.open_json(args.json), figures)


if __name__ == "__main__":
    main()
