"""A machine that is too busy, and calls that take long: slow is not broken, and none pays for another."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import GUARD_S
from tests.server.fake_engine import SLOW
from tests.server.running import ROOT, RunningServer, is_alive, wait_until
from tests.whole import takes_long
from weft.config import resolve
from weft.engine import wire
from weft.engine.channel import ServerChannel
from weft.engine.launcher import EngineCommand, EngineProcess
from weft.processes.heartbeat import Pulse
from weft.server import grammar_check, worker_pool
from weft.server.errors import ApiError
from weft.server.grammar_check import GrammarChecker
from weft.server.rendering import RenderPool

CONFIG = resolve()

BEATING = """
import re, sys, time
from pathlib import Path
from weft.processes.heartbeat import Heartbeat
Heartbeat(Path(sys.argv[1])).start()
time.sleep(0.3)
re.match("(a+)+$", "a" * 40 + "b")  # holds the interpreter lock for minutes
"""


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[tuple[Pulse, subprocess.Popen[bytes]]]:
    """A process with a heartbeat that soon computes without ever letting the beating thread run."""
    pulse = Pulse(tmp_path / "heartbeat")
    process = subprocess.Popen([sys.executable, "-c", BEATING, str(tmp_path / "heartbeat")], cwd=ROOT)
    try:
        yield pulse, process
    finally:
        process.kill()
        process.wait()


def test_a_process_that_computes_is_not_frozen_and_one_that_stands_still_is(
    locked: tuple[Pulse, subprocess.Popen[bytes]],
) -> None:
    pulse, process = locked
    wait_until(lambda: pulse.silence_s < 1, 10)
    wait_until(lambda: pulse.silence_s > 1, 10)  # the lock is held: nobody has looked, so nothing was seen
    pulse.poll(process.pid)
    assert pulse.silence_s < 0.5
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: pulse.poll(process.pid) or pulse.silence_s > 0.5, 2)  # a busy machine stops it later
    process.kill()
    process.wait()
    pulse.poll(process.pid)  # no such process


def test_a_grammar_may_wait_for_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "TIMEOUT_S", 0.3)

    def pids_of(checker: GrammarChecker) -> set[int]:
        processes = [worker._process for worker in tuple(checker._workers._workers)]
        return {process.pid for process in processes if process is not None}

    def send(pids: set[int], number: signal.Signals) -> None:
        for pid in pids:
            os.kill(pid, number)

    async def main() -> None:
        checker = GrammarChecker(CONFIG.tokenizer_path, CONFIG.model_config.vocab_size, [2041])
        await checker.check("start: /a/", "p")
        pids = pids_of(checker)
        send(pids, signal.SIGSTOP)
        asyncio.get_running_loop().call_later(0.8, send, pids, signal.SIGCONT)
        await checker.check("start: /b/", "p")
        assert pids <= pids_of(checker)
        monkeypatch.setattr(worker_pool, "_PATIENCE", 1)
        send(pids_of(checker), signal.SIGSTOP)
        with pytest.raises(ApiError, match="overloaded") as refusal:
            await checker.check("start: /c/", "p")
        assert refusal.value.status == 503
        checker.close()

    asyncio.run(main())


def test_a_template_may_wait_for_a_busy_machine() -> None:
    async def main() -> None:
        pool = RenderPool(timeout_s=0.1)
        assert await pool.run_limited(lambda: time.sleep(0.4) or 5, str) == "5"
        pool.close()

    asyncio.run(main())


def test_nothing_is_said_to_an_engine_that_has_gone(tmp_path: Path) -> None:
    async def main() -> None:
        channel = ServerChannel(tmp_path)
        channel.send(wire.FinishRequests(["x"]))
        channel.close()

    asyncio.run(main())


def test_an_engine_whose_messages_make_no_sense_is_ended() -> None:
    async def main() -> int:
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def refuse(message: wire.FromEngine) -> None:
            raise ValueError("not understood")

        EngineProcess(EngineCommand({}, "tests.server.fake_engine"), refuse, ended.set_result)
        return await asyncio.wait_for(ended, GUARD_S)

    assert asyncio.run(main()) == -signal.SIGKILL


def test_an_engine_whose_messages_cannot_be_read_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(content: bytes) -> wire.FromEngine:
        raise ValueError("no such message")

    monkeypatch.setattr(wire, "decode_from_engine", fail)

    async def main() -> int:
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        EngineProcess(EngineCommand({}, "tests.server.fake_engine"), lambda message: None, ended.set_result)
        return await asyncio.wait_for(ended, GUARD_S)

    assert asyncio.run(main()) == -signal.SIGKILL


def test_the_last_words_of_an_engine_are_waited_for() -> None:
    async def main() -> tuple[list[wire.FromEngine], int]:
        heard: list[wire.FromEngine] = []
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        EngineProcess(
            EngineCommand({"model": "/nowhere/at/all"}, "tests.server.fake_engine"), heard.append, ended.set_result
        )
        return heard, await asyncio.wait_for(ended, GUARD_S)

    heard, status = asyncio.run(main())
    assert status == wire.FAILED_STATUS and isinstance(heard[-1], wire.Failed) and heard[-1].user_error


@takes_long
def test_busy_processes_of_a_higher_priority_make_a_server_slow_and_nothing_else() -> None:
    server = RunningServer().wait_ready()
    pids = [server.process.pid, server.engine_pid]
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(task.name), 19)
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            answer = server.chat("busy here", guided_choice=["yes", "no"], priority=SLOW, max_tokens=2)
            assert answer.status_code in (200, 503), answer.text
            assert server.client.get("/health").status_code == 200
        assert [is_alive(pid) for pid in pids] == [True, True]
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
        server.close()
