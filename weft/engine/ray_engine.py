"""An engine on a machine of a Ray cluster, with the interface of ``EngineProcess``.

Job: find room for the engine, start it in an actor, notice its end. Owns: the placement group, the actor, the server's
side of the sockets. Does not know: Ray's interface (``ray_cluster.py``), requests.

Messages do not pass through Ray: the engine connects to the server's sockets over TCP (``channel.py``). Ray carries the
start message, the heartbeats, and the report of the end. An engine whose connection breaks exits, since messages are
lost.
"""

import asyncio
import contextlib
import logging
import math
import signal
import time
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from weft.engine import ray_cluster, wire
from weft.engine.launcher import EngineCommand, EngineHandle
from weft.errors import WeftError
from weft.request import RequestSpec


class ClockOffset:
    """The difference between the other machine's ``time.monotonic()`` and this one's, in seconds."""

    def __init__(self) -> None:
        self._low, self._high = -math.inf, math.inf

    def note(self, asked: float, theirs: float, answered: float) -> None:
        """Note that the other clock showed ``theirs`` at some moment between ``asked`` and ``answered`` of this
        clock."""
        low, high = max(self._low, asked - theirs), min(self._high, answered - theirs)
        if low > high:  # the clocks have drifted apart since the last note
            low, high = asked - theirs, answered - theirs
        self._low, self._high = low, high

    @property
    def seconds(self) -> float:
        """Seconds to add to the other clock; 0.0 if both may be the same clock, and before the first note."""
        return 0.0 if self._low <= 0.0 <= self._high else (self._low + self._high) / 2


logger = logging.getLogger(__name__)

_BEAT_S = 0.5
"""Seconds between two heartbeat calls."""

_SLACK_S = 20.0
"""Seconds without an answer to a heartbeat call before the engine counts as silent."""


class RayEngine(EngineHandle):
    """An engine in a Ray actor.

    Args:
        on_message, on_exit: see ``EngineHandle``.
        patience_s: seconds to wait for room in the cluster; None: without a limit.
    """

    def __init__(
        self,
        command: EngineCommand,
        on_message: Callable[[wire.FromEngine], None],
        on_exit: Callable[[int], None],
        patience_s: float | None = None,
    ) -> None:
        super().__init__(on_message, on_exit)
        self._command, self._patience_s = command, patience_s
        self._actor: Any = None
        self._pid = 0
        self._reported_silence_s, self._reported_at = 0.0, time.monotonic()
        self._clock = ClockOffset()
        self._life = asyncio.create_task(self._live())

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def silence_s(self) -> float:
        return self._reported_silence_s + max(0.0, time.monotonic() - self._reported_at - _SLACK_S)

    def kill(self) -> None:
        if self._actor is None:
            self._life.cancel()
        else:
            ray_cluster.kill_actor(self._actor)

    async def _live(self) -> None:
        """Run the engine, from the search for room to its end."""
        group, status = None, -signal.SIGKILL
        try:
            began = time.monotonic()
            await asyncio.to_thread(ray_cluster.connect)
            ray_cluster.keep_signals()
            bundle = ray_cluster.bundle_of(self._command.settings)
            group = await ray_cluster.reserve(bundle, self._patience_s)
            self._on_message(wire.Stage("placed", time.monotonic() - began, "by Ray"))
            self._actor = ray_cluster.start_actor(group, bundle)
            status = await self._run()
        except asyncio.CancelledError:
            pass  # killed before the actor existed
        except WeftError as error:
            status = wire.FAILED_STATUS
            self._on_message(wire.failure(error))
            self._has_failed.set()
        except Exception as error:  # the actor or its machine is gone
            logger.error("an engine on the Ray cluster has gone: %s", str(error).strip().replace("\n", " "))
        await self._finish(status)
        if self._actor is not None:
            ray_cluster.kill_actor(self._actor)
        if group is not None:
            ray_cluster.release(group)

    async def _run(self) -> int:
        """Wait for the engine's exit status. Raises Ray's error if the actor ends first."""
        address = self._open(await asyncio.to_thread(ray_cluster.this_address))
        ended = self._actor.run.remote(msgspec.msgpack.encode(self._command.start(address)), self._command.module)
        beats = asyncio.create_task(self._ask())
        try:
            return await ended
        finally:
            beats.cancel()

    async def _ask(self) -> None:
        """Ask for heartbeats until an error, which means that the actor has ended and so ends ``_run``."""
        with contextlib.suppress(Exception):
            while True:
                asked = time.monotonic()
                self._pid, silence_s, theirs = await self._actor.beat.remote()
                self._reported_silence_s, self._reported_at = silence_s, time.monotonic()
                self._clock.note(asked, theirs, self._reported_at)
                await asyncio.sleep(_BEAT_S)

    def send(self, message: wire.ToEngine) -> None:
        offset = self._clock.seconds
        if offset and isinstance(message, RequestSpec):
            message = replace(message, arrival_time=message.arrival_time - offset)
        super().send(message)

    def _handle(self, message: wire.FromEngine) -> None:
        offset = self._clock.seconds
        if offset and isinstance(message, wire.Outputs):
            message = replace(message, updates=[wire.moved(update, offset) for update in message.updates])
        elif offset and isinstance(message, wire.Inspected):
            message = replace(message, snapshot=replace(message.snapshot, now=message.snapshot.now + offset))
        self._on_message(message)
