"""Data parallelism: several engines with the interface of one, on one machine or on a Ray cluster.

Job: start the replicas, route requests, survive the death of a replica. Owns: the engines, and the map from requests to
replicas. Does not know: text, HTTP. To the server it looks like one ``EngineProcess``.

A drained replica gets no new requests, finishes its open requests, and exits. Started again, it runs the code and
settings that are installed by then.

When a replica dies, another process is started in its place. Its requests without a token so far start again on another
replica; the others end with an error. The whole set ends only when no replica is left and none can be started.

A replica whose weights are not those of the others gets no requests either; see ``replica_commands.py``.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import assert_never

from msgspec.structs import replace

from weft.config.parallelism import is_on_ray
from weft.engine import ray_cluster, wire
from weft.engine.gpus import devices_of_replica
from weft.engine.launcher import EngineCommand, EngineHandle, EngineProcess
from weft.engine.prefix_resets import PrefixResets
from weft.engine.ray_engine import RayEngine
from weft.engine.replica_commands import ReplicaCommands
from weft.engine.router import NoReplicaError, Router
from weft.engine.snapshot import ReplicaView, why_not_drain, why_not_start
from weft.multimodal.items import cache_token_ids
from weft.processes.child import Restarts
from weft.request import RequestSpec
from weft.stats import EngineStats, counters, merged

logger = logging.getLogger(__name__)

FROZEN_AFTER_S = 10.0
"""Seconds without a sign of life after which a replica is killed and replaced."""

PLACEMENT_PATIENCE_S = 60.0
"""Seconds that a starting server waits for room in a Ray cluster."""

_LOOK_S = 1.0
_DRAIN_LOOK_S = 0.05


@dataclass(slots=True)
class Member:
    """One replica: its process, and the latest messages of that process."""

    index: int
    process: EngineHandle | None = None
    capacity: wire.Capacity | None = None
    stats: EngineStats = field(default_factory=EngineStats)
    failed: wire.Failed | None = None
    restarts: Restarts = field(default_factory=Restarts)
    is_out: bool = False
    """Whether the replica has been drained, or is being drained."""
    is_behind: bool = False
    """Whether commands have left the replica in another state than the others."""

    @property
    def is_ready(self) -> bool:
        return self.process is not None and self.capacity is not None

    @property
    def state(self) -> str:
        if self.is_out:
            return "drained" if self.process is None else "draining"
        if self.process is None:
            return "down"
        return ("behind" if self.is_behind else "up") if self.is_ready else "starting"


@dataclass(slots=True)
class Open:
    """An open request: its replica, and the message to send again."""

    index: int
    message: RequestSpec
    is_seen: bool = False


class ReplicaSet:
    """``data_parallel_size`` engine processes; arguments and methods are those of ``EngineProcess``."""

    def __init__(
        self,
        command: EngineCommand,
        on_message: Callable[[wire.FromEngine], None],
        on_exit: Callable[[int], None],
    ) -> None:
        self._command, settings = command, command.settings
        self._on_message, self._on_exit = on_message, on_exit
        self.members = [Member(index) for index in range(settings.get("data_parallel_size") or 1)]
        self._on_ray = is_on_ray(settings)
        if self._on_ray:
            ray_cluster.check_installed()
        self._devices = (lambda index: {}) if self._on_ray else devices_of_replica(settings)
        self._router = Router(len(self.members), max_num_seqs=1)
        self._open: dict[str, Open] = {}
        self._resets = PrefixResets(lambda done: self._on_message(wire.PrefixCacheReset(done)))
        self._commands = ReplicaCommands(self._commanded, settings.get("tensor_parallel_size") or 1)
        self._draining: set[asyncio.Task[None]] = set()
        self._is_configured = self._is_ready = self._is_over = self._is_closing = False
        self._past = EngineStats()  # counters of replaced replicas, so that sums never fall
        for member in self.members:
            self._start(member)
        self._looker = asyncio.create_task(self._look())

    def _start(self, member: Member) -> None:
        self._past = merged([self._past, counters(member.stats)])
        member.capacity, member.failed, member.stats = None, None, EngineStats()
        member.process = self._launch(
            member, lambda message: self._handle(member, message), lambda status: self._ended(member, status)
        )

    def _launch(
        self, member: Member, on_message: Callable[[wire.FromEngine], None], ended: Callable[[int], None]
    ) -> EngineHandle:
        if not self._on_ray:
            return EngineProcess(self._command, on_message, ended, self._devices(member.index))
        patience_s = None if self._is_ready else PLACEMENT_PATIENCE_S  # a restarted replica waits for its turn
        return RayEngine(self._command, on_message, ended, patience_s)

    def send(self, message: wire.ToEngine) -> None:
        match message:
            case RequestSpec():
                self._route(message)
            case wire.FinishRequests():
                self._finish(message)
            case wire.Inspect():
                asked = self.members if message.replica is None else [self.members[message.replica]]
                ready = next((m for m in asked if m.is_ready), None)
                if ready is not None and ready.process is not None:
                    ready.process.send(message)
            case wire.DrainReplica():
                self._obey(message, why_not_drain, self._drain)
            case wire.StartReplica():
                self._obey(message, why_not_start, self._restart)
            case wire.ResetPrefixCache():
                self._reset_prefix_cache(message)
            case wire.Control():
                for index, command in self._commands.ask(message).items():
                    self._process(index).send(command)
            case wire.Shutdown():
                for member in self.members:
                    if member.process is not None:
                        member.process.send(message)
            case _:
                assert_never(message)

    def _route(self, message: RequestSpec) -> None:
        try:
            prompt = message.prompt_token_ids
            keys = cache_token_ids(prompt, message.media) if message.media else prompt
            index = self._router.choose(keys, message.cache_salt)
        except NoReplicaError:
            why = self._commands.unavailable or "no replica takes requests now; try again"
            self._forward([wire.Update(message.request_id, [], "unavailable", why)])
            return
        self._open[message.request_id] = Open(index, message)
        self._process(index).send(message)

    def _process(self, index: int) -> EngineHandle:
        process = self.members[index].process
        assert process is not None, "a replica that is up has a process"
        return process

    def _finish(self, message: wire.FinishRequests) -> None:
        by_replica: dict[int, list[str]] = {}
        for request_id in message.request_ids:
            entry = self._open.pop(request_id, None)
            if entry is not None:
                self._router.ended(entry.index)
                by_replica.setdefault(entry.index, []).append(request_id)
        for index, request_ids in by_replica.items():
            process = self.members[index].process
            if process is not None:
                process.send(wire.FinishRequests(request_ids, message.reason))

    def _reset_prefix_cache(self, message: wire.ResetPrefixCache) -> None:
        """Reset all replicas or none: nothing changes while one has requests. A starting replica has nothing cached."""
        asked = [] if self._open else [m for m in self.members if m.is_ready]
        for member in asked:
            assert member.process is not None
            member.process.send(message)
            self._router.reset(member.index)
        self._resets.ask([m.index for m in asked], done=not self._open)

    def _handle(self, member: Member, message: wire.FromEngine) -> None:
        match message:
            case wire.Outputs():
                self._take(member, message)
            case wire.CachedPrefixes():
                self._router.refresh(member.index, message.hashes, message.below, message.price)
            case wire.Ready():
                self._became_ready(member, message.capacity)
            case wire.Failed():
                member.failed = message
            case wire.Stage():
                self._on_message(replace(message, name=f"replica {member.index} {message.name}"))
            case wire.Configured():
                if not self._is_configured:
                    self._is_configured = True
                    self._on_message(message)
            case wire.Inspected():
                self._on_message(replace(message, replica=member.index))
            case wire.PrefixCacheReset():
                self._resets.answered(member.index, message.done)
            case wire.Controlled():
                self._commands.answered(member.index, message)
            case _:
                assert_never(message)

    def _take(self, member: Member, outputs: wire.Outputs) -> None:
        member.stats = outputs.stats
        for update in outputs.updates:
            entry = self._open.get(update.request_id)
            if entry is None:
                continue
            entry.is_seen |= bool(update.token_ids)
            if update.finish_reason is not None:
                del self._open[update.request_id]
                self._router.ended(entry.index)
        self._forward(outputs.updates)

    def _forward(self, updates: list[wire.Update]) -> None:
        if self._is_ready:
            self._on_message(wire.Outputs(updates, merged([self._past, *(m.stats for m in self.members)])))

    def _became_ready(self, member: Member, capacity: wire.Capacity) -> None:
        member.capacity = capacity
        member.restarts.ready()
        member.stats = EngineStats(num_free_pages=capacity.num_pages, num_free_slots=capacity.num_slots)
        self._router.max_num_seqs = capacity.max_num_seqs
        self._router.up(member.index)
        self._commands.started(member.index)
        self._admit(member)
        known = [m.capacity for m in self.members if m.capacity is not None]
        if self._is_ready or len(known) < len(self.members):
            return
        self._is_ready = True
        total = wire.Capacity(
            max_model_len=min(c.max_model_len for c in known),
            max_num_seqs=sum(c.max_num_seqs for c in known),
            num_pages=sum(c.num_pages for c in known),
            page_size=capacity.page_size,
            num_slots=sum(c.num_slots for c in known),
        )
        self._on_message(wire.Ready(total))

    def _admit(self, member: Member) -> None:
        """Route requests to a running replica if its state is that of the set."""
        member.is_behind = member.index not in self._commands.agreeing
        if member.is_behind:
            logger.warning("replica %d gets no requests: its weights or its sleep differ from others", member.index)
            self._router.down(member.index)
        else:
            self._router.readmit(member.index)

    def _commanded(self, answer: wire.Controlled) -> None:
        """Pass on the answer to a command, which may have left replicas in different states."""
        for member in self.members:
            if member.is_ready and not member.is_out:
                self._admit(member)
        self._on_message(answer)

    def views(self) -> list[ReplicaView]:
        """The state of each replica."""
        names = [name for name in ReplicaView.__struct_fields__ if name in EngineStats.__struct_fields__]
        return [
            ReplicaView(
                replica=m.index,
                state=m.state,
                pid=m.process.pid if m.process is not None else 0,
                num_open=self._router.replicas[m.index].num_open,
                max_num_seqs=m.capacity.max_num_seqs if m.capacity is not None else 0,
                num_restarts=m.restarts.num,
                **{name: getattr(m.stats, name) for name in names},
            )
            for m in self.members
        ]

    def _obey(
        self,
        message: wire.DrainReplica | wire.StartReplica,
        why_not: Callable[[list[ReplicaView], int], str | None],
        act: Callable[[Member], None],
    ) -> None:
        refusal = why_not(self.views(), message.replica)
        if refusal is None:
            act(self.members[message.replica])
        else:
            logger.error("%s", refusal)

    def _drain(self, member: Member) -> None:
        logger.info("replica %d is drained; it has %d open", member.index, self._router.replicas[member.index].num_open)
        member.is_out = True
        self._router.down(member.index)
        self._draining.add(task := asyncio.create_task(self._end_when_idle(member.index, self._process(member.index))))
        task.add_done_callback(self._draining.discard)

    async def _end_when_idle(self, index: int, process: EngineHandle) -> None:
        """Shut ``process`` down when it is idle. It may be replaced meanwhile, if it dies."""
        while any(entry.index == index for entry in self._open.values()):
            await asyncio.sleep(_DRAIN_LOOK_S)
        await process.stop()

    def _restart(self, member: Member) -> None:
        member.is_out, member.restarts = False, Restarts(member.restarts.num)
        self._start(member)

    @property
    def silence_s(self) -> float:
        """Seconds since the last sign of life of any replica, since the set lives as long as one replica does."""
        return min((m.process.silence_s for m in self.members if m.process is not None), default=float("inf"))

    @property
    def pid(self) -> int:
        return next((m.process.pid for m in self.members if m.process is not None), 0)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            for member in self.members:
                if member.is_ready and member.process is not None and member.process.silence_s > FROZEN_AFTER_S:
                    logger.error("replica %d has given no sign of life for %.0f s", member.index, FROZEN_AFTER_S)
                    member.process.kill()

    def _ended(self, member: Member, status: int) -> None:
        """Handle the end of a replica's process."""
        member.process = member.capacity = None
        member.stats = replace(member.stats, num_running=0, num_waiting=0)
        self._router.down(member.index)
        self._resets.died(member.index)
        self._commands.died(member.index)
        if self._is_closing or self._is_over:
            return
        if member.is_out:
            logger.info("replica %d has been drained", member.index)
            self._move_requests(member.index)  # a drained replica has no requests, unless it died before
            return
        if not self._is_ready:  # an error of the settings would end every replica
            self._give_up(member, status)
            return
        words = member.failed.message if member.failed is not None else f"status {status}"
        logger.error("replica %d has died (%s)", member.index, words)
        if member.restarts.allowed():
            self._start(member)
        elif all(m.process is None for m in self.members):
            self._give_up(member, status)
        self._move_requests(member.index)

    def _move_requests(self, index: int) -> None:
        """Restart the requests of a dead replica elsewhere, or end them."""
        lost = [entry for entry in self._open.values() if entry.index == index]
        failed: list[wire.Update] = []
        for entry in lost:
            del self._open[entry.message.request_id]
            self._router.ended(index)
            if entry.is_seen:
                failed.append(wire.Update(entry.message.request_id, [], finish_reason="error"))
            else:
                self._route(entry.message)
        if failed:
            self._forward(failed)

    def _give_up(self, member: Member, status: int) -> None:
        self._is_over = True
        self._looker.cancel()
        if member.failed is not None:
            self._on_message(member.failed)
        self.kill()
        self._on_exit(status)

    async def stop(self, grace_s: float = 10.0) -> None:
        """Stop all replicas at once, as ``EngineProcess.stop``."""
        self._is_closing = True
        self._looker.cancel()
        running = [m.process for m in self.members if m.process is not None]
        await asyncio.gather(*(process.stop(grace_s) for process in running))
        if not self._is_over:
            self._is_over = True
            self._on_exit(0)

    def kill(self) -> None:
        self._is_ready = False  # the first death ends the set
        for member in self.members:
            if member.process is not None:
                member.process.kill()
