"""Check that the files in deploy/ fit the server that they deploy: metrics, flags, paths, files."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.patience import GUARD_S
from tests.server.fake_engine import CUT
from tests.server.running import ROOT, RunningServer, wait_until
from weft.cli import build_parser
from weft.cli.serve import server_settings

DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "weft.json").read_text(encoding="utf-8"))
UNSHOWN = {"weft:graph_profile_info", "weft:weight_version"} | {
    f"vllm:{name}"
    for name in (
        "cache_config_info",
        "corrupted_requests",
        "iteration_tokens_total",
        "num_requests_waiting_by_reason",
        "prompt_tokens_cached",
        "request_inference_time_seconds",
        "request_params_max_tokens",
        "request_params_n",
        "request_prefill_kv_computed_tokens",
        "request_time_per_output_token_seconds",
        "time_per_output_token_seconds",
    )
}
"""Metrics that the dashboard omits: values that never change, and metrics for other dashboards. This dashboard
shows the latter from a different metric."""


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def test_the_dashboard_shows_what_is_exported_and_nothing_else(server: RunningServer) -> None:
    server.chat("count me", priority=CUT, max_tokens=3)
    wait_until(lambda: "vllm:request_success_total{" in server.client.get("/metrics").text, 5.0)
    families = list(text_string_to_metric_families(server.client.get("/metrics").text))
    exported = {sample.name: family.name for family in families for sample in family.samples}
    expressions = [target["expr"] for panel in panels() for target in panel["targets"]]
    expressions += [variable["definition"] for variable in DASHBOARD["templating"]["list"] if "definition" in variable]
    used = {name for text in expressions for name in re.findall(r"(?:vllm|weft):\w+", text)}
    assert used <= set(exported)
    told = re.findall(r"`((?:vllm|weft):\w+)`", (ROOT / "docs" / "serving.md").read_text(encoding="utf-8"))
    assert told and set(told) <= set(exported) | set(exported.values())
    ours = {f.name for f in families if f.name.startswith(("vllm:", "weft:")) and not f.name.endswith("_created")}
    assert ours - {exported[name] for name in used} == UNSHOWN
    for labels in ("finished_reason", "status", "mode", "kind"):
        assert any(f"sum by ({labels})" in text for text in expressions)
        assert any(labels in sample.labels for family in families for sample in family.samples)


def test_the_dashboard_is_well_formed() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids)) and len(panels()) > 20
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells
    for panel in panels():
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")")
            assert target["datasource"]["uid"] == "${datasource}"


def unit_text() -> str:
    return (DEPLOY / "weft.service").read_text(encoding="utf-8")


def test_the_unit_starts_the_server() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(unit_text())
    command = shlex.split(unit["Service"]["ExecStart"].replace("$WEFT_FLAGS", "--host 127.0.0.1 --restart-engine"))
    assert command[0].endswith("/bin/weft")
    settings = server_settings(build_parser("serve").parse(command[1:]))
    assert settings.log_format == "json" and settings.restart_engine
    assert float(unit["Service"]["TimeoutStopSec"]) > settings.drain_timeout_s + 10  # the engine's own grace
    assert unit["Service"]["KillMode"] == "mixed" and unit["Service"]["RestartPreventExitStatus"] == "2"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "weft.service"
    unit.write_text(unit_text().replace("/opt/weft/bin/weft", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=GUARD_S)
    assert "weft.service" not in done.stderr, done.stderr


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions and their arguments, lines joined."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", " ").splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.strip().partition(" ") for line in lines) if word]


def test_the_image_is_built_from_what_is_there() -> None:
    allowed = {
        line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")
    }
    copied = {
        source
        for word, rest in instructions()
        if word == "COPY" and "--from" not in rest
        for source in (Path(name).as_posix() for name in rest.split()[:-1])
    }
    assert copied == allowed and all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in (project["readme"], *project["license-files"], "pyproject.toml", "constraints.txt"):
        assert any(name == source or name.startswith(f"{source}/") for source in copied), name
    install = next(rest for word, rest in instructions() if word == "RUN" and "pip install" in rest)
    extras = re.search(r"\.\[(.*?)\]", install)
    assert extras is not None and set(extras.group(1).split(",")) <= set(project["optional-dependencies"])


def test_the_container_serves_as_somebody_else_than_root_and_tells_its_health(server: RunningServer) -> None:
    last = dict(instructions())
    assert last["USER"] == "weft" and "useradd" in next(rest for _, rest in instructions() if "apt-get" in rest)
    command = json.loads(last["ENTRYPOINT"])
    settings = server_settings(build_parser("serve").parse([*command[1:], "--api-key", "k"]))
    settings.check()
    assert (command[0], settings.host, str(settings.port)) == ("weft", "0.0.0.0", last["EXPOSE"])
    probe = json.loads(last["HEALTHCHECK"].partition("CMD")[2])
    code = probe[2].replace(f"http://127.0.0.1:{settings.port}", server.url)
    assert probe[:2] == ["python", "-c"] and server.url in code
    assert subprocess.run([shutil.which("python3") or "python", "-c", code], timeout=GUARD_S).returncode == 0
    broken = code.replace("/health", "/nowhere")
    assert subprocess.run([shutil.which("python3") or "python", "-c", broken], capture_output=True).returncode == 1
