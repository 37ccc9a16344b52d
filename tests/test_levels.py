"""Imports go one way, without circles, and the package is light until an engine is made."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "weft"

# A room may import rooms of lower levels. In the levels marked ordered it may also import rooms to its left.
LEVELS: list[tuple[str, ...]] = [
    (
        "platforms",
        "processes",
        "errors",
        "stats",
        "assets",
        "sampling_params",
        "config",
        "multimodal",
        "messages",
        "outputs",
        "request",
        "forward_context",
    ),
    ("text", "ops", "cache", "parallel", "graph"),
    ("offload", "scheduler", "layers", "quantization"),
    ("models", "weights", "pieces"),
    ("runner",),
    ("executor",),
    ("engine",),
    ("bench", "server", "cli", "compat", "__main__"),
]
ORDERED = {0, 2, 7}
RANK = {room: (level, place) for level, rooms in enumerate(LEVELS) for place, room in enumerate(rooms)}
LIGHT = {"weft.bench.report", "weft.bench.evaluation"}  # which commands import that need no torch
HEAVY = {"torch", "transformers", "triton", "numpy", "huggingface_hub", "rich"}


@dataclass(frozen=True)
class Import:
    """``module`` imports ``target``. ``runtime``: not only for type checking. ``top``: outside functions."""

    module: str
    target: str
    runtime: bool
    top: bool


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(module: str) -> Iterator[Import]:
    def walk(node: ast.AST, runtime: bool, top: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
                yield from walk(child, False, top)
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from walk(child, runtime, False)
            elif isinstance(child, ast.Import):
                yield from (Import(module, alias.name, runtime, top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{module} uses a relative import"
                for alias in child.names:
                    full = f"{child.module}.{alias.name}"
                    yield Import(module, full if full in MODULES else str(child.module), runtime, top)
            else:
                yield from walk(child, runtime, top)

    yield from walk(ast.parse(MODULES[module].read_text(encoding="utf-8")), True, True)


@cache
def imports() -> list[Import]:
    return [found for module in MODULES for found in imports_of(module)]


def room(module: str) -> str | None:
    """The room of a module of Weft; None for the package itself and for everything else."""
    parts = module.split(".")
    return parts[1] if parts[0] == "weft" and len(parts) > 1 else None


def test_every_room_has_a_level() -> None:
    rooms = {room(module) for module in MODULES} - {None}
    assert rooms <= set(RANK), "add the new room to LEVELS and to docs/architecture.md"


@pytest.mark.parametrize("name", sorted({room(m) for m in MODULES} - {None}))
def test_imports_go_one_way(name: str) -> None:
    level, place = RANK[name]
    for found in imports():
        target = room(found.target)
        if room(found.module) != name or target in (None, name):
            continue
        other_level, other_place = RANK[target]
        allowed = other_level < level or (other_level == level and level in ORDERED and other_place < place)
        assert allowed, f"{found.module} (level {level}) imports {found.target} (level {other_level})"


def test_shared_parts_of_kernels_know_no_family() -> None:
    inside = [f for f in imports() if f.module.startswith("weft.ops.triton.") and f.target.startswith("weft.ops.")]
    assert inside and [f for f in inside if not f.target.startswith("weft.ops.triton")] == []


def test_operations_import_no_kernel_at_the_top() -> None:
    """A family's ``__init__`` is light: its kernels are imported at the first call."""
    doors = {m for m in MODULES if m.startswith("weft.ops.") and MODULES[m].name == "__init__.py"}
    light = {"weft.ops.drafts.types", "weft.ops.collectives.peer_buffers"}
    for found in imports():
        if found.module in doors and found.top and found.target.count(".") == 3:
            assert found.target in light, f"{found.module} imports {found.target}"


def test_no_module_imports_itself_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for found in imports():
        inner_package = found.target in ("weft", found.module.rpartition(".")[0])
        if found.target in MODULES and not inner_package:
            graph.setdefault(found.module, set()).add(found.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"circular import: {' -> '.join(error.args[1])}")


def test_level_0_loads_nothing_heavy() -> None:
    for found in imports():
        if (
            (room(found.module) in (None, *LEVELS[0], "cli", "__main__") or found.module in LIGHT)
            and found.runtime
            and found.top
        ):
            assert found.target.split(".")[0] not in HEAVY, f"{found.module} imports {found.target} when it is loaded"


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("what", ["weft", "weft.config.resolution", "weft.cli", "weft.request", "weft.forward_context"])
def test_import_stays_light(what: str) -> None:
    loaded = run_python(f"import {what}, sys; print(*sys.modules)").split()
    assert not HEAVY & set(loaded)


def test_a_server_imports_no_torch() -> None:
    """The API processes import no torch either. The engine's process does."""
    loaded = run_python("import weft.server.main, weft.server.api_process, sys; print(*sys.modules)").split()
    assert not HEAVY - {"numpy"} & set(loaded)


def test_import_weft_takes_under_200_ms() -> None:
    code = "import time; start = time.process_time(); import weft; print(time.process_time() - start)"
    assert min(float(run_python(code)) for _ in range(3)) < 0.2


def test_public_names_exist() -> None:
    run_python("import weft; [getattr(weft, name) for name in weft.__all__]; from weft import LLM, SamplingParams")
