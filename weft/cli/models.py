"""``weft models``: the architectures that Weft runs, their verification and heads, and formats of quantised weights."""

import argparse
from typing import Any

from weft.cli.parser import add_verb
from weft.config.families import FAMILIES, OTHER_NAMES
from weft.config.quantization_formats import FORMATS
from weft.config.verified import VERIFIED, nearest
from weft.config.wrappers import WRAPPERS
from weft.errors import UnsupportedModelError

_COLUMNS = (
    "architecture",
    "float32, CPU",
    "float32 and bfloat16, H200",
    "tensor parallelism",
    "drafts by its own head",
)


def add_parser(verbs: Any, help: str) -> None:
    parser = add_verb(verbs, "models", run, help, arguments="[ARCHITECTURE ...]")
    parser.add_argument("names", nargs="*", metavar="ARCHITECTURE", help="as in config.json; default: all")


def run(args: argparse.Namespace) -> int:
    args.names = [OTHER_NAMES.get(name, name) for name in args.names]
    for name in args.names:
        if name not in VERIFIED and name not in WRAPPERS:
            raise UnsupportedModelError(
                f"architecture {name!r} is not supported; the nearest that is: {nearest(name)}; `weft models` lists all"
            )
    rows = [_COLUMNS, *(_row(name) for name in sorted(args.names or (*VERIFIED, *WRAPPERS)))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if not args.names:
        print(
            "\nQuantised checkpoints that are read:", *(f"{name}: {what}" for name, what in FORMATS.items()), sep="\n  "
        )
    return 0


def _row(name: str) -> tuple[str, ...]:
    if name in WRAPPERS:
        texts = WRAPPERS[name].texts.values()
        has_images = any(FAMILIES[text].vision is not None for text in texts)
        how = f"{'images, text' if has_images else 'text alone,'} as {' or '.join(texts)}"
        return name, "yes", how, "", _drafts(*texts)
    verified = VERIFIED[name]
    on_gpu = "yes" if verified.gpu else "not yet"
    return name, "yes", on_gpu, verified.ranks.value, _drafts(name)


def _drafts(*names: str) -> str:
    """How the multi-token-prediction heads of some families draft; empty without heads."""
    families = [FAMILIES[name] for name in names]
    if any(family.mtp_chain is not None for family in families):
        return "a layer for each draft"
    return "one layer" if any(family.mtp for family in families) else ""
