"""Curl, as in the documentation's examples."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from tests.patience import GUARD_S
from tests.server.running import RunningServer, chat_body

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def curl(server: RunningServer, path: str, *arguments: str) -> str:
    command = ["curl", "--silent", "--show-error", "--max-time", str(GUARD_S), server.url + path, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_body_from_the_command_line(server: RunningServer) -> None:
    body = json.dumps(chat_body("Grüße"), ensure_ascii=False)
    answer = json.loads(curl(server, "/v1/chat/completions", "--json", body))
    assert answer["choices"][0]["message"]["content"] == "Grüße"


def test_a_stream_without_a_buffer(server: RunningServer) -> None:
    text = curl(server, "/v1/chat/completions", "--no-buffer", "--json", json.dumps(chat_body("one two", stream=True)))
    lines = [line for line in text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "one two"


def test_a_large_body_that_waits_for_100_continue(server: RunningServer) -> None:
    body = json.dumps({"prompt": "a " * 40_000})
    said = curl(server, "/tokenize", "--include", "--header", "Expect: 100-continue", "--json", body)
    assert "HTTP/1.1 100" in said and '"count":' in said


def test_statuses(server: RunningServer) -> None:
    status = ("--output", "/dev/null", "--write-out", "%{http_code}")
    assert curl(server, "/health", *status) == "200"
    assert curl(server, "/v1/chat/completions", *status, "--json", "{") == "400"
    assert curl(server, "/v1/chat/completions", *status) == "405"
    assert curl(server, "/nothing", *status, "--head") == "404"
