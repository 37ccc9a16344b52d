"""Check the tuple of a kernel's compile-time parameters, which every known version of Triton has to compile."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import weft.ops

SOURCES = sorted(Path(weft.ops.__file__).parent.rglob("*.py"))


def fields_of_tuples(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """``(field, type)`` of every named tuple."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and "NamedTuple" in {ast.unparse(base) for base in node.bases}:
            for line in node.body:
                if isinstance(line, ast.AnnAssign):
                    yield ast.unparse(line.target), ast.unparse(line.annotation)


def texts_passed_on(tree: ast.Module, texts: set[str]) -> list[str]:
    """Calls of functions of kernels with a text of ``FIXED``. Triton itself (``tl.``) takes texts."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
    arguments = ((call, arg) for call in calls for arg in [*call.args, *(keyword.value for keyword in call.keywords)])
    return [ast.unparse(call) for call, arg in arguments if ast.unparse(arg) in {f"FIXED.{name}" for name in texts}]


def test_no_tuple_of_a_kernel_holds_a_dtype_and_none_passes_a_text_on() -> None:
    """Hooks print constants as JSON, which has no dtypes. Triton 3.6 compiles no call with a text out of a tuple."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
    fields = [(path.name, *field) for path, tree in trees.items() for field in fields_of_tuples(tree)]
    assert len(fields) > 50
    assert [field for field in fields if "dtype" in field[2]] == []
    texts = {name for _, name, kind in fields if kind == "str"}
    assert {"precision", "scales"} <= texts
    found = {path.name: calls for path, tree in trees.items() if (calls := texts_passed_on(tree, texts))}
    assert found == {}
