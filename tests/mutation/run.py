"""Plants one bug at a time and sees whether the tests notice: ``make mutate`` (minutes; not part of CI).

Job: for every mutant, a copy of the project with that one change, the tests that should fail, and the verdict in
``verdicts.json``. Owns: the copy and the file of verdicts. Does not know: what a mutant breaks.

    python -m tests.mutation.run [NAME …]        all mutants, or those whose name contains one of the words
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.mutation.mutant import Mutant
from tests.mutation.mutants import MUTANTS

ROOT = Path(__file__).parents[2]
VERDICTS = Path(__file__).parent / "verdicts.json"
LIMIT_SECONDS = 400
"""A mutant whose tests take longer hangs, which is noticed too."""


def main(words: list[str]) -> int:
    chosen = [m for m in MUTANTS if not words or any(word in m.name for word in words)]
    verdicts: dict[str, Any] = json.loads(VERDICTS.read_text(encoding="utf-8")) if VERDICTS.exists() else {}
    verdicts = {m.name: verdicts[m.name] for m in MUTANTS if m.name in verdicts}
    with tempfile.TemporaryDirectory(prefix="weft-mutants-") as folder:
        copy = Path(folder)
        copy_project(copy)
        for mutant in chosen:
            verdicts[mutant.name] = verdict = judge(mutant, copy)
            print(f"{verdict['verdict']:9} {mutant.name}: {verdict.get('by', '')}", flush=True)
            VERDICTS.write_text(json.dumps(verdicts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    bad = [m.name for m in chosen if verdicts[m.name]["verdict"] != "killed"]
    print(f"{len(chosen) - len(bad)} of {len(chosen)} mutants killed" + (f"; not: {', '.join(bad)}" if bad else ""))
    return 1 if bad else 0


def copy_project(folder: Path) -> None:
    """All that git knows, as it lies here."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def judge(mutant: Mutant, folder: Path) -> dict[str, Any]:
    """``killed`` by a test, ``survived``, or ``gone``: its text does not stand exactly once in its file any more."""
    said = {"promise": mutant.promise, "file": mutant.path, "old": mutant.old, "new": mutant.new}
    path = folder / mutant.path
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if text.count(mutant.old) != 1:
        return said | {"verdict": "gone"}
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        started = time.monotonic()
        return said | run_tests(mutant.tests, folder) | {"seconds": round(time.monotonic() - started, 1)}
    finally:
        path.write_text(text, encoding="utf-8")


def run_tests(tests: tuple[str, ...], folder: Path) -> dict[str, Any]:
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "WEFT_LONG_TESTS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"verdict": "killed", "by": f"no end within {LIMIT_SECONDS} s"}
    if done.returncode == 0:
        return {"verdict": "survived"}
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if found is None:
        return {"verdict": "unclear", "by": (done.stdout + done.stderr)[-400:]}
    return {"verdict": "killed", "by": found.group(1)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
