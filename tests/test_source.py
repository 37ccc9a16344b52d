"""Check that the package has no ways to run data as code, no long files, and no long signatures."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "weft"
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "code", "codeop"}
MOST_LINES, MOST_ARGUMENTS = 400, 10
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


def offences(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
                found.append(node.func.id)
            for keyword in node.keywords:
                is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                if keyword.arg in ("shell", "trust_remote_code", "allow_pickle") and is_true:
                    found.append(f"{keyword.arg}=True")
    return found


def long_signatures(tree: ast.AST) -> list[str]:
    """Host functions that take more arguments than allowed. ``self`` and ``cls`` do not count, nor do kernels."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        count = sum(argument.arg not in ("self", "cls") for argument in given)
        if count > MOST_ARGUMENTS:
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            found += [f"{node.name}: {count}"] * (not any(name in decorators for name in ("jit", "GluonKernel")))
    return found


def test_nothing_runs_data_as_code_and_files_and_signatures_are_short() -> None:
    wrong = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        lines, tree = len(source.splitlines()), ast.parse(source)
        found = [*offences(tree), *long_signatures(tree), *([f"{lines} lines"] if lines >= MOST_LINES else [])]
        if found:
            wrong[str(path.relative_to(PACKAGE))] = found
    assert wrong == {}


def test_the_check_of_signatures_finds_long_ones() -> None:
    ten = "a, b, c, d, e, *, f, g, h, i, j"
    source = f"def few(self, {ten}): ...\nasync def many({ten}, k): ...\n@triton.jit\ndef kernel({ten}, k): ..."
    assert long_signatures(ast.parse(source)) == ["many: 11"]


def test_the_check_finds_what_it_looks_for() -> None:
    source = "import pickle\nfrom marshal import loads\neval('1')\nf(shell=True)\nre.compile('x')\nmodel.eval()"
    assert offences(ast.parse(source)) == ["pickle", "marshal", "eval", "shell=True"]


def test_an_editable_install_is_a_path_entry() -> None:
    """Without it, ``import weft`` in a folder that holds a clone named weft finds that folder, an empty namespace."""
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["tool"]["setuptools"]["package-dir"] == {"": "."}
