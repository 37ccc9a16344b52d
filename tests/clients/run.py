"""Run other people's clients against the server: ``python -m tests.clients.run [--json FILE]`` (``make test-clients``).

Each client gets an environment of its own under ``.venv-clients``, since the clients' pins exclude one another.
Packages that a client does not bring along (Weft, torch, pytest) are found in the environment that runs this program.
Curl and the official clients, whose tests are under tests/server, run in the environment of this program.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import time
import venv
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from pathlib import Path
from typing import Any

from weft.bench import report

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".venv-clients"

HERE = {
    "openai": "tests/server/test_model.py",
    "anthropic": "tests/server/test_other_protocols.py",
    "curl": "tests/clients/test_curl.py",
    "openai-agents": "tests/clients/test_openai_agents.py",
    "langchain-openai": "tests/clients/test_langchain.py",
}
APART = {
    "llama-index-llms-openai-like==0.8.1": "tests/clients/test_llama_index.py",
    "lm_eval==0.4.13": "tests/clients/test_lm_eval.py",
    "guidellm==0.8.1": "tests/clients/test_guidellm.py",
    "instructor==1.17.0": "tests/clients/test_instructor.py",
    "smolagents[openai]==1.26.0": "tests/clients/test_smolagents.py",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write versions and outcomes there")
    path = report.open_json(parser.parse_args().json)
    outcomes = {name: {"version": _version(name)} | run(Path(sys.executable), tests) for name, tests in HERE.items()}
    for requirement, tests in APART.items():
        name, _, pin = requirement.partition("==")
        outcomes[name] = {"version": pin} | run(environment(name, requirement), tests)
    for name, outcome in outcomes.items():
        print(name, outcome)
    report.write_json(path, {"suite": "clients"} | report.provenance("cpu") | {"results": outcomes})
    return 1 if any(outcome["failed"] or not outcome["passed"] for outcome in outcomes.values()) else 0


def _version(name: str) -> str:
    if name == "curl":
        return subprocess.run(["curl", "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    return version(name)


def environment(name: str, requirement: str) -> Path:
    """The interpreter of the client's environment, made if it is not there."""
    folder = ENVIRONMENTS / name
    python = folder / "bin" / "python"
    done = folder / requirement
    if not done.exists():
        venv.create(folder, with_pip=True, clear=True)
        packages = folder / "lib" / Path(sysconfig.get_paths()["purelib"]).relative_to(Path(sys.prefix) / "lib")
        line = f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n"
        (packages / "weft_tests.pth").write_text(line)
        subprocess.run([python, "-m", "pip", "install", "--quiet", requirement], check=True)
        done.touch()
    return python


def run(python: Path, tests: str) -> dict[str, Any]:
    """Passed, failed and skipped tests, and seconds."""
    results = ENVIRONMENTS / "results.xml"
    results.parent.mkdir(exist_ok=True)
    results.unlink(missing_ok=True)
    began = time.monotonic()
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={results}", tests]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"HF_HUB_OFFLINE": "1"}, check=False)
    seconds = round(time.monotonic() - began, 1)
    suite = ElementTree.parse(results).getroot()[0] if results.exists() else ElementTree.Element("none", errors="1")
    count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    passed = count["tests"] - failed - count["skipped"]
    return {"tests": tests, "passed": passed, "failed": failed, "skipped": count["skipped"], "seconds": seconds}


if __name__ == "__main__":
    sys.exit(main())
