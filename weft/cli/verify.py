"""``weft verify``: captured graphs against eager steps.

The exit status is 1 if one differs.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from weft.bench import report
from weft.cli.flags import add_engine_flags, engine_settings
from weft.cli.parser import add_verb
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.bench.graph_check import SizeCheck


def add_parser(verbs: Any, help: str) -> None:
    parser = add_verb(verbs, "verify", run, help)
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    json_path = report.open_json(args.json)
    from weft.config import resolve

    config = resolve(**({"skip_tokenizer_init": True, "graph_profile": "none"} | engine_settings(args)))
    from weft.runner.model_runner import ModelRunner, check_ranks

    check_ranks(config)  # first, since a message about graphs would not help
    if config.cuda_graph_mode == "NONE":
        raise ConfigError(
            "there are no graphs to verify with cuda_graph_mode='NONE'; set --cuda-graph-mode FULL or another one (on "
            "the CPU, an emulator replays the captured operations)"
        )
    from weft.bench.graph_check import verify_graphs

    checks = list(verify_graphs(ModelRunner(config), config.seed))
    failed = [f"{check.kind} {check.size}" for check in checks if not check.agrees]
    head = {"check": "verify"} | report.provenance(config.device) | {"config": report.settings(config)}
    report.write_json(json_path, head | {"failed": failed, "results": [dataclasses.asdict(c) for c in checks]})
    rows = [_row(check) for check in checks]
    columns = ("graph of", "size", "rows", "largest difference", "largest value", "different tokens", "agrees")
    report.table(f"Graphs against eager steps on {report.device_name(config.device)}", columns, rows)
    if failed:
        print(f"{len(failed)} graphs do not agree with eager steps: {', '.join(failed)}")
    return 1 if failed else 0


def _row(check: SizeCheck) -> list[str]:
    figures = [f"{check.max_abs_diff:.3g}", f"{check.max_abs_value:.3g}", str(check.num_different_tokens)]
    return [check.kind, str(check.size), str(check.num_rows), *figures, "yes" if check.agrees else "NO"]
