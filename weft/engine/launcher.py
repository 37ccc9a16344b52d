"""The handle of an engine that runs in another process.

Job: start the process with its settings, pass messages on, report its end, stop it. Owns: the child process, its
private directory and the server's side of its sockets. ``EngineHandle`` has what every engine elsewhere has in common.
Does not know: requests, HTTP.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from weft.engine import wire
from weft.engine.channel import Address, EngineStart, ServerChannel
from weft.processes.child import Child
from weft.processes.heartbeat import Pulse

logger = logging.getLogger(__name__)

ENGINE_MODULE = "weft.engine.process"

_FAILURE_TIMEOUT_S = 5.0
"""Seconds to wait for the ``Failed`` message of an engine that has exited, on a busy machine."""

_POLL_S = 0.5
"""Seconds between two looks at the process."""

GRACE_S = 10.0
"""Seconds that an engine has to exit after ``Shutdown`` before it is killed."""


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """The program of an engine process.

    Attributes:
        settings: the user's settings, keyword arguments of ``weft.config.resolve``.
        module: the module to run with ``python -m``.
        verbose: log decisions to stderr.
    """

    settings: dict[str, Any]
    module: str = ENGINE_MODULE
    verbose: bool = False
    log_json: bool = False

    def start(self, address: Address, heartbeat: str = "", parent_pid: int = 0) -> EngineStart:
        """Make the message that the process reads at its start."""
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in self.settings.items()}
        return EngineStart(address, heartbeat, parent_pid, settings, self.verbose, self.log_json)


class EngineHandle(ABC):
    """An engine that runs elsewhere, from its start to its end. Make it inside the running event loop.

    Args:
        on_message: called in the event loop with each message of the engine.
        on_exit: called in the event loop, once, with the exit status when the engine has ended (negative: a signal).
    """

    def __init__(self, on_message: Callable[[wire.FromEngine], None], on_exit: Callable[[int], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_exit = on_exit
        self._channel: ServerChannel | None = None
        self._has_failed = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    @abstractmethod
    def pid(self) -> int:
        """Process id of the engine on its machine; 0 if unknown so far."""

    @property
    @abstractmethod
    def silence_s(self) -> float:
        """Seconds since the engine's last sign of life; infinite before the first."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the engine at once."""

    def _open(self, where: Path | str) -> Address:
        """Make the channel (see ``ServerChannel``). Returns its address for the engine."""
        self._channel = ServerChannel(where)
        self._channel.receive(self._take)
        return self._channel.address

    def send(self, message: wire.ToEngine) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def _take(self, content: bytes) -> None:
        try:
            message = wire.decode_from_engine(content)
            self._handle(message)
        except Exception:
            # The engine's last messages are lost, so nothing may wait for them.
            logger.exception("a message of the engine could not be handled; the engine is ended")
            assert self._channel is not None
            self._channel.stop_reading()
            self.kill()
            return
        if isinstance(message, wire.Failed):
            self._has_failed.set()

    def _handle(self, message: wire.FromEngine) -> None:
        self._on_message(message)

    async def _finish(self, status: int) -> None:
        """Report the end of the engine, after reading the messages that it had sent."""
        if status == wire.FAILED_STATUS:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_failed.wait(), _FAILURE_TIMEOUT_S)
        else:
            await asyncio.sleep(0.05)  # messages may still be on their way through the socket
        if self._channel is not None:
            self._channel.close()
        self._ended.set()
        self._on_exit(status)

    async def stop(self, grace_s: float = GRACE_S) -> None:
        """Ask the engine to exit, kill it after ``grace_s`` seconds, and wait for its end."""
        if grace_s > 0 and not self._ended.is_set():
            self.send(wire.Shutdown())
        try:
            await asyncio.wait_for(self._ended.wait(), grace_s)
        except TimeoutError:
            self.kill()
            await self._ended.wait()


class EngineProcess(EngineHandle):
    """An engine process on this machine. Make it in the main thread.

    Args:
        on_message, on_exit: see ``EngineHandle``.
        environment: variables besides those of this process.
    """

    def __init__(
        self,
        command: EngineCommand,
        on_message: Callable[[wire.FromEngine], None],
        on_exit: Callable[[int], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(on_message, on_exit)
        self._directory = Path(tempfile.mkdtemp(prefix="weft-"))  # mode 0700
        heartbeat = self._directory / "heartbeat"
        self.pulse = Pulse(heartbeat)
        start = command.start(self._open(self._directory), str(heartbeat), os.getpid())
        self._child = Child(command.module, environment=environment)
        self._child.send(msgspec.msgpack.encode(start))
        self._child.on_exit(self._loop, self._end)
        self._watchdog = asyncio.create_task(self._poll())

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def silence_s(self) -> float:
        return self.pulse.silence_s

    def _handle(self, message: wire.FromEngine) -> None:
        if isinstance(message, wire.Ready):
            # Both sides have opened the sockets and the heartbeat, so the files can go: nothing is left behind.
            shutil.rmtree(self._directory, ignore_errors=True)
        self._on_message(message)

    async def _poll(self) -> None:
        while True:
            self.pulse.poll(self.pid)
            await asyncio.sleep(_POLL_S)

    def _end(self, status: int) -> None:
        self._watchdog.cancel()
        self._finishing = self._loop.create_task(self._finish(status))

    async def _finish(self, status: int) -> None:
        await super()._finish(status)
        shutil.rmtree(self._directory, ignore_errors=True)

    def kill(self) -> None:
        self._child.kill()
