"""Child processes: input, output, exit, end, and restarts."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patience import GUARD_S
from weft.processes import child
from weft.processes.child import Child, Restarts, describe_exit

LIMIT_S = GUARD_S
MADE: list[Child] = []


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """End the children of a test with the test, so that their descriptors do not change during the next test."""
    yield
    while MADE:
        MADE.pop().end()


def shell(script: str, monkeypatch: pytest.MonkeyPatch, **named: Any) -> Child:
    """A child that runs ``script`` instead of a module."""

    def run(command: list[str], **pipes: Any) -> subprocess.Popen[bytes]:
        assert command[1:] == ["-m", "weft.nothing", "first", "second"]
        return subprocess.Popen(["sh", "-c", script], **pipes)

    monkeypatch.setattr(child, "Popen", run)
    MADE.append(Child("weft.nothing", "first", "second", **named))
    return MADE[-1]


def test_a_module_runs_with_its_input_variables_and_descriptors() -> None:
    """``json.tool`` answers on standard output, which a child shares with its parent; here it is a pipe."""
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    saved = os.dup(1)
    os.dup2(writer, 1)
    try:
        MADE.append(process := Child("json.tool", environment={"PYTHONUTF8": "1"}))
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(writer)
    process.send(b'{"a":1}')
    assert process.wait(LIMIT_S) == 0 == process.status
    with os.fdopen(reader) as answer:
        assert answer.read().split() == ["{", '"a":', "1", "}"]


def test_variables_are_added_to_those_of_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_OF_THE_PARENT", "1")
    process = shell("exit $((WEFT_OF_THE_PARENT + OF_THE_CHILD))", monkeypatch, environment={"OF_THE_CHILD": "2"})
    assert process.wait(LIMIT_S) == 3


def test_a_child_in_the_background_has_a_session_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing to read, and nobody who reads what it prints."""
    process = shell("read line || echo nothing; sleep 100", monkeypatch, in_background=True)
    assert os.getsid(process.pid) == process.pid != os.getsid(0)
    assert os.readlink(f"/proc/{process.pid}/fd/0") == os.readlink(f"/proc/{process.pid}/fd/1") == "/dev/null"
    process.end()


def test_each_line_of_a_pipe_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    process = shell(f"(echo one; echo two) >/proc/self/fd/{writer}", monkeypatch, pass_fds=(writer,))
    os.close(writer)
    lines: list[bytes] = []
    process.listen(os.fdopen(reader, "rb"), lines.append)
    assert process.wait(LIMIT_S) == 0 and process.last_lines() == [] and lines == [b"one\n", b"two\n"]


def test_the_last_lines_are_kept_and_forwarded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    process = shell("seq 100 >&2", monkeypatch, forwards_errors=True)
    process.wait(LIMIT_S)
    assert process.last_lines() == [str(number) for number in range(81, 101)]
    assert capsys.readouterr().err.split() == [str(number) for number in range(1, 101)]


def test_a_full_pipe_never_stops_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(line: str) -> None:
        raise ValueError("I/O operation on closed file")

    monkeypatch.setattr(child, "sys", SimpleNamespace(stderr=SimpleNamespace(write=write), executable=""))
    script = "head -c 100000 /dev/zero | tr '\\0' x >&2; echo >&2; echo last >&2"
    process = shell(script, monkeypatch, forwards_errors=True)
    assert process.wait(LIMIT_S) == 0 and process.last_lines()[-1] == "last"


def test_input_for_a_dead_child_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    process = shell("exit 3", monkeypatch)
    assert process.wait(LIMIT_S) == 3
    process.send(b"x" * 1_000_000)
    assert process._process.stdin is not None and process._process.stdin.closed


def test_an_exit_is_reported_in_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        status: asyncio.Future[int] = loop.create_future()
        process = shell("sleep 100", monkeypatch)
        process.on_exit(loop, status.set_result)
        await asyncio.sleep(0)
        assert process.status is None and not status.done()
        process.kill()
        return await asyncio.wait_for(status, LIMIT_S)

    assert asyncio.run(main()) == -signal.SIGKILL


def test_an_exit_after_the_event_loop_is_reported_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.new_event_loop()
    process = shell("sleep 100", monkeypatch)
    died: list[object] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    before = set(threading.enumerate())
    process.on_exit(loop, lambda status: None)
    (watcher,) = set(threading.enumerate()) - before
    loop.close()
    process.kill()
    watcher.join(LIMIT_S)
    assert not died and not watcher.is_alive()


def test_the_end_of_a_child_leaves_no_zombie(monkeypatch: pytest.MonkeyPatch) -> None:
    process = shell("sleep 100", monkeypatch)
    assert process.status is None and process.wait(0.01) is None
    process.end()
    assert process.status == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    process.end()  # a second time changes nothing


def test_exits_in_words() -> None:
    assert (describe_exit(3), describe_exit(-9)) == ("status 3", "signal 9")


def test_a_process_that_was_stable_is_not_restarted_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time counts once: the processes after it may never become ready."""
    monkeypatch.setattr(child, "STABLE_AFTER_S", -1.0)
    restarts = Restarts(num_in_a_row=3)
    assert not Restarts().allowed(), "it was never ready"
    restarts.ready()
    assert [restarts.allowed() for _ in range(5)] == [True, True, True, False, False] and restarts.num == 3
