"""``weft config``: values with reasons, as a table and as JSON, without reading weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from weft.assets import MODEL_DIR
from weft.cli import main
from weft.config.fields import OPTIONS


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
    for name, option in OPTIONS.items():
        if option.later and option.default != option.off:
            assert f"not in this version: {option.later}" in rows[name]
    assert "2 full attention, 6 linear attention" in out
