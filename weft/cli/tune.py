"""``weft tune``: measure which graphs are fastest for which batches, and store the result for later starts. With
``--speculative-config`` it measures how many drafts pay instead.

Job: an engine with every kind of graph, its figures as a table, and the profile on disk. Owns: the verb's output. Does
not know: how steps are timed, or how a profile decides.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.bench import report
from weft.cli.flags import add_engine_flags, engine_settings
from weft.cli.parser import add_verb, check_lowest
from weft.config.fields import EngineConfig
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.bench import draft_depth
    from weft.bench.step_timing import Effort
    from weft.config.draft_profile import DraftProfile
    from weft.config.graph_profile import GraphProfile, Timing
    from weft.config.speculation import SpeculativeConfig

_DECIDED = ("cuda_graph_mode", "graph_profile", "enforce_eager", "enable_piecewise_cuda_graph")
"""Settings that fix how batches run, which the measurement decides."""

CONTEXT = {"cuda": 1024, "cpu": 64}
"""Length of a decoding sequence in tokens, unless the user names another one."""


def add_parser(verbs: Any, help: str) -> None:
    parser = add_verb(verbs, "tune", run, help)
    group = parser.add_argument_group("measurement")
    group.add_argument("--output", metavar="FILE", help="write the profile there; default: where a start looks for it")
    group.add_argument("--repeats", type=int, default=15, metavar="N", help="rounds per batch; default: 15")
    group.add_argument("--seconds", type=float, default=0.5, metavar="X", help="most time per batch; default: 0.5")
    group.add_argument("--context", type=int, metavar="N", help="tokens of a decoding sequence; default: 1024, CPU 64")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    _check(args)
    settings = engine_settings(args)
    if settings.get("speculative_config") is not None:
        return _tune_drafts(args, settings)
    config = tuning_config(settings)
    import msgspec

    from weft.bench.step_timing import Effort, measure_modes
    from weft.config.graph_profile import default_path, empty_profile, write_profile
    from weft.runner.model_runner import ModelRunner

    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    profile = empty_profile(values, config.model_config)
    path = Path(args.output).expanduser() if args.output else default_path(profile)
    _check_folder(path)
    effort = Effort(args.repeats, args.seconds, args.context or CONTEXT[config.device])
    config, profile = choose_splits(config, profile, effort)
    measured = measure_modes(ModelRunner(config), profile, effort)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    write_profile(msgspec.structs.replace(measured, date=date), path)
    _print_tables(measured, report.device_name(config.device))
    found = "every start with these settings uses it" if not args.output else f"use it with --graph-profile {path}"
    print(f"Written to {path}: {found}.")
    return 0


def _tune_drafts(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    from weft.bench.draft_depth import Effort

    for flag, value in (("--output", args.output), ("--context", args.context)):
        if value is not None:
            raise ConfigError(f"{flag} {value} has no effect with speculative_config, with which drafts are measured")
    return _measure_drafts(settings, Effort(args.repeats, args.seconds))


def tuning_config(settings: dict[str, Any]) -> EngineConfig:
    """The config of an engine that captures every kind of graph.

    Raises:
        ConfigError: a setting fixes how batches run.
    """
    from weft.config import resolve
    from weft.config.resolution import TUNED

    for name in _DECIDED:
        if name in settings:
            raise ConfigError(
                f"{name}={settings[name]!r} says how batches run, which is what is measured; leave it out"
            )
    config = resolve(**({"skip_tokenizer_init": True} | settings | {"cuda_graph_mode": "FULL_AND_PIECEWISE"}))
    return dataclasses.replace(config, cuda_graph_mode=TUNED)


def choose_splits(config: EngineConfig, profile: GraphProfile, effort: Effort) -> tuple[EngineConfig, GraphProfile]:
    """Measure lists of split points, unless the user gives a list: the default, and the default with another kind of
    layer. Each list gets its own engine, freed before the next one starts. Returns config and profile with the fastest
    list."""
    from msgspec.structs import replace

    from weft.bench.step_timing import fastest_split, measure_pieces
    from weft.graph.split_ops import DEFAULT_SPLIT_OPS, split_ops_of
    from weft.runner.model_runner import ModelRunner

    if config.splitting_ops is not None:
        return config, profile
    splits: dict[str, list[Timing]] = {}
    lists: list[tuple[str, ...]] = [DEFAULT_SPLIT_OPS]
    while lists:
        names = lists.pop(0)
        pieces = dataclasses.replace(config, cuda_graph_mode="PIECEWISE", splitting_ops=tuple(names))
        runner = ModelRunner(pieces)
        if not splits:  # all_reduce is a split op because of the device
            others = set(split_ops_of(runner.layers)) - {*DEFAULT_SPLIT_OPS, "all_reduce"}
            lists += [(*DEFAULT_SPLIT_OPS, op) for op in sorted(others)]
            if not lists:
                return config, profile
        splits[" ".join(names)] = measure_pieces(runner, effort)
        del runner
        _free_memory()
    best = fastest_split(splits).split()
    return (
        dataclasses.replace(config, splitting_ops=tuple(best)),
        replace(profile, splits=splits, splitting_ops=best),
    )


def _free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _check(args: argparse.Namespace) -> None:
    check_lowest(args, repeats=1, context=1)
    if not args.seconds > 0:
        raise ConfigError(f"--seconds {args.seconds}: give a number above 0")


def _check_folder(path: Path) -> None:
    """Fail now rather than after the measurement."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the profile {path} cannot be written: {error.strerror or error}") from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"the profile {path} cannot be written; give --output a file in a folder that can be")


def _print_tables(profile: GraphProfile, device: str) -> None:
    from weft.pieces.mode_table import ModeTable

    if profile.splits:
        sizes = [str(t.num_tokens) for t in next(iter(profile.splits.values()))]
        rows = [[names, *(_shown(t.ms["PIECEWISE"]) for t in timings)] for names, timings in profile.splits.items()]
        report.table(f"Split points of prompts in pieces on {device}: ms per step", ("split at", *sizes), rows)
        print(f"  taken: {' '.join(profile.splitting_ops)}")
    table = ModeTable.of(profile)
    kinds = (
        ("Prompts", profile.prefill, table.prefill),
        ("Prompts and decodes", profile.mixed, table.mixed),
        ("Decodes", profile.decode, table.decode),
    )
    for title, timings, limits in kinds:
        modes = sorted({mode for timing in timings for mode in timing.ms})
        rows = [[str(t.num_tokens), *(_shown(t.ms.get(mode)) for mode in modes)] for t in timings]
        report.table(f"{title} on {device}: ms per step", ("tokens", *modes), rows)
        print("  " + (", ".join(f"up to {tokens}: {mode}" for tokens, mode in limits) or "nothing measured"))


def _shown(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.3f}"


def _measure_drafts(settings: dict[str, Any], effort: draft_depth.Effort) -> int:
    """Measure how many drafts pay at which batch size, and store it.

    Args:
        settings: the user's settings with ``speculative_config``, whose number of drafts is the largest to measure.
    """
    from weft.bench.draft_depth import MOST_DRAFTS, measure_depths
    from weft.config import resolve
    from weft.config.draft_profile import DraftProfile, draft_profile_fits, draft_profile_path
    from weft.config.graph_profile import write_profile
    from weft.config.speculation import parse_speculative_config

    given = parse_speculative_config(settings["speculative_config"])
    most = MOST_DRAFTS[given.method] if given.is_auto else given.num_speculative_tokens
    config = resolve(**settings | {"speculative_config": dataclasses.replace(given, is_auto=False)})
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(EngineConfig)}
    fits = draft_profile_fits(values, config.model_config.without_mtp(), given)
    most = min(most, len(config.model_config.mtp_chain) or most)
    timings = measure_depths(settings, config, most, effort, print)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    profile = DraftProfile(fits=fits, prompts=_prompts(given), date=date, timings=timings)
    write_profile(profile, path := draft_profile_path(fits))
    _print_drafts(profile, report.device_name(config.device))
    print(f"Written to {path}: starts with num_speculative_tokens 'auto' and these settings use it.")
    return 0


def _prompts(config: SpeculativeConfig) -> str:
    rate = config.synthetic_acceptance_rate
    return "chats of the evaluation set" if rate is None else f"random tokens, {rate:g} of the drafts taken for right"


def _print_drafts(profile: DraftProfile, device: str) -> None:
    counts = range(len(profile.timings[0].token_ms))
    rows = [[str(t.batch_size), *(f"{ms:.3f}" for ms in t.token_ms), str(t.best)] for t in profile.timings]
    heads = ("batch", *(f"{count} drafts" for count in counts), "taken")
    report.table(f"Milliseconds per new token on {device}, {profile.prompts}", heads, rows)
