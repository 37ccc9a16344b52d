"""``weft bench serve``: load on a running server.

Job: flags of the load, and figures as a table and as JSON. Owns: the verb's output. Does not know: how to make load.
"""

import argparse
import dataclasses
import json
import os
from typing import Any

from weft.bench import report
from weft.cli.parser import add_verb, check_lowest, check_range
from weft.errors import ConfigError

_KINDS = ("fixed", "random", "multi-turn", "trace")
_SLO = ("ttft", "tpot", "e2e")


def add_parser(kinds: Any) -> None:
    parser = add_verb(kinds, "serve", run, "latency and throughput of any OpenAI-compatible server")
    group = parser.add_argument_group("load")
    group.add_argument("--base-url", default="http://127.0.0.1:8000/v1", metavar="URL", help="default: %(default)s")
    group.add_argument("--model", metavar="NAME", help="model to ask for; default: leave it to the server")
    group.add_argument("--key", metavar="KEY", help="API key (or set OPENAI_API_KEY)")
    group.add_argument("--kind", choices=_KINDS, default="random", help="default: random")
    group.add_argument("--num-requests", type=int, default=100, metavar="N", help="conversations; default: 100")
    group.add_argument(
        "--request-rate", type=float, nargs="+", metavar="X", help="conversations per second, Poisson; one run each"
    )
    group.add_argument(
        "--concurrency",
        type=int,
        nargs="+",
        metavar="N",
        help="conversations at a time, one run each; 0: no limit (default: 16, without limit at a --request-rate)",
    )
    group.add_argument(
        "--input-words", type=int, nargs=2, default=(20, 200), metavar=("MIN", "MAX"),
        help="words of a message; default: 20 200",
    )  # fmt: skip
    group.add_argument("--max-tokens", type=int, default=64, metavar="N", help="of an answer; default: 64")
    group.add_argument("--turns", type=int, default=4, metavar="N", help="questions each (multi-turn); default: 4")
    group.add_argument("--trace", metavar="FILE", help="JSON lines with timestamp, prompt, max_tokens")
    group.add_argument("--no-ignore-eos", action="store_true", help="let answers end by themselves")
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy")
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of the first run's prompts, one more for each further run; default: 0",
    )
    group.add_argument("--slo", nargs="+", default=[], metavar="NAME=MS", help="limits for goodput: ttft, tpot, e2e")
    group.add_argument("--extra-body", metavar="JSON", help='further fields of every request, such as {"top_k": 5}')
    group.add_argument("--json", metavar="FILE", help="write the figures there")
    group.add_argument("--plot", metavar="FILE", help="draw latency and throughput over the load, as SVG")


def run(args: argparse.Namespace) -> int:
    from weft.bench import serve
    from weft.bench.http_client import Target
    from weft.bench.serve_plot import picture

    target = Target.parse(args.base_url, args.key or os.environ.get("OPENAI_API_KEY"))
    json_path, plot_path = report.open_json(args.json), report.open_json(args.plot, "--plot")
    workloads = [_workload(args, number, *load) for number, load in enumerate(_sweep(args))]
    runs = []
    for workload in workloads:
        figures = serve.measure(target, args.model, workload)
        runs.append({"workload": dataclasses.asdict(workload), "results": figures})
    head = {"benchmark": "serve", "base_url": args.base_url} | report.origin()
    report.write_json(json_path, head | {"runs": runs})
    if plot_path is not None:
        plot_path.write_text(picture(f"{args.kind} load on {args.base_url}", runs), encoding="utf-8")
    _print(args.base_url, runs)
    return 1 if any(run["results"]["failed"] for run in runs) else 0


def _sweep(args: argparse.Namespace) -> list[tuple[float | None, int]]:
    """Rate and concurrency of each run. A rate alone is kept whatever the server does, so that its queue becomes
    visible."""
    rates: list[float | None] = args.request_rate or [None]
    concurrencies = args.concurrency or ([16] if args.request_rate is None else [0])
    return [(rate, concurrency) for rate in rates for concurrency in concurrencies]


def _workload(args: argparse.Namespace, number: int, rate: float | None, concurrency: int) -> Any:
    """The load of one run. Each run has a seed of its own, since prompts of an earlier run would be in the prefix
    cache."""
    from weft.bench.serve import ServeWorkload

    input_words = check_range(args, "input_words")
    check_lowest(args, num_requests=1, max_tokens=1, turns=1)
    if rate is not None and rate <= 0:
        raise ConfigError(f"--request-rate {rate}: give more than 0, or leave it out")
    if (args.kind == "trace") != (args.trace is not None):
        raise ConfigError("--trace FILE and --kind trace go together")
    if args.trace is not None and rate is not None:
        raise ConfigError("--request-rate has no effect with a trace, whose timestamps say when; leave it out")
    return ServeWorkload(
        kind=args.kind,
        num_requests=args.num_requests,
        request_rate=rate,
        concurrency=concurrency if concurrency > 0 else None,
        input_words=input_words,
        max_tokens=args.max_tokens,
        turns=args.turns,
        trace=args.trace,
        ignore_eos=not args.no_ignore_eos,
        temperature=args.temperature,
        seed=args.seed + number,
        slo_ms=dict(_slo(text) for text in args.slo),
        extra_body=_extra_body(args.extra_body),
    )


def _extra_body(text: str | None) -> dict[str, Any]:
    try:
        fields = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"--extra-body {text}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"--extra-body {text}: give a JSON object")
    return fields


def _slo(text: str) -> tuple[str, float]:
    name, _, limit = text.partition("=")
    try:
        value = float(limit)
    except ValueError:
        value = -1.0
    if name not in _SLO or value <= 0:
        raise ConfigError(f"--slo {text}: give NAME=MS with a NAME of {', '.join(_SLO)}")
    return name, value


def _print(base_url: str, runs: list[dict[str, Any]]) -> None:
    columns = ("rate", "concurrency", "requests/s", "output tok/s", "goodput/s", "failed",
               "TTFT p50 p99", "TPOT p50 p99", "ITL p50 p99", "E2E p50 p99")  # fmt: skip
    rows = []
    for run in runs:
        results = run["results"]
        latencies = [results[name] for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")]
        rows.append(
            [
                "" if run["workload"]["request_rate"] is None else f"{run['workload']['request_rate']:g}/s",
                str(run["workload"]["concurrency"] or "no limit"),
                f"{results['requests_per_s']:,.1f}",
                f"{results['output_tokens_per_s']:,.0f}",
                "" if results["goodput_per_s"] is None else f"{results['goodput_per_s']:,.1f}",
                str(results["failed"]),
                *("" if v is None else f"{v['p50']:,.1f} {v['p99']:,.1f} ms" for v in latencies),
            ]
        )
    report.table(f"Load on {base_url}", columns, rows)
    for error in {error for run in runs for error in run["results"]["errors"]}:
        print(f"error: {error}")
