"""Start-up: fresh processes are timed, their failures are told, and nothing is imported that is not needed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from tests.whole import takes_long
from weft.bench import startup
from weft.bench.startup import StartupWorkload, measure
from weft.errors import EngineDeadError

SMALL = {"device": "cpu", "skip_tokenizer_init": True, "cpu_cache_gib": 0.05, "max_num_seqs": 2}


@takes_long
def test_cold_and_warm_processes() -> None:
    figures = measure(SMALL, StartupWorkload(cold_repeats=1, warm_repeats=1))
    assert figures["config"]["max_num_seqs"] == 2 and figures["device"]
    for kind in ("cold", "warm"):
        row = figures["results"][kind]
        assert 0 < row["llm_s"] < row["total_s"] and row["import_s"] + row["llm_s"] < row["total_s"]
        assert row["stages"]["weights"] > 0 and len(row["repeats"]["total_s"]) == 1


def test_bytecode_that_is_not_there_is_made_first(monkeypatch: pytest.MonkeyPatch) -> None:
    environments: list[dict[str, str]] = []

    def start(settings: Mapping[str, Any], environment: dict[str, str]) -> dict[str, Any]:
        environments.append(environment)
        return dict.fromkeys(("total_s", "import_s", "llm_s", "first_token_s", "device", "config"), 1.0) | {
            "stages": {}
        }

    monkeypatch.setattr(startup, "_start", start)
    monkeypatch.setattr(startup, "has_bytecode", lambda: False)
    assert measure(SMALL, StartupWorkload(1, 1))["bytecode"] == "made"
    fill, cold, warm = environments
    assert fill["PYTHONPYCACHEPREFIX"] == cold["PYTHONPYCACHEPREFIX"] == warm["PYTHONPYCACHEPREFIX"]
    assert not any(environment["PYTHONDONTWRITEBYTECODE"] for environment in environments)
    assert fill["TRITON_CACHE_DIR"] != cold["TRITON_CACHE_DIR"] == warm["TRITON_CACHE_DIR"]
    monkeypatch.setattr(startup, "has_bytecode", lambda: True)
    assert measure(SMALL, StartupWorkload(1, 0))["bytecode"] == "found"
    assert environments[3].keys() == {"TRITON_CACHE_DIR"} and len(environments) == 4


def test_a_process_that_fails_tells_why() -> None:
    with pytest.raises(EngineDeadError, match="no_such_setting"):
        measure(SMALL | {"no_such_setting": 1}, StartupWorkload(1, 0))


def test_an_engine_without_a_tokenizer_imports_only_what_it_runs() -> None:
    code = (
        "import sys; from weft import LLM, SamplingParams\n"
        f"with LLM(**{SMALL!r}) as llm: llm.generate([[1, 2]], SamplingParams(max_tokens=2), use_tqdm=False)\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    heavy = {"transformers", "tokenizers", "huggingface_hub", "triton", "rich", "scipy", "sympy"}
    assert not loaded & (heavy | {"torch._dynamo", "torch._inductor"})
    assert not [name for name in loaded if name.startswith(("weft.pieces", "weft.offload", "weft.runner.host"))]
