"""The common head of measurements in JSON (device, versions, commit, settings, command, date), and tables."""

import dataclasses
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft import __version__
from weft.config.fields import OPTIONS, EngineConfig
from weft.config.graph_profile import installed_versions
from weft.errors import ConfigError
from weft.platforms.cpu import cpu_name

PACKAGES = (
    "torch", "triton", "transformers", "safetensors", "tokenizers", "numpy", "flash-linear-attention", "mamba_ssm",
)  # fmt: skip


COMMIT_VARIABLE = "WEFT_COMMIT"
"""Environment variable that names the commit where the code lies outside of its repository."""


def provenance(device: str) -> dict[str, Any]:
    """Device in words, versions, commit, command and date (UTC) of a measurement on ``cpu`` or ``cuda``."""
    return {"device": device_name(device)} | origin()


def origin() -> dict[str, Any]:
    """Versions, commit, command and date (UTC) of a measurement of something that runs elsewhere."""
    return {
        "versions": {"weft": __version__, "python": platform.python_version()} | installed_versions(PACKAGES),
        "commit": commit(),
        "command": command_line(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def command_line() -> str:
    """The running command as a shell takes it, from the root of the repository: ``python -m benchmarks.vision ...``."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:
        module = spec.name.removesuffix(".__main__")
        program = ["weft"] if module == "weft" else ["python", "-m", module]
    else:
        script = Path(sys.argv[0]).resolve()
        root = Path(__file__).resolve().parents[2]
        inside = script.suffix == ".py" and script.is_relative_to(root)
        program = ["python", script.relative_to(root).as_posix()] if inside else [script.name]
    return shlex.join([*program, *sys.argv[1:]])


def commit() -> str | None:
    """The commit of the running code, with ``-dirty`` if files differ from it; None if that is unknown."""
    if named := os.environ.get(COMMIT_VARIABLE):
        return named
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=8", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def device_name(device: str) -> str:
    """The device in words: ``NVIDIA H200``, or the processor with the threads that torch uses."""
    import torch

    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{cpu_name()}, {torch.get_num_threads()} of {os.cpu_count()} threads"


def settings(config: EngineConfig) -> dict[str, Any]:
    values = {name: getattr(config, name) for name in OPTIONS}
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value) if isinstance(value, Path) else value


def open_json(path: str | None, flag: str = "--json") -> Path | None:
    """Check that ``path``, the value of ``flag``, is writable before a long measurement starts.

    Raises:
        ConfigError: the path cannot be written.
    """
    if path is None:
        return None
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.open("a").close()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be written: {error}") from error
    return target


def write_json(path: Path | None, figures: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table. A table wider than the terminal is printed without cutting words."""
    from rich.console import Console
    from rich.table import Table

    grid = Table(*columns, title=title, title_justify="left")
    for row in rows:
        grid.add_row(*row)
    console = Console()
    anything = console.options.update(width=10_000)
    console.width = max(console.width, console.measure(grid, options=anything).maximum)
    console.print(grid)
