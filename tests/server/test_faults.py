"""Processes that die, freeze or are told to leave; callers that vanish; more calls than fit."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.patience import GUARD_S, stretched
from tests.server.fake_engine import CRASH, SLOW
from tests.server.running import RunningServer, chat_body, is_alive, wait_until
from tests.whole import takes_long
from weft.assets import MODEL_DIR

Start = Callable[..., RunningServer]


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[RunningServer] = []

    def begin(*flags: str, **environment: str) -> RunningServer:
        servers.append(RunningServer(*flags, **environment))
        return servers[-1].wait_ready()

    yield begin
    for running in servers:
        running.close()


class Reader(threading.Thread):
    """Reads one stream; ``seconds`` is when it ended, measured from ``since``."""

    def __init__(self, server: RunningServer) -> None:
        super().__init__(daemon=True)
        self.url = server.url
        self.lines: list[str] = []
        self.begun = threading.Event()
        self.ended_at = 0.0
        self.start()
        assert self.begun.wait(GUARD_S)

    def run(self) -> None:
        body = chat_body("on and on", stream=True, priority=SLOW, ignore_eos=True)
        with contextlib.suppress(httpx.RemoteProtocolError):  # cut off in the middle
            with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, timeout=GUARD_S) as response:
                for line in response.iter_lines():
                    self.begun.set()
                    if line:
                        self.lines.append(line)
        self.ended_at = time.monotonic()

    def error(self) -> Any:
        """The error event, which must be the last but [DONE]."""
        self.join(GUARD_S)
        assert self.lines[-1] == "data: [DONE]"
        return json.loads(self.lines[-2].removeprefix("data: "))["error"]


@takes_long
def test_restart_engine(start: Start) -> None:
    server = start("--restart-engine")
    first = server.engine_pid
    reader = Reader(server)
    assert server.chat("x", priority=CRASH).status_code == 503
    assert "status 3" in reader.error()["message"]
    states = [server.client.get("/health")]
    while server.client.get("/ready").status_code == 503:
        states.append(server.client.get("/health"))
        assert states[-1].status_code == 200
    assert any(state.json() == {"status": "restarting"} for state in states)
    assert server.engine_pid != first and server.chat("again").json()["choices"][0]["message"]["content"] == "again"
    assert "weft:engine_restarts_total 1.0" in server.client.get("/metrics").text


def test_a_frozen_engine_is_unhealthy_until_it_moves(server: RunningServer) -> None:
    pid = server.engine_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: server.client.get("/health").status_code == 503, 5.0)
        assert server.client.get("/health").json() == {"status": "frozen"}
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: server.client.get("/health").status_code == 200, 2.0)


@takes_long
def test_a_frozen_engine_takes_no_calls_and_then_goes_on(start: Start) -> None:
    """Calls that it cannot have seen get 503, before and after the heartbeat is late; a running stream waits."""
    server = start()
    pid = server.engine_pid
    running = Reader(server)
    wait_until(lambda: any("content" in line for line in running.lines), 5.0)
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(0.1)
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            early = [threads.submit(server.chat, "early", stream=stream) for stream in (False, True)]
            wait_until(lambda: server.client.get("/health").status_code == 503, 5.0)
            began = time.monotonic()
            late = server.chat("late")
            assert time.monotonic() - began < stretched(1.0)
            for refused in (late, *(answer.result() for answer in early)):
                error = refused.json()["error"]
                assert (refused.status_code, error["code"], error["type"]) == (503, "frozen", "server_error")
                assert "stands still" in error["message"] and int(refused.headers["Retry-After"]) > 0
        num_lines = len(running.lines)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: server.chat("again").status_code == 200, 5.0)
    wait_until(lambda: len(running.lines) > num_lines, 5.0)
    wait_until(lambda: server.client.get("/load").json()["server_load"] == 1, 5.0)


def test_sigterm_lets_open_requests_finish(start: Start) -> None:
    server = start()
    answers: list[httpx.Response] = []
    body = chat_body("slowly now", priority=SLOW, max_tokens=120)
    url = f"{server.url}/v1/chat/completions"
    thread = threading.Thread(target=lambda: answers.append(httpx.post(url, json=body, timeout=GUARD_S)))
    thread.start()
    wait_until(lambda: server.client.get("/load").json()["server_load"] == 1, 5)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.client.get("/ready").status_code == 503, 5)
    assert server.client.get("/health").status_code == 200
    refused = server.chat("too late")
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
    assert int(refused.headers["Retry-After"]) > 0
    thread.join(GUARD_S)
    assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 120
    assert server.process.wait(GUARD_S) == 0


@takes_long
def test_a_second_sigterm_does_not_wait(start: Start) -> None:
    server = start()
    reader = Reader(server)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.client.get("/ready").status_code == 503, 5)
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(GUARD_S)
    reader.join(GUARD_S)
    assert not reader.is_alive()


def test_callers_that_leave_are_aborted(server: RunningServer) -> None:
    address = httpx.URL(server.url)
    body = json.dumps(chat_body("x", stream=True, priority=SLOW, ignore_eos=True)).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    sockets = [socket.create_connection((address.host, address.port or 80)) for _ in range(6)]
    for connection in sockets:
        connection.sendall(head + body)
    wait_until(lambda: server.client.get("/load").json()["num_running"] == 6, 5)
    for connection in sockets:
        connection.close()
    wait_until(lambda: server.client.get("/load").json()["server_load"] == 0, 2)
    wait_until(lambda: server.client.get("/load").json()["num_running"] == 0, 2)


def test_over_the_queue_is_429_at_once_and_a_killed_engine_ends_streams_and_server(start: Start) -> None:
    server = start("--max-queue-size", "1")
    readers = [Reader(server) for _ in range(9)]
    began = time.monotonic()
    refused = server.chat("no room")
    assert time.monotonic() - began < stretched(0.5)
    assert refused.status_code == 429 and refused.headers["Retry-After"] == "1"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    killed = time.monotonic()
    os.kill(server.engine_pid, signal.SIGKILL)
    for reader in readers:
        assert reader.error()["type"] == "server_error"
        assert reader.ended_at - killed < stretched(1.0)
    assert server.process.wait(GUARD_S) == 1
    assert any("signal 9" in line for line in server.log)


@takes_long
def test_a_request_that_takes_too_long(start: Start) -> None:
    server = start("--request-timeout", "0.5")
    fields = {"priority": SLOW, "ignore_eos": True}
    late = server.chat("x", **fields)
    assert late.status_code == 504 and late.json()["error"]["code"] == "timeout"
    lines = server.chat("x", stream=True, **fields).text.split("\n\n")
    assert json.loads(lines[-3].removeprefix("data: "))["error"]["code"] == "timeout"
    wait_until(lambda: server.client.get("/load").json()["server_load"] == 0, 2)


def test_keys_and_a_killed_server_leaves_no_child(start: Start) -> None:
    server = start("--api-key", "first", "--strict", WEFT_API_KEY="second")
    post = server.client.post
    for headers in ({}, {"Authorization": "Bearer"}, {"Authorization": "Bearer wrong"}, {"x-api-key": "firs"}):
        for path in ("/v1/models", "/metrics", "/load", "/openapi.json", "/health/", "/health%2Fx", "/nope"):
            assert server.client.get(path, headers=headers).status_code == 401, (headers, path)
        assert server.client.get("/health", headers=headers).status_code == 200
    for headers in ({"Authorization": "Bearer first"}, {"Authorization": "bearer second"}, {"x-api-key": "first"}):
        assert post("/v1/completions", json={"prompt": "x"}, headers=headers).status_code == 200
    strict = post("/v1/completions", json={"prompt": "x", "odd": 1}, headers={"x-api-key": "first"})
    assert strict.status_code == 400 and strict.json()["error"]["param"] == "odd"
    pid = server.engine_pid
    server.process.kill()
    wait_until(lambda: not is_alive(pid), 3.0)


@takes_long
def test_a_checkpoint_that_cannot_be_used_is_told_in_one_line(tmp_path: Path) -> None:
    """With the status for which nobody starts it again (``deploy/weft.service``)."""
    folder = shutil.copytree(MODEL_DIR, tmp_path / "model")
    (folder / "model.safetensors").write_bytes(bytes(1000))
    server = RunningServer("--model", str(folder), "--device", "cpu", module="weft")
    assert server.process.wait(GUARD_S) == 2
    wait_until(lambda: any("weft: error: " in line for line in server.log), 2)
    assert not any("Traceback" in line for line in server.log)
    server.close()


def test_sigterm_while_the_engine_starts() -> None:
    server = RunningServer(module="weft")
    wait_until(lambda: server.client.get("/health").json() == {"status": "starting"}, 5)
    assert server.chat("too early").json()["error"]["code"] == "starting"
    pid = server.engine_pid
    began = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began < stretched(5) and not is_alive(pid)
    server.close()
