"""Several API processes before one engine: shared limits and metrics, the death of one, drain, the engine's death."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import signal
import socket
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import uvicorn

from tests.patience import GUARD_S, stretched
from tests.server.fake_engine import CAPACITY, SLOW, FakeCore
from tests.server.running import RunningServer, chat_body, is_alive, wait_until
from tests.whole import takes_long
from weft.engine import wire
from weft.errors import ConfigError
from weft.messages import RowSampling
from weft.request import RequestSpec
from weft.server import api_link as link
from weft.server.admission import Admission, OpenCounts
from weft.server.api_servers import _NUMBERS, ApiProcess, ApiServers
from weft.server.errors import ApiError
from weft.server.history import History
from weft.server.http_server import _HttpServer, listen
from weft.server.process_reports import ReportGatherer
from weft.server.request_metrics import Counts
from weft.server.settings import ServerSettings
from weft.stats import EngineStats

Start = Callable[..., RunningServer]

TWO = ("--api-server-count", "2")


@pytest.fixture(scope="module")
def two() -> Iterator[RunningServer]:
    """For all tests that it survives."""
    running = RunningServer(*TWO, "--restart-engine", "--max-queue-size", "12")  # and eight run
    try:
        yield running.wait_ready()
    finally:
        running.close()


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[RunningServer] = []

    def begin(*flags: str) -> RunningServer:
        servers.append(RunningServer(*TWO, *flags))
        return servers[-1].wait_ready()

    yield begin
    for running in servers:
        running.close()


class Call(threading.Thread):
    """One slow call over a connection of its own; ``status`` is None if it was cut off."""

    def __init__(self, server: RunningServer, num_tokens: int, **fields: Any) -> None:
        super().__init__(daemon=True)
        body = chat_body("on and on", priority=SLOW, ignore_eos=True, max_tokens=num_tokens, **fields)
        self._ask = (f"{server.url}/v1/chat/completions", body)
        self.status: int | None = None
        self.answer: dict[str, Any] = {}
        self.start()

    def run(self) -> None:
        with contextlib.suppress(httpx.TransportError):
            response = httpx.post(self._ask[0], json=self._ask[1], timeout=GUARD_S, verify=False)
            self.status, self.answer = response.status_code, response.json()


def opened(server: RunningServer, count: int, num_tokens: int) -> list[Call]:
    calls = [Call(server, num_tokens) for _ in range(count)]
    wait_until(lambda: load(server) == count, 20)
    return calls


def load(server: RunningServer) -> int:
    return int(get(server, "/load").json()["server_load"])


def get(server: RunningServer, path: str) -> httpx.Response:
    """Over a new connection, so by whichever process."""
    return httpx.get(server.url + path, timeout=GUARD_S, verify=False)  # loading certificates takes 20 ms


def value(server: RunningServer, name: str) -> float:
    """The sum of a metric's samples."""
    found = re.findall(rf"^{name}{{[^}}]*}} (\S+)$", get(server, "/metrics").text, re.MULTILINE)
    return sum(map(float, found))


def connections_of(pid: int) -> int:
    """Sockets that a process has open."""
    count = 0
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            count += os.readlink(path).startswith("socket:")
    return count


@takes_long
def test_calls_are_spread_and_counted_together_and_their_queue_is_one(two: RunningServer) -> None:
    server = two
    before = [connections_of(pid) for pid in server.api_pids]
    num_tokens = min(1000, round(stretched(100)))  # a second or more, in which all others are opened
    calls = opened(server, 20, num_tokens)
    assert len(before) == 2
    assert all(connections_of(pid) > count for pid, count in zip(server.api_pids, before, strict=True))
    assert {load(server) for _ in range(8)} == {20}
    refused = [httpx.post(f"{server.url}/v1/chat/completions", json=chat_body("more")) for _ in range(8)]
    assert {response.status_code for response in refused} == {429}
    for call in calls:
        call.join(GUARD_S)
        assert call.status == 200 and call.answer["usage"]["completion_tokens"] == num_tokens
    assert len({call.answer["id"] for call in calls}) == 20
    for _ in range(4):
        assert value(server, "vllm:request_success_total") == 20
        assert value(server, "vllm:generation_tokens_total") == 20 * num_tokens
    history = [get(server, "/inspect?history=recent").json()["history"] for _ in range(4)]
    wait_until(lambda: get(server, "/inspect").json()["history"]["num_first_tokens"] == 20, 20)
    assert all(view["num_first_tokens"] <= 20 for view in history)


def test_one_that_dies_takes_its_own_calls_only(two: RunningServer) -> None:
    server = two
    done = [httpx.post(f"{server.url}/v1/chat/completions", json=chat_body("x")).status_code for _ in range(8)]
    counted = value(server, "vllm:request_success_total")
    assert done == [200] * 8 and counted >= 8
    calls = opened(server, 20, 300)
    victim, other = server.api_pids
    os.kill(victim, signal.SIGKILL)
    for call in calls:
        call.join(GUARD_S)
    lost = [call for call in calls if call.status is None]
    assert 0 < len(lost) < 20 and all(call.status == 200 for call in calls if call not in lost)
    wait_until(lambda: len(server.api_pids) == 2 and victim not in server.api_pids, 20)
    assert is_alive(other) and other in server.api_pids
    # Whoever meets the new process waits for it; nothing that was lost runs on, and no sum falls.
    ids = {httpx.post(f"{server.url}/v1/chat/completions", json=chat_body("y"), timeout=GUARD_S).json()["id"]
           for _ in range(8)}  # fmt: skip
    assert len(ids) == 8
    wait_until(lambda: get(server, "/load").json() | {"limit": 0} == IDLE, 20)
    assert value(server, "vllm:request_success_total") >= counted
    assert any("API process" in line and "signal 9" in line for line in server.log)


IDLE = {"server_load": 0, "num_running": 0, "num_waiting": 0, "limit": 0}


@takes_long
def test_sigterm_lets_the_calls_of_all_finish(start: Start) -> None:
    server = start()
    calls, pids = opened(server, 12, 200), server.api_pids
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: get(server, "/ready").status_code == 503, 10)
    refused = httpx.post(f"{server.url}/v1/chat/completions", json=chat_body("too late"))
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
    for call in calls:
        call.join(GUARD_S)
    assert {call.status for call in calls} == {200}
    assert server.process.wait(GUARD_S) == 0 and not any(map(is_alive, pids))
    assert any("12 open completions may finish" in line for line in server.log)


@takes_long
def test_a_second_sigterm_does_not_wait(start: Start) -> None:
    server = start()
    opened(server, 4, 4000)
    pids = server.api_pids
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: get(server, "/ready").status_code == 503, 10)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(GUARD_S) == 0 and not any(map(is_alive, pids))


@takes_long
def test_the_engine_dies_and_all_are_told(start: Start) -> None:
    server = start()
    calls, pids = opened(server, 8, 4000), server.api_pids
    os.kill(server.engine_pid, signal.SIGKILL)
    for call in calls:
        call.join(GUARD_S)
        assert call.status == 503 and "signal 9" in call.answer["error"]["message"]
    assert server.process.wait(GUARD_S) == 1 and not any(map(is_alive, pids))
    assert sum("signal 9" in line and "weft: error" in line for line in server.log) == 1


def test_another_engine_is_taken_up_by_all(two: RunningServer) -> None:
    server = two
    calls, engine = opened(server, 8, 4000), server.engine_pid
    os.kill(engine, signal.SIGKILL)
    for call in calls:
        call.join(GUARD_S)
        assert call.status == 503
    wait_until(lambda: {get(server, "/ready").status_code for _ in range(8)} == {200}, 30)
    assert server.engine_pid != engine
    assert {httpx.post(f"{server.url}/v1/chat/completions", json=chat_body("x")).status_code
            for _ in range(8)} == {200}  # fmt: skip
    assert get(server, "/metrics").text.count("weft:engine_restarts_total 1.0") == 1


def test_a_frozen_engine_is_seen_by_all(two: RunningServer) -> None:
    server, engine = two, two.engine_pid
    os.kill(engine, signal.SIGSTOP)
    try:
        wait_until(lambda: {get(server, "/health").status_code for _ in range(8)} == {503}, 10)
    finally:
        os.kill(engine, signal.SIGCONT)
    wait_until(lambda: {get(server, "/health").status_code for _ in range(8)} == {200}, 10)


@takes_long
def test_a_killed_server_leaves_no_child(start: Start) -> None:
    server = start()
    pids = [server.engine_pid, *server.api_pids]
    server.process.kill()
    wait_until(lambda: not any(map(is_alive, pids)), 10)


@takes_long
def test_one_that_cannot_start_ends_the_server() -> None:
    server = RunningServer(*TWO)
    try:
        wait_until(lambda: len(server.api_pids) == 2, 20)
        os.kill(server.api_pids[0], signal.SIGKILL)  # before it has served
        assert server.process.wait(GUARD_S) == 1
        assert any("no other one is started" in line for line in server.log)
    finally:
        server.close()


def test_a_port_in_use_is_told(two: RunningServer) -> None:
    port = int(two.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match="Address already in use; choose another --port"):
        listen(ServerSettings(api_server_count=2, port=port))


@pytest.mark.parametrize("count", [0, 65])
def test_how_many(count: int) -> None:
    with pytest.raises(ConfigError, match=f"api_server_count={count} is out of range; allowed: 1 to 64"):
        ServerSettings(api_server_count=count).check()


# --- parts -----------------------------------------------------------------------------------------------------------


def test_counts_of_several_processes() -> None:
    memory = bytearray(16)
    mine, other = OpenCounts(memory, 0), OpenCounts(memory, 1)
    leave = Admission(1, 1, mine).enter(1)
    other.add(1)
    with pytest.raises(ApiError, match="2 completions are running or waiting"):
        Admission(1, 1, mine).enter(1)
    leave()
    leave()
    assert mine.total == other.total == 1
    mine.forget(1)
    assert mine.total == 0


def test_sums_of_counts() -> None:
    one, two = Counts(), Counts()
    for counts, status in ((one, 200), (two, 200), (two, 429)):
        counts.observe("request_params_n", 2.0)
        counts.counters["prompt_tokens"] += 5
        counts.responses["/x", status] = 3
        counts.ended["stop"] = counts.ended.get("stop", 0) + 1
    one.add(two)
    assert sum(one.buckets["request_params_n"]) == 3 and one.sums["request_params_n"] == 6.0
    assert one.counters["prompt_tokens"] == 15 and one.ended == {"stop": 3}
    assert one.responses == {("/x", 200): 6, ("/x", 429): 3}


def test_histories_of_several_processes() -> None:
    now = [100.0]
    mine, other = History(lambda: now[0]), History(lambda: now[0])
    for history, status in ((mine, 200), (other, 429)):
        history.responded(status)
        history.first_token(0.5)
    now[0] += 1
    view = mine.view("recent", [mine.report("recent"), other.report("recent")])
    assert view["responses"] == {"ok": 1, "overloaded": 1} and view["num_first_tokens"] == 2
    assert [point["start"] for point in view["points"]] == [100]


def test_reports_are_gathered_and_outlive_their_process(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[tuple[int, list[bytes]]] = []

    async def main() -> None:
        gathering = ReportGatherer()

        def ask(members: set[int]) -> list[tuple[int, link.Report]]:
            return gathering.ask(0, link.Gather(7, "x"), members, lambda i, m: answers.append((i, m.reports)))

        for index, report in ask({0, 1}):
            gathering.reported(index, link.Reported(report.number, b"%d" % index))
        assert answers.pop() == (0, [b"0", b"1"])
        ask({0, 1})
        gathering.retire(1)  # process 1 dies before it answers
        gathering.reported(1, link.Reported(1, b"late"))  # its answer arrives after the news of its death
        assert not answers
        (_, report), *_ = ask({0})
        gathering.reported(0, link.Reported(report.number, b"new"))
        assert answers.pop() == (0, [b"new", b"1"])
        monkeypatch.setattr("weft.server.process_reports.PATIENCE_S", 0.01)
        ask({0})
        while not answers:
            await asyncio.sleep(0.01)
        assert answers.pop() == (0, [b"new", b"1"])
        ask({0, 1})
        gathering.retire(0)  # who asked dies; its successor must not be answered
        await asyncio.sleep(0.05)
        assert not answers

    asyncio.run(main())


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_frames_however_they_are_cut(size: int) -> None:
    got: list[Any] = []
    written = bytearray()

    class Transport:
        def write(self, content: bytes) -> None:
            written.extend(content)

        def is_closing(self) -> bool:
            return False

        def close(self) -> None:
            """Nothing more comes."""

    messages = [link.Gather(i, "x" * i * 50) for i in range(4)]
    sender = link.Frames(got.append, lambda: None)
    for message in messages[:2]:
        sender.send(message)  # before there is a connection

    async def main() -> None:
        sender.connection_made(Transport())
        for message in messages[2:]:
            sender.send(message)
        sender.close()

    asyncio.run(main())
    receiver = link.Frames(lambda content: got.append(link.decode_from_api(content)), lambda: None)
    for i in range(0, len(written), size):
        receiver.data_received(bytes(written[i : i + size]))
    assert got == messages


def test_a_look_into_the_engine_is_shown_to_the_process_that_asked() -> None:
    """Each API process numbers its own inspections, also a process that was started again."""
    heard: list[tuple[int, Any]] = []
    servers = object.__new__(ApiServers)  # no processes
    servers._members = [ApiProcess(index, None) for index in range(3)]  # type: ignore[arg-type]
    for member in servers._members:
        member.frames = SimpleNamespace(send=lambda message, index=member.index: heard.append((index, message.number)))  # type: ignore[assignment]
    snapshot = FakeCore().snapshot(0)
    servers._members[2].restarts.num = 4
    numbers = [1, 3, 5, servers._members[2].first_number(3)]
    assert numbers[3] > _NUMBERS
    for number in numbers:
        servers._handle(wire.Inspected(number, snapshot))
    assert heard == list(zip([1, 0, 2, 2], numbers, strict=True))


def test_the_url_is_told_once_all_processes_answer() -> None:
    """The kernel gives a connection to any of them. One that takes the place of another tells nothing."""
    servers = object.__new__(ApiServers)  # no processes
    servers._members = [ApiProcess(index, cast(Any, None)) for index in range(2)]
    told: list[int] = []
    servers._on_answering = lambda: told.append(len(heard))
    heard = []
    for index in (1, 1, 0, 1, 0):
        heard.append(index)
        servers._receive(servers._members[index], link.encode(link.Answering()))
    assert told == [3]


def test_the_url_is_told_after_the_server_began_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    async def startup(self: Any, sockets: Any = None) -> None:
        done.append("answers")

    monkeypatch.setattr("uvicorn.Server.startup", startup)
    http = _HttpServer(uvicorn.Config(cast(Any, None)), lambda: done.append("told"))
    asyncio.run(http.startup())
    assert done == ["answers", "told"]


def test_the_engine_hears_of_the_death_of_an_api_process() -> None:
    """The open requests of a dead process are aborted and have no owner from then on."""
    servers = object.__new__(ApiServers)  # no processes
    sent: list[Any] = []
    forgotten: list[int] = []
    started: list[ApiProcess] = []
    victim, other = servers._members = [ApiProcess(index, cast(Any, None), is_serving=True) for index in range(2)]
    victim.restarts.ready()
    victim.open, other.open = {"a/1", "b/3"}, {"c/2"}
    servers._owners = {"a/1": victim, "b/3": victim, "c/2": other}
    servers._supervisor = cast(Any, SimpleNamespace(send=sent.append))
    servers._counts = cast(Any, SimpleNamespace(forget=forgotten.append))
    servers._reports, servers._is_leaving, servers.failure = ReportGatherer(), False, None
    servers._start = started.append  # type: ignore[method-assign]
    closed: list[int] = []
    victim.frames = cast(Any, SimpleNamespace(close=lambda: closed.append(0)))
    servers._ended(victim, -9)
    assert sent == [wire.FinishRequests(["a/1", "b/3"])] and forgotten == [0] and started == [victim]
    assert servers._owners == {"c/2": other} and not victim.open and closed == [0] and victim.frames is None
    gave_up: list[wire.Failed] = []
    servers._give_up = gave_up.append  # type: ignore[method-assign]
    for _ in range(3):
        servers._ended(victim, -9)
    assert started == [victim] * 3 and "so often" in gave_up[0].message


def test_what_is_open_is_known_of_what_the_engine_has_only() -> None:
    """Requests that ended, were aborted, or were meant for a dead engine belong to no process."""
    servers = object.__new__(ApiServers)  # no processes
    sent: list[Any] = []
    heard: list[list[Any]] = [[], []]
    first, second = servers._members = [ApiProcess(index, cast(Any, None)) for index in range(2)]
    for member in servers._members:
        member.frames = cast(Any, SimpleNamespace(send=heard[member.index].append))
    servers._owners, servers.failure = {}, None
    servers._supervisor = cast(Any, SimpleNamespace(send=sent.append))
    servers._pulse = lambda: cast(Any, "pulse")  # type: ignore[method-assign]
    servers._ready = wire.Ready(CAPACITY)

    def ask(member: ApiProcess, request_id: str) -> None:
        spec = RequestSpec(request_id, array("I", [1]), RowSampling(), 4, arrival=0)
        servers._receive(member, link.encode(spec))

    for member, request_id in ((first, "a"), (second, "b"), (first, "c"), (second, "d")):
        ask(member, request_id)
    assert len(sent) == 4 and (first.open, second.open) == ({"a", "c"}, {"b", "d"})
    servers._receive(first, link.encode(wire.FinishRequests(["a"])))
    assert sent[4:] == [wire.FinishRequests(["a"])] and first.open == {"c"}
    stats = EngineStats(num_steps=5)
    updates = [wire.Update("a", [1]), wire.Update("b", [2], "stop"), wire.Update("c", [3]), wire.Update("d", [4])]
    servers._handle(wire.Outputs(updates, stats))
    assert heard == [[wire.Outputs([updates[2]], stats)], [wire.Outputs([updates[1], updates[3]], stats)]]
    assert servers._owners == {"c": first, "d": second} and second.open == {"d"}
    failure = wire.Failed("it has died")
    servers._lost(failure, True)
    assert [told[-2:] for told in heard] == [["pulse", link.Lost(failure, True)]] * 2
    ask(first, "e")
    assert not servers._owners and not first.open and not second.open and len(sent) == 5


def test_an_api_process_that_ends_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """This side closes the process's end of the link. With an open end, the end of the process would not be seen."""
    over = threading.Event()

    class Process:
        def __init__(self, *_: Any, pass_fds: tuple[int, ...], **__: Any) -> None:
            self.stdin, self.stderr = io.BytesIO(), None
            self._link = os.dup(pass_fds[1])

        def wait(self, seconds: float | None = None) -> int:
            over.wait(GUARD_S)
            os.close(self._link)
            return 0

    monkeypatch.setattr("weft.processes.child.Popen", Process)

    async def main() -> None:
        listener = socket.socket()
        servers = ApiServers(ServerSettings(), cast(Any, None), [listener], lambda *_: None, lambda: None)
        member = servers._members[0]

        def num_sockets() -> int:
            return connections_of(os.getpid())

        before = num_sockets()
        servers._start(member)
        while member.frames is not None and member.frames._transport is None:
            await asyncio.sleep(0.001)
        assert num_sockets() == before + 2, "one end here, one there"
        servers._is_leaving = True
        over.set()
        while num_sockets() != before:
            await asyncio.sleep(0.001)
        listener.close()

    asyncio.run(asyncio.wait_for(main(), GUARD_S))


def test_every_api_process_knows_the_figures_of_the_engine() -> None:
    """A process whose requests all wait and a process that replaces a dead process know the figures too. Otherwise the
    counters of ``/metrics`` would fall when a different process answers."""
    heard: list[list[Any]] = [[], [], []]
    servers = object.__new__(ApiServers)  # no processes
    servers._members = [ApiProcess(index, cast(Any, None), is_serving=index < 2) for index in range(3)]
    for member in servers._members:
        member.frames = cast(Any, SimpleNamespace(send=heard[member.index].append))
    servers._members[1].open = {"waits"}
    servers._stats, servers._has_opened = EngineStats(num_steps=5), True
    servers._controlled = wire.Controlled(1, is_sleeping=True, is_paused=False, weight_version=0, unavailable="asleep")
    servers._pulse = lambda: cast(Any, "pulse")  # type: ignore[method-assign]

    async def beat_once() -> None:
        beat = asyncio.create_task(servers._beat())
        await asyncio.sleep(0)
        beat.cancel()

    asyncio.run(beat_once())
    figures = wire.Outputs([], servers._stats)
    assert heard == [["pulse", figures], ["pulse", figures], ["pulse"]]
    servers._begins(servers._members[2])
    assert heard[2][1:] == [servers._controlled, figures, link.Open()]
