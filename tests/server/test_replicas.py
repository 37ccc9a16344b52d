"""Several engines behind one server: requests are spread, and survive the death of a replica."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from array import array
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest
from msgspec import structs

from tests.media import item
from tests.server.fake_engine import CAPACITY, SLOW
from tests.server.running import RunningServer, is_alive, wait_until
from tests.whole import takes_long
from weft.engine import gpus, wire
from weft.engine.launcher import EngineCommand
from weft.engine.prefix_resets import PrefixResets
from weft.engine.replica_commands import ReplicaCommands
from weft.engine.replicas import Member, Open, ReplicaSet
from weft.engine.router import Router
from weft.errors import ConfigError
from weft.messages import RowSampling
from weft.processes.child import Restarts
from weft.request import RequestSpec
from weft.stats import EngineStats, merged

GUARD_S = 60.0
MODULE = "tests.server.fake_engine"


class Server:
    """Hears what the set says."""

    def __init__(self, count: int = 2, module: str = MODULE, **settings: Any) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.others: list[wire.FromEngine] = []
        self.status: int | None = None
        self.stats = wire.EngineStats()
        given = {"data_parallel_size": count, "device": "cpu"} | settings
        self.set = ReplicaSet(EngineCommand(given, module), self.hear, self.exited)

    def hear(self, message: wire.FromEngine) -> None:
        if not isinstance(message, wire.Outputs):
            self.others.append(message)
            return
        self.stats = message.stats
        for update in message.updates:
            self.tokens.setdefault(update.request_id, []).extend(update.token_ids)
            if update.finish_reason is not None:
                self.ends[update.request_id] = update.finish_reason

    def exited(self, status: int) -> None:
        self.status = status

    @property
    def capacity(self) -> wire.Capacity | None:
        return next((m.capacity for m in self.others if isinstance(m, wire.Ready)), None)

    def ask(self, request_id: str, prompt: list[int], count: int = 3, priority: int = 0) -> int:
        """Send a request. Returns the replica that got it."""
        sampling = RowSampling(temperature=0.0)
        self.set.send(RequestSpec(request_id, array("I", prompt), sampling, count, priority=priority))
        return self.set._open[request_id].index

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + GUARD_S
        while not condition():
            assert time.monotonic() < deadline, "what was waited for did not come about"
            await asyncio.sleep(0.02)


def serve(body: Callable[[Server], Awaitable[None]], **settings: Any) -> Server:
    """Run ``body`` on a set that is ready; end it afterwards."""

    async def main() -> Server:
        server = Server(**settings)
        try:
            await server.until(lambda: server.capacity is not None)
            await body(server)
        finally:
            await server.set.stop(grace_s=5.0)
        return server

    return asyncio.run(main())


def test_requests_are_spread_and_answered() -> None:
    async def body(server: Server) -> None:
        assert server.capacity is not None and server.capacity.max_num_seqs == 2 * CAPACITY.max_num_seqs
        places = [server.ask(f"r{i}", [100 + i, 7, 8]) for i in range(4)]
        assert sorted(places) == [0, 0, 1, 1]
        await server.until(lambda: len(server.ends) == 4)
        assert server.tokens == {f"r{i}": [100 + i, 7, 8] for i in range(4)}
        assert {m.num_open for m in server.set._router.replicas} == {0}
        server.ask("endless", [1, 2], count=1000, priority=SLOW)
        server.set.send(wire.FinishRequests(["endless"]))
        assert not server.set._open
        await server.until(lambda: all(replica.reported for replica in server.set._router.replicas))
        server.set.send(wire.ResetPrefixCache())
        await server.until(lambda: wire.PrefixCacheReset(True) in server.others)

    server = serve(body)
    assert server.status == 0 and isinstance(server.others[0], wire.Configured)
    assert sum(isinstance(m, wire.Ready) for m in server.others) == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=takes_long)])
def test_a_replica_dies_or_freezes(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without a seen token start anew elsewhere, the rest end with an error. The replica comes back."""
    monkeypatch.setattr("weft.engine.replicas.FROZEN_AFTER_S", 2.0)

    async def body(server: Server) -> None:
        seen = server.ask("seen", [5] * 100, count=4000, priority=SLOW)
        other = server.ask("other", [6] * 100, count=4000, priority=SLOW)
        assert {seen, other} == {0, 1}
        await server.until(lambda: bool(server.tokens.get("seen")) and bool(server.tokens.get("other")))
        victim = server.set.members[seen].process
        assert victim is not None
        os.kill(victim.pid, signal.SIGSTOP)
        unseen = server.ask("unseen", [5] * 100)
        assert unseen == seen, "its prompt is cached there"
        if number == signal.SIGKILL:
            os.kill(victim.pid, signal.SIGKILL)
        await server.until(lambda: "unseen" in server.ends and "seen" in server.ends)
        assert server.ends == {"seen": "error", "unseen": "length"} and server.tokens["unseen"] == [5] * 3
        length = len(server.tokens["other"])
        await server.until(lambda: len(server.tokens["other"]) > length)
        await server.until(lambda: server.set.members[seen].is_ready)
        assert server.set.members[seen].restarts.num == 1 and server.status is None
        server.set.send(wire.FinishRequests(["other"]))
        server.ask("later", [9] * 5)
        await server.until(lambda: "later" in server.ends)

    serve(body)


@takes_long
def test_a_replica_is_drained_and_started_without_losing_a_request() -> None:
    async def body(server: Server) -> None:
        states = lambda: [view.state for view in server.set.views()]  # noqa: E731
        asked = [f"r{i}" for i in range(6)]
        places = [server.ask(name, [50 + i] * 9, count=30, priority=SLOW) for i, name in enumerate(asked)]
        assert set(places) == {0, 1}
        first = server.set.members[1].process
        server.set.send(wire.DrainReplica(1))
        assert states() == ["up", "draining"] and server.set.views()[1].num_open == 3
        assert [server.ask(f"later{i}", [90 + i] * 9) for i in range(4)] == [0] * 4
        server.set.send(wire.DrainReplica(0))  # refused: it is the last one
        server.set.send(wire.StartReplica(1))  # refused: it is still there
        assert states() == ["up", "draining"]
        await server.until(lambda: states() == ["up", "drained"] and len(server.ends) == 10)
        assert set(server.ends.values()) == {"length"} and all(len(server.tokens[name]) == 30 for name in asked)
        assert server.set.views()[1].pid == 0 and first is not None and not is_alive(first.pid)
        server.set.send(wire.StartReplica(1))
        assert states() == ["up", "starting"]
        await server.until(lambda: states() == ["up", "up"])
        assert server.set.members[1].restarts.num == 0
        server.ask("busy", [1] * 9, count=4000, priority=SLOW)
        assert server.ask("new", [9] * 5) == 1
        await server.until(lambda: "new" in server.ends)
        server.set.send(wire.FinishRequests(["busy"]))

    serve(body)


@takes_long
def test_replicas_over_http() -> None:
    running = RunningServer("--dp", "2", "--device", "cpu", "--admin-key", "boss")
    try:
        running.wait_ready()
        boss = {"Authorization": "Bearer boss"}

        def states() -> list[str]:
            return [replica["state"] for replica in running.client.get("/replicas").json()["replicas"]]

        post = running.client.post

        def look(**params: str) -> Any:
            return running.client.get("/inspect", params=params, headers=boss).json()

        assert running.chat("for one of them").status_code == 200
        looks = [look(replica=str(index)) for index in range(2)]
        assert [view["replica"] for view in looks] == [0, 1] and look()["replica"] == 0
        steps = [view["totals"]["num_steps"] for view in looks]
        assert min(steps) == 0 < max(steps), "each shows its own"
        for wrong in ("2", "-1", "x"):
            assert "there is no replica" in look(replica=wrong)["error"]["message"]
        assert states() == ["up", "up"] and post("/replicas/0/drain").status_code == 403
        assert post("/replicas/2/drain", headers=boss).status_code == 404
        assert post("/replicas/1/start", headers=boss).status_code == 409
        assert post("/replicas/0/drain", headers=boss).status_code == 202
        wait_until(lambda: states() == ["drained", "up"], GUARD_S)
        assert "the only one that is up" in post("/replicas/1/drain", headers=boss).json()["error"]["message"]
        assert running.chat("still there").status_code == 200
        metrics = running.client.get("/metrics").text
        assert 'replica="0"} 0.0' in next(m for m in metrics.splitlines() if m.startswith("weft:replica_up{"))
        looked = look()
        assert [replica["state"] for replica in looked["replicas"]] == ["drained", "up"] and looked["replica"] == 1
        assert "replica 0 is drained" in look(replica="0")["error"]["message"]
        assert post("/replicas/0/start", headers=boss).status_code == 202
        wait_until(lambda: states() == ["up", "up"], GUARD_S)
    finally:
        running.close()


@takes_long
def test_what_keeps_a_replica_from_starting_ends_all() -> None:
    async def main() -> Server:
        server = Server(model="/nowhere/at/all")
        await server.until(lambda: server.status is not None)
        await server.set.stop(grace_s=0.0)
        return server

    server = asyncio.run(main())
    assert server.status == wire.FAILED_STATUS
    assert any(isinstance(m, wire.Failed) and "/nowhere" in m.message for m in server.others)


def test_statistics_are_sums() -> None:
    one = EngineStats(num_running=2, num_free_pages=5, num_decode_tokens=4, steps_by_mode={"FULL": 3})
    two = EngineStats(num_running=1, num_free_pages=7, num_decode_tokens=1, steps_by_mode={"FULL": 1, "NONE": 2})
    total = merged([one, two])
    assert (total.num_running, total.num_free_pages) == (3, 12)
    assert total.steps_by_mode == {"FULL": 4, "NONE": 2} and total.num_decode_tokens == 5


def test_gpus_are_dealt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,2")
    deal = gpus.devices_of_replica({"data_parallel_size": 2, "tensor_parallel_size": 2})
    assert [deal(i)["CUDA_VISIBLE_DEVICES"] for i in range(2)] == ["4,5", "6,7"]
    with pytest.raises(ConfigError, match="data_parallel_size=3 with tensor_parallel_size=2 needs 6 GPUs, there are 5"):
        gpus.devices_of_replica({"data_parallel_size": 3, "tensor_parallel_size": 2})
    assert gpus.devices_of_replica({"data_parallel_size": 3, "device": "cpu"})(1) == {}


def test_replicas_need_the_server() -> None:
    from weft import LLM

    with pytest.raises(ConfigError, match="data_parallel_size=2: replicas stand behind `weft serve`"):
        LLM(data_parallel_size=2)


def test_the_set_takes_what_every_replica_takes() -> None:
    """Replicas may find different amounts of free memory."""
    told: list[wire.FromEngine] = []
    replicas = object.__new__(ReplicaSet)  # no processes
    replicas.members, replicas._router = [Member(0), Member(1)], Router(2, max_num_seqs=1)
    replicas._on_message, replicas._is_ready = told.append, False
    replicas._commands = ReplicaCommands(replicas._commanded)
    for member, length, seqs, pages in zip(replicas.members, (4096, 1024), (8, 6), (100, 40), strict=True):
        assert not told
        capacity = wire.Capacity(max_model_len=length, max_num_seqs=seqs, num_pages=pages, page_size=16, num_slots=3)
        replicas._became_ready(member, capacity)
    total = wire.Capacity(max_model_len=1024, max_num_seqs=14, num_pages=140, page_size=16, num_slots=6)
    assert told == [wire.Ready(total)]


class _Recorder:
    """Stands for a replica's process."""

    pid, silence_s = 1, 0.0

    def __init__(self) -> None:
        self.sent: list[wire.ToEngine] = []

    def send(self, message: wire.ToEngine) -> None:
        self.sent.append(message)

    async def stop(self, grace_s: float = 10.0) -> None:
        self.sent.append(wire.Shutdown())

    def kill(self) -> None:
        pass


def replicas_without_processes(count: int) -> tuple[ReplicaSet, list[_Recorder], list[wire.FromEngine]]:
    """All of them up."""
    told: list[wire.FromEngine] = []
    replicas = object.__new__(ReplicaSet)
    processes = [_Recorder() for _ in range(count)]
    replicas.members = [Member(i, cast(Any, process), CAPACITY) for i, process in enumerate(processes)]
    replicas._router, replicas._open, replicas._draining = Router(count, max_num_seqs=1), {}, set()
    replicas._commands = ReplicaCommands(replicas._commanded)
    for index in range(count):
        replicas._router.up(index)
        replicas._commands.started(index)
    replicas._on_message, replicas._is_ready = told.append, True
    replicas._resets = PrefixResets(lambda done: told.append(wire.PrefixCacheReset(done)))
    replicas._is_closing = replicas._is_over = False
    replicas._past = EngineStats()
    return replicas, processes, told


SPEC = RequestSpec("new", array("I", [1, 2, 3]), RowSampling(temperature=0.0), 1)
REACHES: list[tuple[wire.ToEngine, list[int]]] = [
    (SPEC, [0]),  # 1 and 2 are busy
    (wire.FinishRequests(["at 2"]), [2]),
    (wire.FinishRequests(["at 1", "at 2"], "stop"), [1, 2]),
    (wire.Inspect(1), [0]),
    (wire.Inspect(1, replica=2), [2]),
    (wire.ResetPrefixCache(), [0, 1, 2]),
    (wire.DrainReplica(1), [1]),
    (wire.StartReplica(1), []),  # it is up; test_a_replica_is_drained_and_started has the rest
    (wire.Control(1, "state"), [0, 1, 2]),
    (wire.Shutdown(), [0, 1, 2]),
]


@pytest.mark.parametrize(("message", "reached"), REACHES, ids=[type(message).__name__ for message, _ in REACHES])
def test_every_kind_of_message_reaches_its_replicas(message: wire.ToEngine, reached: list[int]) -> None:
    assert {type(kind) for kind, _ in REACHES} == set(get_args(wire.ToEngine))

    async def body() -> None:
        replicas, processes, _ = replicas_without_processes(3)
        if not isinstance(message, wire.DrainReplica | wire.ResetPrefixCache):
            for index in (1, 2):
                replicas._open[f"at {index}"] = Open(index, SPEC)
                replicas._router.replicas[index].num_open = 1
        replicas.send(message)
        for task in list(replicas._draining):
            await task
        assert [index for index, process in enumerate(processes) if process.sent] == reached
        assert all(len(process.sent) <= 1 for process in processes)

    asyncio.run(body())


def test_an_image_goes_where_it_is_cached() -> None:
    """Its placeholders are those of every other image."""
    replicas, processes, _ = replicas_without_processes(2)
    images = [item("image", (1, 16, 32), seed, [(0, 128)]) for seed in range(2)]
    for turn in range(2):
        for index, image in reversed([*enumerate(images)]) if turn else enumerate(images):
            prompt = {"prompt_token_ids": [9] * 128, "media": [image]}
            replicas.send(structs.replace(SPEC, request_id=f"{turn} {index}", **prompt))
        replicas.send(wire.FinishRequests([f"{turn} {index}" for index in range(2)]))
    sent = [[spec.request_id for spec in process.sent if isinstance(spec, RequestSpec)] for process in processes]
    assert sent == [["0 0", "1 0"], ["0 1", "1 1"]]


def test_the_end_of_a_request_reaches_its_replica_and_frees_its_place() -> None:
    replicas, processes, _ = replicas_without_processes(2)
    for name in ("at 0", "at 1"):
        replicas.send(structs.replace(SPEC, request_id=name))
    assert [view.num_open for view in replicas.views()] == [1, 1]
    replicas.send(wire.FinishRequests(["at 0", "at 1"], "stop"))
    assert [process.sent[-1] for process in processes] == [wire.FinishRequests([f"at {i}"], "stop") for i in range(2)]
    assert [view.num_open for view in replicas.views()] == [0, 0]


def test_a_salted_prompt_goes_where_it_is_cached_under_its_salt() -> None:
    replicas, processes, _ = replicas_without_processes(2)
    replicas._router.max_num_seqs = 8
    prompt = array("I", [9] * 640)
    for name in ("a", "b", "a again", "b again"):
        replicas.send(structs.replace(SPEC, request_id=name, prompt_token_ids=prompt, cache_salt=name[0]))
        if name == "b":
            replicas.send(wire.FinishRequests(["a", "b"]))
    sent = [[spec.request_id for spec in process.sent if isinstance(spec, RequestSpec)] for process in processes]
    assert sent == [["a", "a again"], ["b", "b again"]]


def test_a_replica_that_is_started_again_has_done_nothing_yet() -> None:
    """But how often it was is kept, also where it was drained meanwhile."""
    replicas, processes, told = replicas_without_processes(2)
    replicas._launch = lambda member, *callbacks: cast(Any, processes[member.index])  # type: ignore[method-assign]
    member = replicas.members[0]
    member.stats, member.restarts = EngineStats(num_running=3, num_steps=7, steps_by_mode={"FULL": 7}), Restarts(num=1)
    replicas.members[1].stats = EngineStats(num_free_pages=5, num_steps=2, steps_by_mode={"NONE": 2})
    replicas._ended(member, -9)
    replicas._forward([])
    total = EngineStats(num_free_pages=5, num_steps=9, steps_by_mode={"FULL": 7, "NONE": 2})
    assert isinstance(told[-1], wire.Outputs) and told[-1].stats == total, "what was counted stays counted"
    member.stats = EngineStats(num_steps=1, steps_by_mode={"FULL": 1})
    replicas._forward([])
    assert told[-1].stats.num_steps == 10 and told[-1].stats.steps_by_mode["FULL"] == 8
    member.is_out = True
    replicas._ended(member, 0)
    replicas.send(wire.StartReplica(0))
    assert [(view.state, view.num_restarts) for view in replicas.views()] == [("starting", 2), ("up", 0)]


def test_all_replicas_forget_their_prefixes_or_none() -> None:
    """One answer for each question, in order; a replica that dies has forgotten everything."""
    replicas, processes, told = replicas_without_processes(2)
    first, second = replicas.members
    replicas._router.refresh(0, [5])
    replicas.send(wire.ResetPrefixCache())
    assert not replicas._router.replicas[0].reported
    replicas._handle(first, wire.PrefixCacheReset(True))
    replicas._open["busy"] = Open(0, SPEC)
    replicas.send(wire.ResetPrefixCache())
    assert not told and [len(process.sent) for process in processes] == [1, 1], "nobody is asked while one is busy"
    replicas._handle(second, wire.PrefixCacheReset(True))
    assert told == [wire.PrefixCacheReset(True), wire.PrefixCacheReset(False)]
    replicas._open.clear()
    told.clear()
    replicas.send(wire.ResetPrefixCache())
    replicas._handle(second, wire.PrefixCacheReset(False))
    replicas.members[0].is_out = True  # no other one is started in its place
    replicas._ended(first, -9)
    assert told == [wire.PrefixCacheReset(False)]


def test_a_replica_with_old_weights_gets_no_requests() -> None:
    """One of two replicas refuses an update. The replica keeps its open requests, but gets no new requests until it
    accepts a later update."""
    replicas, processes, told = replicas_without_processes(2)
    told_versions = iter(range(1, 9))

    def update(*versions: int) -> wire.Controlled:
        number = next(told_versions)
        replicas.send(wire.Control(number, "load", arguments={"folder": "x", "version": None}))
        for member, version in zip(replicas.members, versions, strict=True):
            error = "" if version == number else "refused"
            replicas._handle(member, wire.Controlled(number, False, False, version, error=error))
        assert isinstance(told[-1], wire.Controlled)
        return told[-1]

    for name in ("at 0", "at 1"):
        replicas.send(structs.replace(SPEC, request_id=name))
    answer = update(1, 0)
    assert not answer.error and answer.weight_version == 1 and answer.replicas_out == {1: "refused"}
    assert [(view.state, view.num_open) for view in replicas.views()] == [("up", 1), ("behind", 1)]
    replicas.send(structs.replace(SPEC, request_id="later"))
    assert replicas._open["later"].index == 0
    assert not update(2, 2).replicas_out
    assert [(view.state, view.num_open) for view in replicas.views()] == [("up", 2), ("up", 1)]
    replicas._launch = lambda member, *callbacks: cast(Any, processes[member.index])  # type: ignore[method-assign]
    replicas.members[0].is_out = True
    replicas._ended(replicas.members[0], 0)
    replicas.send(wire.StartReplica(0))
    replicas._handle(replicas.members[0], wire.Ready(CAPACITY))
    assert [view.state for view in replicas.views()] == ["behind", "up"], "it has the checkpoint's weights"
    assert not update(3, 3).replicas_out and [view.state for view in replicas.views()] == ["up", "up"]


def test_requests_end_as_unavailable_while_no_replica_takes_any() -> None:
    """The server is told before, and again when one takes requests."""
    replicas, processes, told = replicas_without_processes(2)
    replicas._launch = lambda member, *callbacks: cast(Any, processes[member.index])  # type: ignore[method-assign]
    replicas.send(structs.replace(SPEC, request_id="open"))
    for member in replicas.members:
        member.restarts.ready()
        replicas._ended(member, -9)
    replicas.send(structs.replace(SPEC, request_id="later"))
    (state, *outputs) = told
    assert isinstance(state, wire.Controlled) and "no replica runs" in state.unavailable
    updates = [update for each in outputs if isinstance(each, wire.Outputs) for update in each.updates]
    assert [(u.request_id, u.finish_reason, u.stop_reason) for u in updates] == [
        (name, "unavailable", state.unavailable) for name in ("open", "later")
    ]
    replicas._handle(replicas.members[0], wire.Ready(CAPACITY))
    assert isinstance(told[-1], wire.Controlled) and not told[-1].unavailable


def test_a_set_that_is_killed_starts_no_replica() -> None:
    """The set is killed, for example, if the server cannot load the tokenizer of engines that run already."""
    replicas, _, _ = replicas_without_processes(2)
    exits: list[int] = []
    replicas._on_exit, replicas._looker = exits.append, cast(Any, SimpleNamespace(cancel=lambda: None))
    replicas._launch = lambda member, *callbacks: pytest.fail("a replica was started")  # type: ignore[method-assign]
    for member in replicas.members:
        member.restarts.ready()
    replicas.kill()
    for member in replicas.members:
        replicas._ended(member, -9)
    assert exits == [-9]


def test_a_dead_replica_has_nothing_open() -> None:
    replicas, processes, _ = replicas_without_processes(2)
    for i in range(4):
        replicas.send(structs.replace(SPEC, request_id=f"r{i}"))
    assert [view.num_open for view in replicas.views()] == [2, 2]
    replicas.members[0].is_out = True  # no other one is started in its place
    replicas.members[0].stats = EngineStats(num_running=1, num_waiting=1, num_steps=5)
    replicas._ended(replicas.members[0], -9)
    assert [view.num_open for view in replicas.views()] == [0, 4] and len(processes[1].sent) == 4
    assert replicas.members[0].stats == EngineStats(num_steps=5)


def test_a_drain_does_not_end_the_process_that_is_started_after_it() -> None:
    async def body() -> None:
        replicas, _, _ = replicas_without_processes(2)
        replicas._launch = lambda member, *callbacks: cast(Any, started)  # type: ignore[method-assign]
        started = _Recorder()
        replicas.send(SPEC)
        replicas.send(wire.DrainReplica(0))
        (task,) = replicas._draining
        await asyncio.sleep(0)
        replicas._ended(replicas.members[0], -9)
        replicas.send(wire.StartReplica(0))
        await task
        assert not started.sent

    asyncio.run(body())
