"""Check that hooks before a commit and the CI run what the Makefile and ``.ci/run`` have."""

from __future__ import annotations

import os
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def test_hooks_call_targets_of_the_makefile() -> None:
    configuration = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (local,) = configuration["repos"]
    assert local["repo"] == "local", "tools come from .venv, in the versions of constraints.txt"
    targets = re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE)
    called = [target for hook in local["hooks"] for target in re.findall(r"make ([\w-]+)", hook["entry"])]
    assert len(called) == len(local["hooks"]) and set(called) <= set(targets)
    run = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert {"lint", "types"} <= set(called) & set(re.findall(r"[\w-]+", run))


def test_the_workflow_runs_the_script() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    assert ".ci/run" in [step.get("run") for step in job["steps"]] and os.access(ROOT / ".ci" / "run", os.X_OK)
    needed = re.search(r'requires-python = ">=(.*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert needed is not None and needed[1] == job["strategy"]["matrix"]["python"][0]
