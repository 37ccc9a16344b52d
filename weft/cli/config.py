"""``weft config``: every setting, its value, and why.

Job: resolve the settings as the engine would, and show them. Owns: the layout.
Does not know: torch; no weights are read.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from weft.cli.flags import add_engine_flags, engine_settings
from weft.cli.parser import add_verb
from weft.config.fields import OPTIONS, EngineConfig
from weft.config.resolution import resolve_settings


def add_parser(verbs: Any) -> None:
    parser = add_verb(verbs, "config", run, "show every setting, its value, and why", usage="config [flags]")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    config = resolve_settings(engine_settings(args), weights=False)
    if args.json:
        print(json.dumps(config_json(config), indent=1, default=_plain))
    else:
        _print_tables(config, given=engine_settings(args))
    return 0


def config_json(config: EngineConfig) -> dict[str, Any]:
    """The config as plain values: settings, reasons, and what was found in the checkpoint."""
    return {
        "settings": {name: _plain(getattr(config, name)) for name in OPTIONS},
        "reasons": dict(config.reasons),
        "model_path": str(config.model_path),
        "tokenizer_path": str(config.tokenizer_path),
        "model_config": _plain(dataclasses.asdict(config.model_config)),
        "generation": _plain(dataclasses.asdict(config.generation)),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (frozenset, set)):
        return sorted(value)
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value


def _print_tables(config: EngineConfig, given: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    settings = Table("setting", "value", "why", title=f"Settings for {config.model}", title_justify="left")
    for name in OPTIONS:
        reason = config.reasons.get(name) or ("given" if name in given else "default")
        settings.add_row(name, _shown(getattr(config, name)), reason)
    console.print(settings)
    found = Table("found in the checkpoint", "", title_justify="left")
    for name, value in _found(config).items():
        found.add_row(name, value)
    console.print(found)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _found(config: EngineConfig) -> dict[str, str]:
    model, generation = config.model_config, config.generation
    rows = {
        "folder": str(config.model_path),
        "architecture": model.architecture,
        "layers": f"{len(model.attention_layers)} full attention, {len(model.linear_layers)} linear attention",
        "hidden size, vocabulary": f"{model.hidden_size}, {model.vocab_size}",
        "context": f"{model.max_position_embeddings} tokens",
        "dtype": model.dtype,
    }
    if model.moe is not None:
        rows["experts"] = f"{model.moe.num_experts}, {model.moe.num_experts_per_tok} per token"
    for name, value in dataclasses.asdict(generation).items():
        if value is not None and value != ():
            rows[f"generation: {name}"] = _shown(value)
    return rows
