"""The ranks other than 0 as rank 0 sees them: who hangs, what is said of a death, how all end; without ranks."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.patience import GUARD_S
from weft.errors import ConfigError, EngineDeadError, WeftError
from weft.executor import rank_process, workers
from weft.executor.rank_process import RankProcess, SiblingRank, StartedRank, begin_start
from weft.executor.ring import Reader, Writer
from weft.executor.worker import FAILED_STATUS, Report
from weft.executor.workers import Workers
from weft.processes import child, liveness
from weft.processes.liveness import Movement


class FakeRank:
    """A rank that ends when it is told to."""

    def __init__(self, rank: int) -> None:
        self.rank, self.pid = rank, 100 + rank
        self.failed: Report | None = None
        self.ended: str | None = None
        self.kills = self.looks = 0
        self.waited: list[float] = []

    @property
    def is_ready(self) -> bool:
        self.looks += 1
        assert self.looks < 20, "it is waited for in vain"
        return False

    def ending(self) -> str | None:
        return self.ended

    def last_words(self) -> str:
        return "; its last words"

    def kill(self) -> None:
        self.kills += 1

    def wait(self, seconds: float) -> None:
        self.waited.append(seconds)
        time.sleep(seconds)


Make = Callable[..., tuple[Workers, list[FakeRank]]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Workers of two ranks whose watcher looks often. ``beats``: what the ring says."""
    monkeypatch.setattr(workers, "_LOOK_S", 0.01)
    made: list[Workers] = []

    def make(beats: list[tuple[int, float]] | None = None) -> tuple[Workers, list[FakeRank]]:
        ranks = [FakeRank(1), FakeRank(2)]
        ring = SimpleNamespace(beats=lambda: beats or [(0, 0.0), (0, 0.0)])
        made.append(Workers(cast("list[RankProcess]", ranks), cast(Writer, ring)))
        return made[-1], ranks

    yield make
    for each in made:
        each.end()
        assert not each._watcher.is_alive()


@pytest.mark.parametrize(
    ("pid", "beat_s", "moves", "silence_s"),
    [(0, 1e6, False, 0.0), (9, 0.0, False, 0.0), (9, 60.0, True, 0.0), (9, 60.0, False, 60.0)],
    ids=["loads", "beats", "computes", "hangs"],
)
def test_who_is_silent(
    pid: int, beat_s: float, moves: bool, silence_s: float, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    each, ranks = make([(5, now + 100), (pid, now - beat_s)])
    each.may_leave()
    monkeypatch.setattr(liveness, "processor_s", lambda _: 2.0 if moves else 1.0)
    monkeypatch.setattr(liveness, "waits_for_processor", lambda _: False)
    each._movements[9] = movement = Movement()
    movement._used = 1.0
    assert each._silence_s(cast(RankProcess, ranks[1])) == pytest.approx(silence_s, abs=5)
    assert each._silence_s(cast(RankProcess, ranks[0])) == 0.0


def test_a_rank_that_hangs_is_told(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "HANG_S", 0.02)
    monkeypatch.setattr(liveness, "processor_s", lambda _: 1.0)
    monkeypatch.setattr(liveness, "waits_for_processor", lambda _: False)
    monkeypatch.setattr(workers, "abort_groups", lambda: None)
    each, _ = make([(0, 0.0), (9, time.monotonic() - 60)])
    assert "rank 2 of the model (process 102) has given no sign of life for 0 s" in str(each.failure(wait_s=10))


@pytest.mark.parametrize(
    ("report", "kind", "words"),
    [
        (None, EngineDeadError, "rank 2 of the model (process 102) has ended; its last words"),
        (Report("failed", "no weights"), EngineDeadError, "rank 2 of the model failed: ; its last words"),
        (Report("failed", "no file", user_error=True), ConfigError, "rank 2 of the model failed: ; its last words"),
    ],
)
def test_the_end_of_one_is_the_end_of_all(
    report: Report | None, kind: type[WeftError], words: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of what waits for it: in a collective, or for its start."""
    aborted = threading.Event()
    monkeypatch.setattr(workers, "abort_groups", aborted.set)
    each, ranks = make()
    ranks[1].failed, ranks[1].ended = report, "has ended"
    error = each.failure(wait_s=10)
    assert type(error) is kind and str(error) == words
    with pytest.raises(kind, match="rank 2"):
        each.wait_until_ready()
    assert aborted.wait(GUARD_S) and all(rank.kills for rank in ranks)
    each.fail("a step broke on rank 0", wait_s=0.0)
    assert each.failure() is error, "the cause, and not what came of it"


def test_what_breaks_on_rank_0_ends_the_others(make: Make) -> None:
    each, ranks = make()
    each.fail("a step broke on rank 0", wait_s=0.0)
    with pytest.raises(EngineDeadError, match="a step broke on rank 0"):
        each.check()
    assert all(rank.kills for rank in ranks)


def test_who_was_asked_to_leave_does_not_fail(make: Make) -> None:
    each, ranks = make()
    each.may_leave()
    each._fail(cast(RankProcess, ranks[0]), "ended with status 0")
    assert each.failure() is None and not ranks[0].kills


def test_those_that_do_not_leave_are_killed_after_one_time_for_all(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_GRACE_S", 0.05)
    each, ranks = make()
    each.wait()
    assert [rank.kills for rank in ranks] == [1, 1]
    assert ranks[0].waited[0] > 0.0 and ranks[1].waited == [0.0]


# -- a process ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "ending", "words"),
    [
        ("echo so >&2; exit 3", "ended with status 3", "; its last lines: so"),
        ("kill -9 $$", "was killed by SIGKILL", "; it printed nothing"),
        (f"exit {FAILED_STATUS}", "failed", "; it printed nothing"),
        ('echo \'{"kind":"failed","text":"why"}\' >/proc/self/fd/%d; exit 70', "failed", "why"),
    ],
)
def test_how_a_started_rank_ends(script: str, ending: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def shell(command: list[str], *, pass_fds: tuple[int], **named: Any) -> subprocess.Popen[bytes]:
        line = script % pass_fds if "%d" in script else script
        return subprocess.Popen(["sh", "-c", line], pass_fds=pass_fds, **named)

    monkeypatch.setattr(child, "Popen", shell)
    rank = StartedRank(1)
    rank.wait(GUARD_S)
    assert rank.ending() == ending and rank.last_words() == words
    assert not any(thread.is_alive() for thread in rank._child._readers), "this process holds no end of theirs"
    rank.kill()


@pytest.mark.parametrize("error", [BrokenPipeError, ValueError("I/O operation on closed file")])
def test_what_a_rank_prints_is_read_also_where_nobody_reads_it_here(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that cannot print stands still and goes on beating, so the others would wait for it without an end."""

    def write(line: str) -> None:
        raise error

    script = f"head -c 100000 /dev/zero | tr '\\0' x >&2; echo >&2; echo last >&2; exit {FAILED_STATUS}"
    monkeypatch.setattr(child, "Popen", lambda _, **named: subprocess.Popen(["sh", "-c", script], **named))
    monkeypatch.setattr(child, "sys", SimpleNamespace(stderr=SimpleNamespace(write=write), executable=""))
    rank = StartedRank(1)
    rank.wait(GUARD_S)
    assert rank.ending() == "failed" and rank.last_words().endswith("| last")
    rank.kill()


def test_a_killed_rank_is_no_zombie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "Popen", lambda command, **named: subprocess.Popen(["sleep", "100"], **named))
    rank = StartedRank(1)
    assert rank.ending() is None and not rank.is_loaded and not rank.is_ready
    rank._take(Report("stage", "weights", 2.0))
    assert rank.is_loaded and not rank.is_ready and rank.stages == {"weights": 2.0}
    rank._take(Report("ready"))
    assert rank.is_ready and rank.failed is None
    rank.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(rank.pid, 0)


@pytest.mark.parametrize(
    ("size", "backend", "launched", "ranks"),
    [
        (None, None, False, []),
        (1, None, False, []),
        (2, "mp", False, [1]),
        (8, None, False, [1, 2, 3, 4, 5, 6, 7]),
        (9, None, False, []),
        (2, "external_launcher", False, []),
        (2, None, True, []),
    ],
)
def test_ranks_that_are_started_early(
    size: int | None, backend: str | None, launched: bool, ranks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_process, "StartedRank", lambda rank: rank)
    monkeypatch.setattr(rank_process, "is_launched", lambda: launched)
    settings = {"device": "cpu", "tensor_parallel_size": size, "distributed_executor_backend": backend}
    assert cast(list[int], begin_start(settings)) == ranks


def test_a_sibling_is_who_its_heartbeat_says() -> None:
    ring = Writer(2)
    rank = SiblingRank(2, ring)
    assert (rank.pid, rank.is_loaded, rank.ending()) == (0, False, None)
    process = subprocess.Popen(["sleep", "100"])
    reader = Reader(ring.address, 1, 0.0)
    reader._memory.set_number(1, 3, process.pid)
    assert (rank.pid, rank.is_loaded, rank.ending()) == (process.pid, True, None)
    rank.kill()
    assert rank.ending() == "has ended" and process.wait(GUARD_S) == -9
    ring.close()
