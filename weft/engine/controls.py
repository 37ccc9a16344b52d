"""The commands of a server's administrator, carried out in the engine's loop.

Job: begin a pause, run the command once the engine rests, answer. Owns: the commands that wait for the engine to rest.
Does not know: HTTP, ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from weft.engine import wire
from weft.engine.rollouts import checked_mode
from weft.errors import ConfigError, EngineDeadError, WeftError
from weft.runner.rollouts import JoinGroup, LoadFiles, OpenHandles, Receive

if TYPE_CHECKING:
    from weft.engine.rollouts import Rollouts
    from weft.request import Request


class ControlledCore(Protocol):
    """The engine core, as far as commands need it."""

    @property
    def rollouts(self) -> Rollouts: ...


class Controls:
    """The commands of one engine.

    Args:
        send: sends an answer.
        changed: takes requests that got a token or ended because of a pause.
        enables_sleep: whether the engine was made with ``enable_sleep_mode``.
    """

    def __init__(
        self,
        core: ControlledCore,
        send: Callable[[wire.Controlled], None],
        changed: Callable[[list[Request]], None],
        *,
        enables_sleep: bool,
    ) -> None:
        self._core, self._send, self._changed, self._enables_sleep = core, send, changed, enables_sleep
        self._waiting: deque[wire.Control] = deque()
        self._stays_paused = False  # by "pause"; other commands pause the engine until the last of them has run

    def begin(self, command: wire.Control) -> None:
        """Take a command. It runs in ``poll``, once the engine rests."""
        try:
            mode = checked_mode(command.mode)
            if command.action in ("sleep", "wake_up") and not self._enables_sleep:
                raise ConfigError("the engine was started without --enable-sleep-mode")
        except WeftError as error:
            self._answer(command, error)
            return
        if command.action == "resume":
            self._resume()
        elif command.action not in ("wake_up", "state", "lose"):
            self._stays_paused |= command.action == "pause"
            self._changed(self._core.rollouts.pause(mode))
            self._waiting.append(command)
            return
        self._run(command)

    def _resume(self) -> None:
        """End the pause, at once or after the commands that wait for the engine to rest."""
        self._stays_paused = False
        pauses = [command for command in self._waiting if command.action == "pause"]
        self._waiting = deque(command for command in self._waiting if command.action != "pause")
        if not self._waiting:
            self._core.rollouts.resume()
        for command in pauses:
            self._answer(command)

    def poll(self) -> None:
        """Run the commands that waited for the engine to rest."""
        while self._waiting and self._core.rollouts.is_quiet:
            command = self._waiting.popleft()
            ends_pause = not (self._waiting or self._stays_paused)
            self._run(command, ends_pause=ends_pause)

    def _run(self, command: wire.Control, *, ends_pause: bool = False) -> None:
        failure: WeftError | None = None
        try:
            self._act(command)
        except EngineDeadError:
            raise
        except WeftError as error:
            failure = error
        except msgspec.ValidationError as error:
            failure = ConfigError(str(error))
        if ends_pause:
            self._core.rollouts.resume()
        self._answer(command, failure)

    def _act(self, command: wire.Control) -> None:
        rollouts, given = self._core.rollouts, command.arguments
        complete = {"complete": rollouts.has_lost_weights or given.get("complete", False)}
        match command.action:
            case "sleep":
                rollouts.sleep(given["level"])
            case "wake_up":
                rollouts.wake_up(given["tags"])
            case "load":
                rollouts.update(LoadFiles(given["folder"], **complete), version=given["version"])
            case "open":
                handles = msgspec.convert({"descriptions": given["descriptions"]} | complete, OpenHandles)
                rollouts.update(handles, version=given["version"])
            case "receive":
                fields = {name: given[name] for name in ("group", "names", "dtypes", "shapes")}
                rollouts.update(msgspec.convert(fields | complete, Receive), version=given["version"])
            case "join":
                rollouts.join(msgspec.convert(given, JoinGroup))
            case "lose":
                rollouts.lose(given["version"])
            case "leave":
                rollouts.leave(given["name"])

    def _answer(self, command: wire.Control, error: WeftError | None = None) -> None:
        rollouts = self._core.rollouts
        self._send(
            wire.Controlled(
                command.number,
                is_sleeping=rollouts.is_sleeping,
                is_paused=rollouts.is_paused,
                weight_version=rollouts.version,
                unavailable=rollouts.unavailable,
                error=str(error) if error is not None else "",
            )
        )
