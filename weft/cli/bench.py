"""``weft bench latency | throughput | prefill | startup | prefix | scaling | serve | trace``.

Job: flags of the benchmarks' workloads, and figures as a table and as JSON. Owns: the verb's output. Does not know: how
to measure.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_type_hints

from weft.bench import latency, prefill, report, startup, throughput
from weft.bench.prefix_workloads import WORKLOADS
from weft.cli import bench_scaling, bench_serve, bench_trace
from weft.cli.flags import add_engine_flags, engine_settings
from weft.cli.parser import Parser, add_verb, check_lowest, check_range
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.bench.prefix import PrefixWorkload
    from weft.engine.llm import LLM


_REPLAYED = ("enable_prefix_caching", "state_checkpoint_policy", "eviction_policy", "num_kv_pages", "num_state_slots")
"""Settings of the caches on which ``weft bench prefix --replay`` replays requests."""

_KINDS = "{latency,throughput,prefill,startup,prefix,scaling,serve,trace}"


def add_parser(verbs: Any, help: str) -> None:
    parser = add_verb(verbs, "bench", _missing, help, arguments=f"{_KINDS} [flags]")
    kinds = parser.add_subparsers(title="benchmarks", metavar="NAME", dest="benchmark", required=True, prog=parser.prog)
    _add_workload(
        add_verb(kinds, "latency", run_latency, "milliseconds per decode step"), latency.LatencyWorkload(),
        batch_sizes="sequences that decode together, one run each", prompt_len="tokens per prompt",
        output_len="new tokens, 2 or more", temperature="0 is greedy", repeats="",
    )  # fmt: skip
    _add_workload(
        add_verb(kinds, "throughput", run_throughput, "tokens per second over a queue"),
        throughput.ThroughputWorkload(), num_prompts="", prompt_len="tokens per prompt",
        output_len="tokens per output", temperature="0 is greedy", warmups="runs that do not count", repeats="",
    )  # fmt: skip
    _add_workload(
        add_verb(kinds, "prefill", run_prefill, "milliseconds to the first token"), prefill.PrefillWorkload(),
        prompt_lens="tokens per prompt, one run each", repeats="",
    )  # fmt: skip
    _add_workload(
        add_verb(kinds, "startup", run_startup, "seconds from process start to a ready engine"),
        startup.StartupWorkload(), cold_repeats="starts with an empty kernel cache",
        warm_repeats="starts after each of those",
    )  # fmt: skip
    _add_prefix(kinds)
    bench_scaling.add_parser(kinds)
    bench_serve.add_parser(kinds)
    bench_trace.add_parser(kinds)


def _missing(args: argparse.Namespace) -> int:
    raise AssertionError("argparse requires the name of a benchmark")


def _add_workload(parser: Parser, workload: Any, **helps: str) -> None:
    """Add a flag for each of these fields of the workload, with the field's value as default, and the flags of every
    benchmark."""
    group = parser.add_argument_group("workload")
    for name, help in helps.items():
        default = getattr(workload, name)
        several = isinstance(default, tuple)
        kind = type(default[0] if several else default)
        arguments: dict[str, Any] = {"type": kind, "default": default, "metavar": "X" if kind is float else "N"}
        if several:
            is_range = get_type_hints(type(workload))[name] == tuple[int, int]
            arguments |= {"nargs": 2, "metavar": ("MIN", "MAX")} if is_range else {"nargs": "+"}
        shown = " ".join(map(str, default)) if several else default
        help = f"{help}; default: {shown}" if help else f"default: {shown}"
        group.add_argument(f"--{name.replace('_', '-')}", help=help, **arguments)
    group.add_argument("--json", metavar="FILE", help="write the figures there")
    add_engine_flags(parser)


def _workload(args: argparse.Namespace, kind: Any) -> Any:
    """Make the workload from the flags. Fields without a flag keep their defaults."""
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(kind) if hasattr(args, f.name)}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def _add_prefix(kinds: Any) -> None:
    parser = add_verb(kinds, "prefix", run_prefix, "reuse of shared prompt prefixes")
    group = parser.add_argument_group("workload")
    group.add_argument("--workload", choices=list(WORKLOADS), default="chat", help="default: chat")
    group.add_argument("--workload-seed", type=int, default=0, metavar="N", help="default: 0")
    group.add_argument(
        "--replay",
        action="store_true",
        help="run no model: replay the workload on caches of every checkpoint policy, eviction and size",
    )
    group.add_argument(
        "--cache-shares", type=float, nargs="+", metavar="X",
        help="cache sizes of --replay, as shares of what an unbounded cache stores; default: 1/3 and 1/6",
    )  # fmt: skip
    group.add_argument("--json", metavar="FILE", help="write the figures there")
    add_engine_flags(parser)


def run_latency(args: argparse.Namespace) -> int:
    check_lowest(args, repeats=1, prompt_len=1, output_len=2, batch_sizes=1)
    workload = _workload(args, latency.LatencyWorkload)
    results, device = _measured(args, "latency", latency.measure, workload, max_num_seqs=max(args.batch_sizes))
    drafts = any("tokens_per_step" in row for row in results)
    columns = {
        "batch": "batch_size",
        "ms per token" if drafts else "ms per step": "step_ms",
        "ms between steps": "interval_ms",
        "tokens/s": "tokens_per_s",
        "ms to one token": "one_token_ms",
    }
    if drafts:
        columns |= {"tokens per step": "tokens_per_step", "accepted": "acceptance_rate"}
    _table(f"Decode latency on {device}", columns, results)
    return 0


def run_prefill(args: argparse.Namespace) -> int:
    check_lowest(args, repeats=1, prompt_lens=1)
    given = _workload(args, prefill.PrefillWorkload)

    def fitting(llm: LLM) -> prefill.PrefillWorkload:
        return dataclasses.replace(given, prompt_lens=_fitting_lens(args, llm))

    results, device = _measured(args, "prefill", prefill.measure, fitting)
    columns = {"prompt tokens": "prompt_len", "ms to first token": "first_token_ms", "tokens/s": "tokens_per_s"}
    _table(f"Prefill on {device}", columns, results)
    return 0


def _fitting_lens(args: argparse.Namespace, llm: LLM) -> tuple[int, ...]:
    """The lengths that fit the context with one new token. Raises ConfigError if a given length does not fit, or none
    does."""
    room = llm.max_model_len - 1
    fitting = tuple(length for length in args.prompt_lens if length <= room)
    if len(fitting) == len(args.prompt_lens):
        return fitting
    if not fitting or args.prompt_lens != prefill.PrefillWorkload().prompt_lens:
        raise ConfigError(f"--prompt-lens {max(args.prompt_lens)}: the context has room for at most {room}")
    print(f"weft: longer prompts than {room} tokens are left out: the context has no room for them", file=sys.stderr)
    return fitting


def run_startup(args: argparse.Namespace) -> int:
    check_lowest(args, cold_repeats=1, warm_repeats=0)
    workload = _workload(args, startup.StartupWorkload)
    json_path = report.open_json(args.json)
    figures = startup.measure({"skip_tokenizer_init": True} | engine_settings(args), workload)
    head = {"benchmark": "startup"} | report.provenance("cpu") | {"workload": dataclasses.asdict(workload)}
    report.write_json(json_path, head | figures)
    found = figures["results"]
    flat = {kind: {**row, **{f"  {k}": v for k, v in row["stages"].items()}} for kind, row in found.items()}
    rows = [[key, *(str(flat[kind][key]) for kind in flat)] for key in flat["cold"] if key not in ("stages", "repeats")]
    report.table(f"Start-up in seconds on {figures['device']}", ("", *flat), rows)
    return 0


def _table(title: str, columns: dict[str, str], rows: list[dict[str, Any]]) -> None:
    """Print a table. ``columns``: heading -> key. The distance from the roofline follows, if the device's ceilings are
    known."""
    known = rows[0]["floor_ms"] is not None
    if known:
        columns = columns | {"roofline ms": "floor_ms", "of roofline": "floor_share"}
    report.table(title, tuple(columns), [[str(row.get(key, "-")) for key in columns.values()] for row in rows])
    if not known:
        print("No roofline: the ceilings of this device are not known.")


def run_throughput(args: argparse.Namespace) -> int:
    check_lowest(args, repeats=1, num_prompts=1, warmups=0)
    check_range(args, "prompt_len")
    check_range(args, "output_len")
    workload = _workload(args, throughput.ThroughputWorkload)
    results, device = _measured(args, "throughput", throughput.measure, workload)
    rows = [[key, f"{value:,}"] for key, value in results.items() if key != "repeats" and value is not None]
    report.table(f"Throughput on {device}", ("", ""), rows)
    return 0


def run_prefix(args: argparse.Namespace) -> int:
    from weft.bench import prefix

    workload = prefix.PrefixWorkload(args.workload, args.workload_seed)
    if args.replay:
        return _replay_prefix(args, workload)
    if args.cache_shares is not None:
        raise ConfigError("--cache-shares has no effect without --replay; give both or none")
    results, device = _measured(args, "prefix", prefix.measure, workload, enable_prefix_caching=True)
    report.table(f"Prefix reuse, {args.workload}, on {device}", ("", ""), [[k, f"{v:,}"] for k, v in results.items()])
    return 0


def _replay_prefix(args: argparse.Namespace, workload: PrefixWorkload) -> int:
    """Replay the workload on caches alone. Only the model's geometry is read."""
    from weft.bench import prefix
    from weft.cache.spec import CacheSpec
    from weft.config import resolve

    json_path = report.open_json(args.json)
    shares = args.cache_shares or [1 / 3, 1 / 6]
    wrong = [share for share in shares if not 0 < share <= 1]
    if wrong:
        raise ConfigError(f"--cache-shares {wrong[0]}: give shares above 0, at most 1")
    for name in _REPLAYED:
        if name in engine_settings(args):
            raise ConfigError(f"--{name.replace('_', '-')} is what --replay varies; leave it out")
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu"} | engine_settings(args)
    config = resolve(**settings)
    spec = CacheSpec.of(config)
    rows = prefix.replay(spec, workload, config.model_config.vocab_size, shares)
    head = {"benchmark": "prefix-replay"} | report.provenance("cpu") | {"workload": dataclasses.asdict(workload)}
    report.write_json(json_path, head | {"config": report.settings(config), "results": rows})
    table = [[str(value) for value in row.values()] for row in rows]
    report.table(
        f"Prefix reuse without a model, {args.workload}", tuple(name.replace("_", " ") for name in rows[0]), table
    )
    return 0


def _measured(
    args: argparse.Namespace, name: str, measure: Callable[[LLM, Any], Any], workload: Any, **defaults: Any
) -> tuple[Any, str]:
    """Measure a workload, and write the results as JSON if asked for. Returns them, and the device's name.

    Workloads are token ids, so no tokenizer is loaded. They are repeated, so the prefix cache is off unless asked for:
    it would answer the repeats.

    Args:
        workload: the workload, or a function that makes it for the engine.
    """
    from weft import LLM

    json_path = report.open_json(args.json)
    plain = {"skip_tokenizer_init": True, "enable_prefix_caching": False}
    with LLM(**(plain | defaults | engine_settings(args))) as llm:
        workload = workload(llm) if callable(workload) else workload
        results = measure(llm, workload)
        head = {"benchmark": name} | report.provenance(llm.config.device) | {"config": report.settings(llm.config)}
        report.write_json(json_path, head | {"workload": dataclasses.asdict(workload), "results": results})
        return results, report.device_name(llm.config.device)
