"""Several API processes before one engine, as the main process sees them.

Job: start API processes, carry messages between API processes and the engine, replace a process that died, and drain
all processes. Owns: the API processes, and which process has which request. Does not know: HTTP, texts, metrics.

When an API process dies, its open requests are aborted, and later messages of the engine about these requests are
dropped. Other API processes do not notice.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from mmap import mmap

import msgspec

from weft.engine import wire
from weft.engine.launcher import GRACE_S
from weft.engine.supervisor import EngineSupervisor
from weft.processes.child import Child, Restarts, describe_exit
from weft.request import RequestSpec
from weft.server import api_link as link
from weft.server.admission import OpenCounts
from weft.server.process_reports import ReportGatherer
from weft.server.service import describe
from weft.server.settings import ServerSettings
from weft.stats import EngineStats

logger = logging.getLogger(__name__)

MODULE = "weft.server.api_process"

_PULSE_S = 0.5
_LEAVE_S = 10.0
"""How long API processes get to leave once all is done, or the engine has died."""

_NUMBERS = 1 << 40
"""Every life of a process has this many numbers, so one that is started again uses none a second time."""


@dataclass(slots=True)
class ApiProcess:
    """One API process with its link and its open requests."""

    index: int
    listener: socket.socket
    process: Child | None = None
    frames: link.Frames | None = None
    connecting: asyncio.Task[object] | None = None
    open: set[str] = field(default_factory=set)
    is_answering: bool = False
    is_serving: bool = False
    restarts: Restarts = field(default_factory=Restarts)

    def first_number(self, num_processes: int) -> int:
        """The first number of its messages. Numbers rise by ``num_processes``."""
        return self.index + self.restarts.num * _NUMBERS * num_processes

    def send(self, message: link.ToApi) -> None:
        if self.frames is not None:
            self.frames.send(message)


class ApiServers:
    """All of them.

    Args:
        supervisor: of the engine.
        listeners: one socket for each.
        report_stage: called with stages of the start.
        on_answering: called once all of them answer calls.
        verbose: they log what they decide.

    Attributes:
        ended: set when the server is over; ``failure`` then says why, or is None.
    """

    def __init__(
        self,
        settings: ServerSettings,
        supervisor: EngineSupervisor,
        listeners: list[socket.socket],
        report_stage: Callable[[str, float, str], None],
        on_answering: Callable[[], None],
        *,
        verbose: bool = False,
    ) -> None:
        self._settings, self._supervisor, self._verbose = settings, supervisor, verbose
        self._report_stage, self._on_answering = report_stage, on_answering
        self._members = [ApiProcess(index, listener) for index, listener in enumerate(listeners)]
        self._owners: dict[str, ApiProcess] = {}
        self._reports = ReportGatherer()
        self._counts_fd = os.memfd_create("weft open completions")
        os.ftruncate(self._counts_fd, 8 * len(listeners))
        self._counts = OpenCounts(mmap(self._counts_fd, 8 * len(listeners)))
        self._stats = EngineStats()
        self._configured: wire.Configured | None = None
        self._ready: wire.Ready | None = None
        self._controlled: wire.Controlled | None = None
        self._began = time.monotonic()
        self._has_opened = self._is_leaving = False
        self.ended = asyncio.Event()
        self.failure: wire.Failed | None = None

    @property
    def num_open(self) -> int:
        return self._counts.total

    async def run(self) -> None:
        """Run the API processes until they are stopped."""
        self._supervisor.listen(self._handle, self._lost)
        self._supervisor.start()
        for member in self._members:
            self._start(member)
        pulse = asyncio.create_task(self._beat())
        await self.ended.wait()
        self._is_leaving = True
        await self._wait_for_all(_LEAVE_S if self.failure is not None else 0.0)
        pulse.cancel()
        await self._supervisor.stop(GRACE_S if self.failure is None else 0.0)

    async def drain(self) -> None:
        """Let the processes finish their open calls, accept no new calls, and exit."""
        self._is_leaving = True
        self._supervisor.no_restart()
        self._broadcast(link.Drain())
        await self._wait_for_all(self._settings.drain_timeout_s + _LEAVE_S)
        self.ended.set()

    async def _wait_for_all(self, limit_s: float) -> None:
        """Wait until every process has exited, and kill those that run after ``limit_s``."""
        deadline = time.monotonic() + limit_s
        while any(member.process is not None for member in self._members) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for member in self._members:
            if member.process is not None:
                member.process.kill()

    def _start(self, member: ApiProcess) -> None:
        ours, theirs = socket.socketpair()
        descriptors = (member.listener.fileno(), theirs.fileno(), self._counts_fd)
        first_number, is_another = member.first_number(len(self._members)), member.restarts.num > 0
        start = link.ApiStart(
            self._settings, member.index, first_number, os.getpid(), *descriptors, is_another, self._verbose
        )
        member.process = Child(MODULE, pass_fds=descriptors)
        theirs.close()
        member.process.send(msgspec.msgpack.encode(start))
        member.frames = link.Frames(lambda content: self._receive(member, content), lambda: None)
        loop, frames = asyncio.get_running_loop(), member.frames
        member.connecting = loop.create_task(loop.create_connection(lambda: frames, sock=ours))
        member.process.on_exit(loop, lambda status: self._ended(member, status))
        for known in (self._configured, self._ready):
            if known is not None:
                member.send(known)

    def _ended(self, member: ApiProcess, status: int) -> None:
        """An API process is gone: the engine need not work for it any more."""
        member.is_serving, member.process = False, None
        if member.frames is not None:
            member.frames.close()
            member.frames = None
        self._counts.forget(member.index)
        self._reports.retire(member.index)
        lost = sorted(member.open)
        member.open.clear()
        for request_id in lost:
            del self._owners[request_id]
        if self._is_leaving or self.failure is not None:
            return
        if lost:
            self._supervisor.send(wire.FinishRequests(lost))
        message = f"API process {member.index} ended unexpectedly ({describe_exit(status)})"
        if not member.restarts.allowed():
            self._give_up(wire.Failed(f"{message}, so often that no other one is started"))
            return
        logger.error("%s, and %d open completions with it; another one is started", message, len(lost))
        self._start(member)

    def _give_up(self, failure: wire.Failed) -> None:
        if self.failure is None:
            self.failure = failure
            self._broadcast(link.Lost(failure, False))
            self.ended.set()

    async def _beat(self) -> None:
        """Send the state of the engine and its figures to all processes, also to those whose requests wait."""
        while True:
            self._broadcast(self._pulse())
            for member in self._members:
                if member.is_serving:
                    member.send(wire.Outputs([], self._stats))
            await asyncio.sleep(_PULSE_S)

    def _pulse(self) -> link.Pulse:
        silence_s, supervisor = self._supervisor.silence_s, self._supervisor
        known = None if silence_s == float("inf") else silence_s
        return link.Pulse(known, supervisor.pid, supervisor.num_restarts, supervisor.replicas)

    def _broadcast(self, message: link.ToApi) -> None:
        for member in self._members:
            member.send(message)

    def _handle(self, message: wire.FromEngine) -> None:
        match message:
            case wire.Outputs():
                self._stats = message.stats
                self._spread(message)
            case wire.Inspected():  # each process has numbers of its own, also after another one has died
                self._members[message.number % len(self._members)].send(message)
            case wire.Controlled():  # every process refuses requests while none can run
                self._controlled = message
                for member in self._members:
                    if member.is_serving:
                        member.send(message)
            case wire.Configured():
                self._configured = message
                self._broadcast(message)
            case wire.Ready():
                self._ready = message
                self._broadcast(message)
            case wire.Stage():
                self._report_stage(message.name, message.seconds, message.note)

    def _spread(self, outputs: wire.Outputs) -> None:
        """To each process what is its."""
        shares: dict[int, list[wire.Update]] = {}
        for update in outputs.updates:
            owner = self._owners.get(update.request_id)
            if owner is None:
                continue  # its process has gone, or does not want it any more
            shares.setdefault(owner.index, []).append(update)
            if update.finish_reason is not None:
                self._forget(update.request_id)
        for index, updates in shares.items():
            self._members[index].send(wire.Outputs(updates, outputs.stats))

    def _forget(self, request_id: str) -> None:
        owner = self._owners.pop(request_id, None)
        if owner is not None:
            owner.open.discard(request_id)

    def _lost(self, failure: wire.Failed, is_restarting: bool) -> None:
        """The engine has died."""
        self._broadcast(self._pulse())
        self._ready, self._controlled, self._stats = None, None, EngineStats()
        for request_id in list(self._owners):
            self._forget(request_id)
        if is_restarting:
            self._broadcast(link.Lost(failure, True))
        else:
            self._give_up(failure)

    def _receive(self, member: ApiProcess, content: bytes) -> None:
        message = link.decode_from_api(content)
        match message:
            case RequestSpec():
                if self._ready is not None:  # else it was meant for an engine that has died
                    self._owners[message.request_id] = member
                    member.open.add(message.request_id)
                    self._supervisor.send(message)
            case wire.FinishRequests():
                for request_id in message.request_ids:
                    self._forget(request_id)
                self._supervisor.send(message)
            case wire.Inspect() | wire.DrainReplica() | wire.StartReplica() | wire.Control():
                self._supervisor.send(message)
            case link.Answering():
                self._answers(member)
            case link.Serving():
                self._begins(member)
            case link.Unfit():
                self._supervisor.fail(message.failure)
            case link.Gather():
                asked = [m.index for m in self._members if m.is_serving or m is member]
                for index, report in self._reports.ask(member.index, message, asked, self._gathered):
                    self._members[index].send(report)
            case link.Reported():
                self._reports.reported(member.index, message)

    def _gathered(self, index: int, message: link.Gathered) -> None:
        self._members[index].send(message)

    def _answers(self, member: ApiProcess) -> None:
        if not member.is_answering:  # not another one, after a death
            member.is_answering = True
            if all(m.is_answering for m in self._members):
                self._on_answering()

    def _begins(self, member: ApiProcess) -> None:
        member.is_serving = True
        member.restarts.ready()
        if self._controlled is not None:
            member.send(self._controlled)
        if self._has_opened:
            member.send(wire.Outputs([], self._stats))  # before it is asked for metrics
            member.send(link.Open())
        elif all(m.is_serving for m in self._members) and self._ready is not None:
            self._has_opened = True
            self._broadcast(link.Open())
            note = f"{len(self._members)} API processes; {describe(self._ready.capacity)}"
            self._report_stage("ready", time.monotonic() - self._began, note)
