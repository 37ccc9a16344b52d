"""``weft bench latency`` and ``weft bench throughput``.

Job: flags of the benchmarks' workloads, and their figures as a table and as JSON. Owns: the verb's output.
Does not know: how things are measured.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from weft import report
from weft.bench import latency, throughput
from weft.cli.flags import add_engine_flags, engine_settings
from weft.cli.parser import Parser, add_verb
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.engine.llm import LLM


def add_parser(verbs: Any) -> None:
    parser = add_verb(verbs, "bench", _missing, "measure speed", usage="bench {latency,throughput} [flags]")
    kinds = parser.add_subparsers(title="benchmarks", metavar="NAME", dest="benchmark", required=True)
    _add_latency(kinds)
    _add_throughput(kinds)


def _missing(args: argparse.Namespace) -> int:
    raise AssertionError("argparse requires the name of a benchmark")


def _add_latency(kinds: Any) -> None:
    default = latency.LatencyWorkload()
    parser = add_verb(kinds, "latency", run_latency, "milliseconds per decode step", usage="bench latency [flags]")
    group = parser.add_argument_group("workload")
    group.add_argument("--batch-sizes", type=int, nargs="+", default=default.batch_sizes, metavar="N")
    group.add_argument("--prompt-len", type=int, default=default.prompt_len, metavar="N", help="tokens per prompt")
    group.add_argument("--output-len", type=int, default=default.output_len, metavar="N", help="new tokens, 2 or more")
    group.add_argument("--temperature", type=float, default=default.temperature, metavar="X", help="0 is greedy")
    _add_common(parser, group, default.repeats)


def _add_throughput(kinds: Any) -> None:
    default = throughput.ThroughputWorkload()
    parser = add_verb(
        kinds, "throughput", run_throughput, "tokens per second over a queue", usage="bench throughput [flags]"
    )
    group = parser.add_argument_group("workload")
    group.add_argument("--num-prompts", type=int, default=default.num_prompts, metavar="N")
    for name, (low, high) in (("prompt", default.prompt_len), ("output", default.output_len)):
        group.add_argument(
            f"--{name}-len",
            type=int,
            nargs=2,
            default=(low, high),
            metavar=("MIN", "MAX"),
            help=f"default: {low} {high}",
        )
    group.add_argument("--temperature", type=float, default=default.temperature, metavar="X", help="0 is greedy")
    group.add_argument("--warmups", type=int, default=default.warmups, metavar="N", help="runs that do not count")
    _add_common(parser, group, default.repeats)


def _add_common(parser: Parser, group: argparse._ArgumentGroup, repeats: int) -> None:
    group.add_argument("--repeats", type=int, default=repeats, metavar="N", help=f"default: {repeats}")
    group.add_argument("--json", metavar="FILE", help="write the figures there")
    add_engine_flags(parser)


def run_latency(args: argparse.Namespace) -> int:
    _check(args, repeats=1, prompt_len=1, output_len=2)
    if min(args.batch_sizes) < 1:
        raise ConfigError(f"--batch-sizes {min(args.batch_sizes)}: give 1 or more")
    workload = latency.LatencyWorkload(
        tuple(args.batch_sizes), args.prompt_len, args.output_len, args.temperature, args.repeats
    )
    json_path = report.open_json(args.json)
    with _engine(args, max_num_seqs=max(args.batch_sizes)) as llm:
        results = latency.measure(llm, workload)
        report.write_json(json_path, _figures("latency", llm, workload) | {"results": results})
        name = report.device_name(llm.config.device)
    columns = ("batch", "ms per step", "ms between steps", "tokens/s", "ms to one token")
    keys = ("batch_size", "step_ms", "interval_ms", "tokens_per_s", "one_token_ms")
    report.table(f"Decode latency on {name}", columns, [[str(row[key]) for key in keys] for row in results])
    return 0


def run_throughput(args: argparse.Namespace) -> int:
    _check(args, repeats=1, num_prompts=1, warmups=0)
    for name in ("prompt_len", "output_len"):
        low, high = getattr(args, name)
        if not 1 <= low <= high:
            raise ConfigError(f"--{name.replace('_', '-')} {low} {high}: give MIN and MAX with 1 <= MIN <= MAX")
    workload = throughput.ThroughputWorkload(
        args.num_prompts, tuple(args.prompt_len), tuple(args.output_len), args.temperature, args.warmups, args.repeats
    )
    json_path = report.open_json(args.json)
    with _engine(args) as llm:
        results = throughput.measure(llm, workload)
        report.write_json(json_path, _figures("throughput", llm, workload) | {"results": results})
        name = report.device_name(llm.config.device)
    rows = [[key, f"{value:,}"] for key, value in results.items() if key != "repeats"]
    report.table(f"Throughput on {name}", ("", ""), rows)
    return 0


def _check(args: argparse.Namespace, **lowest: int) -> None:
    for name, low in lowest.items():
        if getattr(args, name) < low:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: give {low} or more")


def _engine(args: argparse.Namespace, **defaults: Any) -> LLM:
    """The engine under test. Workloads are token ids, so no tokenizer is loaded; and they are repeated, so that the
    prefix cache is off unless asked for: it would answer the repeats."""
    from weft.engine.llm import LLM

    return LLM(**({"skip_tokenizer_init": True, "enable_prefix_caching": False} | defaults | engine_settings(args)))


def _figures(name: str, llm: LLM, workload: Any) -> dict[str, Any]:
    head = {"benchmark": name} | report.provenance(llm.config.device)
    return head | {"config": report.settings(llm.config), "workload": dataclasses.asdict(workload)}
