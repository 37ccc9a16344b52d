"""``weft bench trace``: replay a trace of agents' requests at a running server, or make one.

Job: flags of the replay, and figures as a table, as JSON and as a picture. Owns: the verb's output. Does not know: how
to replay a trace.
"""

import argparse
import dataclasses
import os
from typing import Any

from weft.bench import report
from weft.cli.parser import add_verb, check_lowest
from weft.errors import ConfigError


def add_parser(kinds: Any) -> None:
    parser = add_verb(kinds, "trace", run, "replay a trace of agents at any OpenAI-compatible server")
    parser.add_argument("trace", metavar="FILE", help="JSON lines in Mooncake's format, see docs/serving.md")
    group = parser.add_argument_group("replay")
    group.add_argument("--base-url", default="http://127.0.0.1:8000/v1", metavar="URL", help="default: %(default)s")
    group.add_argument("--model", metavar="NAME", help="model to ask for; default: leave it to the server")
    group.add_argument("--key", metavar="KEY", help="API key (or set OPENAI_API_KEY)")
    group.add_argument("--rate", type=float, default=1.0, metavar="X", help="factor on arrivals and think times")
    group.add_argument("--scale", type=float, default=1.0, metavar="X", help="factor on lengths and blocks")
    group.add_argument("--sessions", type=int, metavar="N", help="sessions at a time (default: no limit)")
    group.add_argument("--block-size", type=int, default=512, metavar="N", help="tokens of a hash id; default: 512")
    group.add_argument("--vocab-size", type=int, default=1000, metavar="N", help="ids are below it; default: 1000")
    group.add_argument("--json", metavar="FILE", help="write the figures there")
    group.add_argument("--plot", metavar="FILE", help="draw hit rates and first tokens over time, as SVG")
    made = parser.add_argument_group("make a trace of coding agents instead of replaying one")
    made.add_argument("--generate", type=int, metavar="SESSIONS", help="write FILE with so many sessions, then stop")
    made.add_argument("--turns", type=int, default=30, metavar="N", help="mean requests of a session; default: 30")
    made.add_argument("--max-context", type=int, default=150_000, metavar="N", help="tokens; default: 150000")
    made.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")


def run(args: argparse.Namespace) -> int:
    check_lowest(args, block_size=1, vocab_size=2, turns=1)
    for name in ("rate", "scale"):
        if getattr(args, name) <= 0:
            raise ConfigError(f"--{name} {getattr(args, name)}: give more than 0")
    return _generate(args) if args.generate is not None else _replay(args)


def _generate(args: argparse.Namespace) -> int:
    from weft.bench.agent_trace import AgentTrace, write_trace

    check_lowest(args, generate=1, max_context=20_000)
    report.open_json(args.trace, "FILE")  # refuses a path that cannot be written
    trace = AgentTrace(
        sessions=args.generate, turns=args.turns, max_context=args.max_context, block_size=args.block_size,
        seed=args.seed,
    )  # fmt: skip
    print(f"{write_trace(args.trace, trace)} requests of {args.generate} sessions written to {args.trace}")
    return 0


def _replay(args: argparse.Namespace) -> int:
    from weft.bench import trace
    from weft.bench.http_client import Target

    if args.sessions is not None:
        check_lowest(args, sessions=1)
    target = Target.parse(args.base_url, args.key or os.environ.get("OPENAI_API_KEY"))
    json_path, plot_path = report.open_json(args.json), report.open_json(args.plot, "--plot")
    requests = trace.read_trace(args.trace, args.scale)
    block_size = max(1, round(args.block_size * args.scale))
    replay = trace.Replay(block_size, args.vocab_size, args.rate, args.sessions)
    figures = trace.measure(target, args.model, requests, replay)
    head = {"benchmark": "trace", "base_url": args.base_url, "trace": os.path.basename(args.trace)} | report.origin()
    report.write_json(json_path, head | {"replay": dataclasses.asdict(replay), "results": figures})
    if plot_path is not None:
        from weft.bench.serve_plot import over_time

        plot_path.write_text(over_time(f"{args.trace} at {args.base_url}", figures["rows"]), encoding="utf-8")
    _print(args.base_url, figures)
    return 1 if figures["failed"] else 0


def _print(base_url: str, figures: dict[str, Any]) -> None:
    below = figures["external_hit_rate"]
    rows = [
        ["prompt tokens reused", f"{figures['hit_rate']:.1%}"],
        ["of these from tiers below the device", "not counted" if below is None else f"{below:.1%}"],
        ["reusable with an unbounded cache", f"{figures['theoretical_hit_rate']:.1%}"],
        ["requests, failed", f"{figures['requests']}, {figures['failed']}"],
        ["output tokens per second", f"{figures['output_tokens_per_s']:,.1f}"],
    ]
    for name, what in (("ttft_ms", "time to first token"), ("itl_ms", "between two chunks"), ("e2e_ms", "end to end")):
        if found := figures[name]:
            rows.append([f"{what}, ms: p50, p90, p99", f"{found['p50']:.1f}, {found['p90']:.1f}, {found['p99']:.1f}"])
    report.table(f"{base_url}: {figures['seconds']:.1f} s", ("", ""), rows)
    for error in figures["errors"]:
        print(f"failed: {error}")
