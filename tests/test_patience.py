"""No test fails because its machine is busy: limits that guard against waiting for ever are ``GUARD_S``."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.patience import GUARD_S, stretched

TESTS = Path(__file__).parent
GUARDS_FROM_S = 2.0
"""Seconds. Shorter waits are pauses or durations."""

WAITS = {"wait": 0, "join": 0, "wait_for": 1}
"""Index of the limit in seconds among the arguments of a waiting function."""


def short_limits(tree: ast.AST) -> list[int]:
    """Lines on which a literal of less than a minute limits a wait for a process, a thread, a task or a response."""
    found = []
    for node in ast.walk(tree):
        limits: list[ast.expr] = []
        if isinstance(node, ast.Call):
            limits += [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
            index = WAITS.get(node.func.attr, 99) if isinstance(node.func, ast.Attribute) else 99
            limits += node.args[index : index + 1]
        elif (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Add)
            and ast.unparse(node.left) == "time.monotonic()"
        ):
            limits.append(node.right)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LIMIT_S":
            limits.append(node.value)
        for limit in limits:
            seconds = limit.value if isinstance(limit, ast.Constant) else None
            if isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and GUARDS_FROM_S <= seconds < 60:
                found.append(limit.lineno)
    return sorted(found)


def test_waits_have_limits_that_hold_on_a_busy_machine() -> None:
    lines = {path: short_limits(ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(TESTS.rglob("*.py"))}
    assert {str(path): found for path, found in lines.items() if found} == {}


def test_the_check_finds_what_it_looks_for() -> None:
    source = (
        "p.wait(5)\nt.join(30)\nasyncio.wait_for(f(), 10)\nrun(timeout=20)\nend = time.monotonic() + 20\nLIMIT_S = 30"
    )
    assert short_limits(ast.parse(source)) == [1, 2, 3, 4, 5, 6]
    assert not short_limits(ast.parse("p.wait(GUARD_S)\nt.join(0.1)\n', '.join(x)\nrun(timeout=stretched(5))"))


def test_limits_grow_with_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (36.0, 1.0, 1.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert stretched(30) >= 30 * 36 and GUARD_S >= 60
