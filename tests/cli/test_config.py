"""``weft config``: values with reasons, as a table and as JSON, without reading weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from weft.assets import MODEL_DIR
from weft.cli import main
from weft.config.fields import OPTIONS
from weft.engine.llm import LLM


def test_json_holds_every_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(MODEL_DIR / "config.json", tmp_path)
    assert main(["config", "--json", "--device", "cpu", "--max-running-requests", "7", "--model", str(tmp_path)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert list(shown["settings"]) == list(OPTIONS)
    assert shown["settings"]["max_num_seqs"] == 7 and shown["settings"]["dtype"] == "float32"
    assert shown["reasons"]["dtype"] == "float32 on the CPU" and "max_num_seqs" not in shown["reasons"]
    assert shown["model_config"]["architecture"] == "Qwen3NextForCausalLM"
    assert shown["model_path"] == str(tmp_path)


def test_table_gives_reasons(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["config", "--device", "cpu", "--page-size", "8"]) == 0
    out = capsys.readouterr().out
    rows = {line.split("│")[1].strip(): line for line in out.splitlines() if line.count("│") == 4}
    assert "given" in rows["page_size"] and "8" in rows["page_size"]
    assert "2 full attention, 6 linear attention" in out


def test_capacity_is_that_of_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"device": "cpu", "cpu_cache_gib": 0.02, "max_num_seqs": 40, "max_model_len": 300}
    flags = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["config", "--json", *flags]) == 0
    shown = json.loads(capsys.readouterr().out)["capacity"]
    with LLM(**settings) as llm:
        plan = llm._core.plan
        assert (shown["num_kv_pages"], shown["num_state_slots"]) == (plan.num_pages, plan.num_slots)
        assert (shown["max_num_seqs"], shown["max_model_len"]) == (plan.max_num_seqs, llm.max_model_len)
        assert shown["cache_bytes"] == plan.cache_bytes and shown["reasons"] == plan.reasons
    assert "clamped" in shown["reasons"]["max_num_seqs"]
    assert shown["kv_tokens"] == (plan.num_pages - 1) * 16
    assert shown["full_contexts"] == min(plan.max_num_seqs, shown["kv_tokens"] // 304)


def test_capacity_in_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["config", "--device", "cpu", "--num-kv-pages", "21"]) == 0
    out = capsys.readouterr().out
    assert "tokens of KV" in out and "320" in out and "clamped to 320" in out
    assert main(["config", "--device", "cpu", "--cpu-cache-gib", "0.000001"]) == 0
    assert "nothing fits" in capsys.readouterr().out


def test_capacity_of_a_gpu_is_measured_at_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.config.resolution.cuda_available", lambda: True)
    monkeypatch.setattr("weft.cli.config.gpu_bytes", lambda: 2**30)
    assert main(["config", "--json", "--device", "cuda"]) == 0
    shown = json.loads(capsys.readouterr().out)["capacity"]
    assert shown["free_bytes"] == int(0.9 * 2**30) - shown["weight_bytes"]
    assert shown["kv_page_bytes"] == 16_384 and "num_kv_pages" not in shown
    assert "measured" in shown["reasons"]["num_kv_pages"]


def test_a_split_op_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["config", "--device", "cpu", "--cuda-graph-mode", "PIECEWISE", "--splitting-ops"]
    assert main([*flags, "attention", "gated_delta_net"]) == 0
    assert main([*flags, "attentoin"]) != 0
    assert "'attentoin', which is no split op; there are" in capsys.readouterr().err
