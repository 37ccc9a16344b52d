"""Start-up: seconds from the start of a process to a ready engine.

Each start is a fresh process, with an empty Triton cache (cold) or with that of the previous process (warm).

The clock starts before the process. ``total_s`` ends when ``LLM()`` returns; ``import_s`` and ``llm_s`` are its parts
besides the start of Python. ``stages`` are ``LLM.startup``; its stage ``libraries`` includes the import of torch.
``first_token_s`` is the time of one short request after the start; it shows work that was deferred. The files of the
checkpoint and of the libraries are in the page cache of the operating system, except for the very first process.

Processes find the bytecode of all modules, as pip installs it. In an installation without bytecode an unmeasured start
makes it, and ``bytecode`` of the figures is ``made`` instead of ``found``.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from weft.errors import EngineDeadError
from weft.processes.preload import has_bytecode


@dataclass(frozen=True, slots=True)
class StartupWorkload:
    """The workload: cold starts, each followed by warm ones."""

    cold_repeats: int = 1
    warm_repeats: int = 3


def measure(settings: Mapping[str, Any], workload: StartupWorkload) -> dict[str, Any]:
    """Measure cold and warm starts of ``LLM(**settings)``: medians, and every repeat.

    Returns:
        Figures ``cold`` and ``warm``, the ``device`` in words and the ``config`` as the processes saw them, and the
        origin of the ``bytecode``.

    Raises:
        EngineDeadError: a process failed to start. The message has its last lines.
    """
    runs: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    bytecode = "found" if has_bytecode() else "made"
    with _bytecode(settings) as environment:
        for _ in range(workload.cold_repeats):
            with _kernel_cache() as cache:
                runs["cold"].append(_start(settings, environment | cache))
                runs["warm"] += [_start(settings, environment | cache) for _ in range(workload.warm_repeats)]
    last = runs["cold"][-1]
    return {
        "device": last["device"],
        "config": last["config"],
        "bytecode": bytecode,
        "results": {kind: _summary(found) for kind, found in runs.items() if found},
    }


@contextmanager
def _bytecode(settings: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """The environment in which all modules have bytecode."""
    if has_bytecode():
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="weft-bytecode-") as folder, _kernel_cache() as cache:
        environment = {"PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
        _start(settings, environment | cache)
        yield environment


@contextmanager
def _kernel_cache() -> Iterator[dict[str, str]]:
    """The environment with an empty Triton cache."""
    with tempfile.TemporaryDirectory(prefix="weft-triton-") as folder:
        yield {"TRITON_CACHE_DIR": folder}


def _start(settings: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Run one process from beginning to end. ``environment``: variables besides those of this process."""
    command = [sys.executable, "-m", "weft.bench.startup", repr(time.monotonic()), json.dumps(dict(settings))]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode != 0:
        said = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise EngineDeadError(f"the engine did not start (exit status {done.returncode}); it said last:\n{said}")
    return json.loads(done.stdout.splitlines()[-1])


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("total_s", "import_s", "llm_s", "first_token_s")
    stages = {name: round(median(run["stages"][name] for run in runs), 3) for name in runs[0]["stages"]}
    figures: dict[str, Any] = {name: round(median(run[name] for run in runs), 3) for name in names}
    return figures | {"stages": stages, "repeats": {name: [round(run[name], 3) for run in runs] for name in names}}


def _child(began: float, settings: dict[str, Any]) -> None:
    """The measured process: start the engine, run one request, print a line of JSON."""
    start = time.monotonic()
    from weft import LLM

    imported = time.monotonic()
    with LLM(**settings) as llm:
        ready = time.monotonic()
        from weft.bench import report
        from weft.sampling_params import SamplingParams

        asked = time.monotonic()
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False), use_tqdm=False)
        figures = {
            "total_s": ready - began,
            "import_s": imported - start,
            "llm_s": ready - imported,
            "first_token_s": time.monotonic() - asked,
            "stages": llm.startup,
            "device": report.device_name(llm.config.device),
            "config": report.settings(llm.config),
        }
    print(json.dumps(figures))


if __name__ == "__main__":
    _child(float(sys.argv[1]), json.loads(sys.argv[2]))
