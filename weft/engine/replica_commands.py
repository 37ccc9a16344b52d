"""Commands of an administrator to several replicas, with one answer for all of them.

Job: make each replica's command, gather the answers, tell which replicas agree. Owns: the state that all replicas must
have. Does not know: processes, requests, routing.

Every replica that runs carries out a command. The state of those that succeeded is the state of the set from then on. A
replica in another state is out: it gets no requests, until a later command brings it to the state of the set. A replica
that starts after an update has the checkpoint's weights, so it is out, too. An update for a replica with older weights
must bring all weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from weft.engine import wire

_AT_START = wire.Controlled(0, is_sleeping=False, is_paused=False, weight_version=0)


@dataclass(slots=True)
class _Pending:
    """A command without an answer so far. ``waiting``: replicas that have not answered."""

    asked: Sequence[int]
    waiting: set[int]
    errors: dict[int, str] = field(default_factory=dict)


class ReplicaCommands:
    """The commands of one set of replicas.

    Args:
        answer: takes the answer to a command, after ``agreeing`` has changed.
        num_ranks: ranks of each replica.

    Attributes:
        agreeing: running replicas in the state of the set.
    """

    def __init__(self, answer: Callable[[wire.Controlled], None], num_ranks: int = 1) -> None:
        self._answer, self._num_ranks = answer, num_ranks
        self._state = _AT_START
        self._states: dict[int, wire.Controlled] = {}  # the last answer of each running replica
        self._pending: dict[int, _Pending] = {}
        self._newest = 0  # version of the last update that was sent
        self._told = ""  # the reason in the last answer why no request can run
        self.agreeing: set[int] = set()

    def started(self, replica: int) -> None:
        """Note that a replica runs, with the weights of its checkpoint."""
        self._states[replica] = _AT_START
        if not self._pending and _agree(self._state, _AT_START):
            self.agreeing.add(replica)
        self._tell()

    def died(self, replica: int) -> None:
        """Note that a replica has ended. Commands no longer wait for it."""
        self._states.pop(replica, None)
        self.agreeing.discard(replica)
        for number, pending in list(self._pending.items()):
            if replica in pending.waiting:
                self._note(number, replica, "its process has ended")
        self._tell()

    @property
    def unavailable(self) -> str:
        """The reason why no replica can run a request; empty if one can."""
        if self.agreeing:
            return self._state.unavailable
        if not self._states:
            return "no replica runs; try again when one was started"
        version = self._state.weight_version
        wanted = f"weights of version {version}; update all of them" if version else "the state that commands left"
        return f"no replica has {wanted}"

    def _tell(self) -> None:
        """Tell unasked that requests can run again, or that none can."""
        if self.unavailable != self._told:
            self._say(-1)

    def _say(self, number: int, error: str = "", replicas_out: dict[int, str] | None = None) -> None:
        """Answer the command of this number with the state of the set."""
        self._told = self.unavailable
        given = {"unavailable": self._told, "error": error, "replicas_out": replicas_out or {}}
        self._answer(replace(self._state, number=number, **given))

    def ask(self, command: wire.Control) -> dict[int, wire.Control]:
        """Begin a command. Returns what to send to each replica; nothing if the command is refused."""
        replicas, arguments = sorted(self._states), command.arguments
        refusal = self._refusal(command, len(replicas))
        if refusal:
            self._say(command.number, refusal)
            return {}
        self._pending[command.number] = _Pending(replicas, set(replicas))
        match command.action:
            case "load" | "open" | "receive":
                version = self._newest + 1 if arguments["version"] is None else arguments["version"]
                self._newest = max(self._newest, version)
                own = [{"version": version, "complete": self._is_older(replica)} for replica in replicas]
            case "join":
                first = arguments["rank_offset"]
                own = [{"rank_offset": first + i * self._num_ranks} for i in range(len(replicas))]
            case _:
                own = [{} for _ in replicas]
        shares = zip(replicas, own, strict=True)
        return {replica: replace(command, arguments=arguments | given) for replica, given in shares}

    def _refusal(self, command: wire.Control, num_replicas: int) -> str:
        """The reason why no replica gets a command; empty if all get it."""
        if not num_replicas:
            return "no replica is up; try again later"
        needed = num_replicas * self._num_ranks
        if command.action == "join" and command.arguments["rank_offset"] + needed > command.arguments["world_size"]:
            return (
                f"rank_offset={command.arguments['rank_offset']} and world_size={command.arguments['world_size']} "
                f"leave no room for {num_replicas} replicas with {self._num_ranks} ranks each"
            )
        return ""

    def _is_older(self, replica: int) -> bool:
        return self._states[replica].weight_version < self._state.weight_version

    def answered(self, replica: int, message: wire.Controlled) -> None:
        """Note a replica's answer."""
        self._states[replica] = message
        self._note(message.number, replica, message.error)

    def _note(self, number: int, replica: int, error: str) -> None:
        pending = self._pending[number]
        pending.waiting.remove(replica)
        if error:
            pending.errors[replica] = error
        if not pending.waiting:
            del self._pending[number]
            self._conclude(number, pending)

    def _conclude(self, number: int, pending: _Pending) -> None:
        """Find the state of the set and the replicas that have it, and answer.

        While other commands run, replicas differ for a while, so all stay in but those that failed alone.
        """
        self._state = self._next_state(pending.errors)
        if not self._pending:
            self._newest = self._state.weight_version
            self.agreeing = {replica for replica, state in self._states.items() if _agree(state, self._state)}
        elif len(pending.errors) < len(pending.asked):
            self.agreeing -= pending.errors.keys()
        out = {
            replica: pending.errors.get(replica) or f"it is behind, with weights of version {state.weight_version}"
            for replica, state in sorted({**dict.fromkeys(pending.asked, _AT_START), **self._states}.items())
            if replica not in self.agreeing
        }
        errors = [why for replica, why in pending.errors.items() if replica in self.agreeing or not self.agreeing]
        self._say(number, errors[0] if errors else "", out)

    def _next_state(self, errors: dict[int, str]) -> wire.Controlled:
        """The newest weights count first, then success, then the state that replicas had in common before."""
        best = max(
            self._states,
            key=lambda replica: (
                self._states[replica].weight_version,
                replica not in errors,
                replica in self.agreeing,
                not self._states[replica].unavailable,
            ),
            default=None,
        )
        return self._state if best is None or self._is_older(best) else self._states[best]


def _agree(one: wire.Controlled, other: wire.Controlled) -> bool:
    """Whether two answers tell of the same state."""
    states = {(s.is_sleeping, s.is_paused, s.weight_version, bool(s.unavailable)) for s in (one, other)}
    return len(states) == 1
