"""Supervision of a server's engine: one process or a set of replicas, restarted after a death.

Does not know: requests, tokenizers, HTTP.
"""

import logging
from collections.abc import Callable
from typing import Protocol

from weft.config.parallelism import is_on_ray
from weft.engine import wire
from weft.engine.launcher import EngineCommand, EngineProcess
from weft.engine.replicas import ReplicaSet
from weft.engine.snapshot import ReplicaView
from weft.processes.child import Restarts, describe_exit

logger = logging.getLogger(__name__)

OnMessage = Callable[[wire.FromEngine], None]
OnLost = Callable[[wire.Failed, bool], None]
"""Called with the reason of the engine's end, and with whether another one is started."""


class EngineClient(Protocol):
    """The interface of an engine for a server. The engine may belong to another process."""

    @property
    def num_restarts(self) -> int:
        """Number of engines started after a death."""

    @property
    def pid(self) -> int | None:
        """Process id of the engine, or of the first replica."""

    @property
    def silence_s(self) -> float:
        """Seconds since the engine's last sign of life."""

    @property
    def replicas(self) -> list[ReplicaView] | None:
        """Figures of each replica; None if there is one engine."""

    def listen(self, on_message: OnMessage, on_lost: OnLost) -> None:
        """Set the callbacks for messages, and for an unasked end. Call it before ``start``."""

    def start(self) -> None: ...
    def send(self, message: wire.ToEngine) -> None: ...
    def fail(self, failure: wire.Failed) -> None:
        """End the engine, which the server cannot use for this reason, and start no other engine."""

    def no_restart(self) -> None:
        """Start no other engine from now on."""

    async def stop(self, grace_s: float) -> None: ...


class EngineSupervisor:
    """The engine processes of this process.

    Args:
        restarts: start another engine after a death.
    """

    def __init__(self, command: EngineCommand, *, restarts: bool = False) -> None:
        self._command = command
        self._on_message: OnMessage = lambda message: None
        self._on_lost: OnLost = lambda failure, is_restarting: None
        self._may_restart = restarts
        self._process: EngineProcess | ReplicaSet | None = None
        self._failed: wire.Failed | None = None
        self._restarts = Restarts()
        self._weight_version = 0
        self._is_stopping = False

    def listen(self, on_message: OnMessage, on_lost: OnLost) -> None:
        self._on_message, self._on_lost = on_message, on_lost

    def start(self) -> None:
        self._failed, settings = None, self._command.settings
        many = (settings.get("data_parallel_size") or 1) > 1 or is_on_ray(settings)
        self._process = (ReplicaSet if many else EngineProcess)(self._command, self._handle, self._on_exit)

    @property
    def num_restarts(self) -> int:
        return self._restarts.num

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def silence_s(self) -> float:
        return self._process.silence_s if self._process is not None else float("inf")

    @property
    def replicas(self) -> list[ReplicaView] | None:
        return self._process.views() if isinstance(self._process, ReplicaSet) else None

    def send(self, message: wire.ToEngine) -> None:
        assert self._process is not None, "nothing was started"
        self._process.send(message)

    def fail(self, failure: wire.Failed) -> None:
        self._failed, self._may_restart = failure, False
        if self._process is not None:
            self._process.kill()

    def no_restart(self) -> None:
        self._may_restart = False

    async def stop(self, grace_s: float) -> None:
        """Stop the engine. Nobody is told of its end."""
        self._is_stopping = True
        if self._process is not None:
            await self._process.stop(grace_s)

    def _handle(self, message: wire.FromEngine) -> None:
        if isinstance(message, wire.Failed):
            self._failed = message
            return
        if isinstance(message, wire.Controlled):
            self._weight_version = max(self._weight_version, message.weight_version)
        if isinstance(message, wire.Ready):
            self._restarts.ready()
            if self._weight_version:  # of the engine before this one; requests come after this command
                self.send(wire.Control(-1, "lose", "keep", {"version": self._weight_version}))
        self._on_message(message)

    def _on_exit(self, status: int) -> None:
        if self._is_stopping:
            return
        failure = self._failed or wire.Failed(f"the engine process ended unexpectedly ({describe_exit(status)})")
        if not (self._may_restart and self._restarts.allowed()):
            self._on_lost(failure, False)
            return
        logger.error("%s; another one is started", failure.message)
        self._on_lost(failure, True)
        self.start()
