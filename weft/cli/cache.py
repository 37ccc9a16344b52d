"""``weft cache``: list, verify and empty a folder of the disk tier."""

import argparse
import time
from pathlib import Path
from typing import Any

from weft.cli.parser import add_verb
from weft.errors import ConfigError


def add_parser(verbs: Any, help: str) -> None:
    parser = add_verb(verbs, "cache", run, help, arguments="list|verify|empty DIR")
    parser.add_argument("action", choices=("list", "verify", "empty"), help="verify names and removes unusable files")
    parser.add_argument("folder", metavar="DIR", type=Path, help="as in --kv-offloading-dir")


def run(args: argparse.Namespace) -> int:
    folder: Path = args.folder
    if not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is no folder; give the one of --kv-offloading-dir")
    actions = {"list": _list, "verify": _verify, "empty": _empty}
    return actions[args.action](folder)


def _engines(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())


def _list(folder: Path) -> int:
    from weft.offload.disk import files_of

    for engine in _engines(folder):
        files = list(files_of(engine))
        states = sum(found.path.suffix == ".state" for found in files)
        size, idle = sum(found.num_bytes for found in files), 0.0
        if files:
            idle = (time.time() - max(found.used for found in files)) / 3600
        print(
            f"{engine.name}: {len(files) - states:,} pages, {states:,} states, {size / 2**30:.2f} GiB, "
            f"last used {idle:.1f} hours ago"
        )
    return 0


def _verify(folder: Path) -> int:
    from weft.offload.disk import RejectedFile, check, files_of, remove_torn

    num_files = num_rejected = 0
    for engine in _engines(folder):
        for found in files_of(engine):
            num_files += 1
            try:
                check(found.path)
            except RejectedFile as error:
                num_rejected += 1
                found.path.unlink(missing_ok=True)
                print(f"{found.path.relative_to(folder)}: removed, because {error}")
    print(f"{num_files:,} files, {num_rejected:,} of them removed, {remove_torn(folder):,} temporary files removed")
    return 1 if num_rejected else 0


def _empty(folder: Path) -> int:
    from weft.offload.disk import files_of, remove_torn

    files = [found for engine in _engines(folder) for found in files_of(engine)]
    for found in files:
        found.path.unlink(missing_ok=True)
    remove_torn(folder)
    print(f"{len(files):,} files removed, {sum(found.num_bytes for found in files) / 2**30:.2f} GiB")
    return 0
