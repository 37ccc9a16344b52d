"""``weft graph``: the content of the captured pieces of a prefill (mode PIECEWISE)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.bench import report
from weft.cli.flags import add_engine_flags, engine_settings
from weft.cli.parser import add_verb, check_lowest
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.bench.graph_dump import GraphDump
    from weft.config.fields import EngineConfig

PICTURE, FIGURES = "graph.html", "graph.json"

_DECIDED = ("graph_profile", "enforce_eager", "cuda_graph_mode", "cuda_graph_bs", "cuda_graph_max_bs")
"""Settings that decide how other batches run."""


def add_parser(verbs: Any, help: str) -> None:
    parser = add_verb(verbs, "graph", run, help, arguments="--dump DIR [flags]")
    group = parser.add_argument_group("what to show")
    group.add_argument(
        "--dump", required=True, metavar="DIR", help=f"write {PICTURE}, {FIGURES} and the code of each piece there"
    )
    group.add_argument(
        "--tokens", type=int, metavar="N", help="tokens of the pass; default: the largest captured size up to 512"
    )
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    settings = engine_settings(args)
    for name in _DECIDED:
        if name in settings:
            raise ConfigError(f"{name}={settings[name]!r} does not concern pieces, which are shown here; leave it out")
    check_lowest(args, tokens=1)
    folder = _folder(args.dump)
    from weft.config import resolve

    config = resolve(**({"skip_tokenizer_init": True} | settings | {"cuda_graph_mode": "PIECEWISE"}))
    if args.tokens is not None and args.tokens > config.max_num_batched_tokens:
        raise ConfigError(
            f"--tokens {args.tokens} is more than a step takes: max_num_batched_tokens="
            f"{config.max_num_batched_tokens}; give less, or raise that setting"
        )
    from weft.bench.graph_dump import dump_graphs, size_to_show

    dump = dump_graphs(config, size_to_show(config, args.tokens))
    write(folder, config, dump)
    _print_table(dump, config)
    print(f"Written to {folder}: {PICTURE} (open it in a browser), {FIGURES}, and the code of each piece.")
    return 0


def write(folder: Path, config: EngineConfig, dump: GraphDump) -> None:
    """Write the picture, the figures, and one file of code per piece."""
    from weft.cli.graph_picture import page

    for piece in dump.pieces:
        _write(folder / f"{piece.name}.py", dump.code(piece))
    for number, code in enumerate(dump.traced):
        _write(folder / f"traced_{number}.py", code)
    title = f"{config.served_model_name}: prefill of {dump.num_tokens} tokens in pieces"
    _write(folder / PICTURE, page(title, _facts(config), dump))
    parts = [
        {
            "name": part.name,
            "layer": part.layer,
            "captured": part.captured,
            "kernels": len(part.kernels),
            "bytes": part.num_bytes,
            "ms": round(part.ms, 4),
            "operations": dict(part.counts),
        }
        for part in dump.parts
    ]
    head = report.provenance(config.device) | {"config": report.settings(config)}
    report.write_json(folder / FIGURES, head | {"num_tokens": dump.num_tokens, "parts": parts})


def _facts(config: EngineConfig) -> list[tuple[str, str]]:
    found = report.provenance(config.device)
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return [
        ("device", found["device"] if config.device == "cuda" else f"{found['device']} (emulator: times are Python's)"),
        ("source of pieces", config.piecewise_cuda_graph_compiler),
        ("dtype, backend", f"{config.dtype}, {config.backend}"),
        ("versions", versions),
        ("date", found["date"]),
    ]


def _folder(path: str) -> Path:
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PICTURE).open("a").close()
    except OSError as error:
        raise ConfigError(f"--dump {path}: cannot be written: {error.strerror or error}") from error
    return folder


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _print_table(dump: GraphDump, config: EngineConfig) -> None:
    from weft.cli.graph_picture import fold

    rows = []
    for one in fold(dump.parts):
        for row in one.rows:
            part, ms = row[0], sum(p.ms for p in row)
            name = part.name if len(row) == 1 else f"{part.name} and {len(row) - 1} alike"
            figures = (str(len(part.kernels)), f"{part.num_bytes / 2**20:.1f}") if part.captured else ("", "")
            rows.append([name, "yes" if part.captured else "no", *figures, f"{ms:.3f}"])
    title = f"{dump.num_tokens} tokens on {report.device_name(config.device)}"
    report.table(title, ("part", "captured", "kernels each", "MiB each", "ms in all"), rows)
