"""The rule of early launches, read off the kernels' source: every kernel waits before it touches what kernels write.

No run can show that it holds: a kernel that does not wait is wrong only when the one before it is late.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from weft.ops.triton import early_launch

FOLDER = Path(early_launch.__file__).parent
CAREFUL = {"_skinny_linear_kernel", "_decode_kernel"}
"""Kernels that load something before they wait: weights, or keys that were written before this step."""


def kernels() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every kernel that the host launches, and the file it stands in."""
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                yield path.name, node


KERNELS = list(kernels())
FILES = sorted({file for file, _ in KERNELS})


def calls(node: ast.AST) -> list[str]:
    return [n.func.id for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]


def test_there_are_kernels() -> None:
    assert len(KERNELS) > 20


@pytest.mark.parametrize(("file", "kernel"), KERNELS, ids=[kernel.name for _, kernel in KERNELS])
def test_a_kernel_waits_first(file: str, kernel: ast.FunctionDef) -> None:
    assert kernel.args.args[-1].arg == "EARLY", f"{file}: {kernel.name} cannot be launched early"
    body = [n for n in kernel.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
    if kernel.name in CAREFUL:
        assert {"release", "wait"} <= set(calls(kernel))
    else:
        assert "enter" in calls(body[0]), f"{file}: {kernel.name} begins with something else"


@pytest.mark.parametrize("file", FILES)
def test_every_launch_says_whether_it_is_early(file: str) -> None:
    assert (FOLDER / file).read_text().count("**early_launch(") >= sum(name == file for name, _ in KERNELS)


def test_only_the_gpus_that_can_are_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    assert early_launch.early_launch(torch.device("cpu")) == {"EARLY": False}
    device = torch.device("cuda", 0)
    for capability, early in (((8, 9), False), ((9, 0), True), ((10, 0), True)):
        early_launch.early_launch.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert early_launch.early_launch(device).get("launch_pdl", False) is early
    early_launch.early_launch.cache_clear()
