"""GuideLLM as the load generator. Runs in an environment of its own: make test-clients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import MODEL
from tests.server.running import ROOT, RunningServer

pytest.importorskip("guidellm", reason="GuideLLM is not installed; make test-clients has it")

NUM_REQUESTS = 12
OUTPUT_TOKENS = 12


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_a_benchmark(mini: RunningServer, path: str, tmp_path: Path) -> None:
    metrics = benchmark(mini, path, tmp_path / "report.json")
    assert metrics["request_totals"] == {
        "successful": NUM_REQUESTS, "incomplete": 0, "errored": 0, "total": NUM_REQUESTS,
    }  # fmt: skip
    assert metrics["output_token_count"]["successful"]["mean"] == OUTPUT_TOKENS
    assert 0 < metrics["time_to_first_token_ms"]["successful"]["mean"] < 5000
    assert metrics["inter_token_latency_ms"]["successful"]["mean"] > 0


def benchmark(server: RunningServer, path: str, report: Path) -> dict[str, Any]:
    """The metrics of a short run."""
    backend = f"kind=openai_http,target={server.url},model={MODEL},request_format={path}"
    command = [
        str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console",
        "--backend", backend,
        "--profile", "kind=concurrent,streams=4",
        "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
        "--tokenizer", f"kind=huggingface_auto,model={ROOT / 'weft' / 'assets' / 'weft-mini'}",
        "--data", f"kind=synthetic_text,prompt_tokens=40,output_tokens={OUTPUT_TOKENS}",
        "--output", f"kind=json,path={report}",
    ]  # fmt: skip
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=offline)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(report.read_text())["benchmarks"][0]["metrics"]
