"""A log that cannot be written: lines are lost and counted, and nothing else happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.patience import GUARD_S, stretched
from tests.server.running import ROOT, RunningServer, chat_body, wait_until
from tests.whole import takes_long
from weft.processes.log_writer import LogWriter


def test_lines_are_dropped_counted_and_told() -> None:
    reader, fd = os.pipe()
    os.set_blocking(reader, False)
    writer = LogWriter(fd, max_queued=100)
    line = "x" * 1000
    began = time.monotonic()
    for number in range(5000):  # the pipe holds about 64 of them
        writer.put(f"{number} {line}")
    assert time.monotonic() - began < stretched(1.0)
    wait_until(lambda: writer.num_dropped > 4000, 5)
    writer.close(0.1)  # nobody reads: it gives up
    seen = ""

    def told() -> bool:
        nonlocal seen
        try:
            seen += os.read(reader, 1 << 20).decode()
        except BlockingIOError:
            writer.put("another")
        return "could not be written and were dropped" in seen

    wait_until(told, 10)
    wait_until(lambda: told() and seen.count(line) == 100, 5)
    assert "weft: 4900 lines" in seen
    wait_until(lambda: writer.num_dropped == 0, 5)


def test_a_reader_that_has_gone() -> None:
    reader, fd = os.pipe()
    os.close(reader)
    writer = LogWriter(fd)
    writer.put("one")
    wait_until(lambda: writer.num_dropped == 1, 5)
    writer.put("two")
    wait_until(lambda: writer.num_dropped == 2, 5)


@pytest.fixture(params=["stalled", *(pytest.param(kind, marks=takes_long) for kind in ("full", "closed"))])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server whose standard error takes nothing, or next to nothing."""
    reader = -1
    if request.param == "full":
        fd = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, fd = os.pipe()
    port = _free_port()
    command = [sys.executable, "-m", "tests.server.fake_server", "--port", str(port)]
    process = subprocess.Popen(command, stderr=fd, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    os.close(fd)
    if request.param == "closed":
        os.close(reader)
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()
        if request.param == "stalled":
            os.close(reader)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@takes_long
def test_serving_goes_on_without_a_log(served: tuple[str, subprocess.Popen[bytes]]) -> None:
    url, process = served
    with httpx.Client(base_url=url, timeout=stretched(5)) as client:
        wait_until(lambda: _is_ready(client), 30)
        for _ in range(3):
            for number in range(30):  # unknown names are warned of, at length
                body = chat_body("x" * 50, **{f"unknown_{number}_{'y' * 60}": 1})
                assert client.post("/v1/chat/completions", content=json.dumps(body)).status_code == 200
            assert client.get("/health").status_code == 200
        for _ in range(250):  # more lines than a pipe holds
            assert client.post("/v1/chat/completions", json=chat_body("x", max_tokens=1)).status_code == 200
        assert client.get("/health").status_code == 200
    process.terminate()
    assert process.wait(GUARD_S) == 0


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx.ConnectError:
        return False


@takes_long  # tests/server/test_model_faults.py reads such a log
def test_every_line_of_a_json_log_is_json() -> None:
    """From the start to the end, whichever process writes it."""
    flags = ("--log-format", "json", "--cpu-cache-gib", "0.02", "--verbose")
    server = RunningServer(*flags, module="weft")
    try:
        server.wait_ready()
        assert server.stop() == 0
    finally:
        server.close()
    wait_until(lambda: any("shutting down" in line for line in server.log), 5)
    lines = [json.loads(line) for line in server.log]
    assert lines[0]["url"] == server.url
    assert {"tokenizer", "ready"} <= {line.get("stage") for line in lines}
    assert {None, "engine"} <= {line.get("process") for line in lines}
