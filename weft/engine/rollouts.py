"""Pauses, new weights and sleep between two steps of an engine, as a training loop needs them.

Job: bring the engine to rest, run a command on all ranks, drop what old weights computed, count versions. Owns: the
version, the pause, the requests that arrive during it. Does not know: text, HTTP, tensors' names.

An engine rests in one of three modes::

    wait    requests that are there run to their end; later ones are held back
    abort   requests that are there end with the tokens that they have
    keep    running requests wait with the tokens that they have; afterwards their caches are computed anew
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from weft.errors import ConfigError, UnavailableError
from weft.offload.keys import PageKeys
from weft.request import FinishReason, Request
from weft.runner.rollouts import Done, JoinGroup, LeaveGroup, Receive, Sleep, Update, WakeUp
from weft.runner.sleep import TAGS, Tag

if TYPE_CHECKING:
    from weft.cache.manager import Manager
    from weft.executor.executor import Executor
    from weft.scheduler.scheduler import Scheduler
    from weft.weights.sources import Source

PauseMode = Literal["wait", "abort", "keep"]
PAUSE_MODES: tuple[PauseMode, ...] = ("wait", "abort", "keep")


def checked_mode(mode: str) -> PauseMode:
    """Return a user's mode. Raises ConfigError for an unknown one."""
    if mode not in PAUSE_MODES:
        raise ConfigError(f"mode={mode!r} is not valid; allowed are 'wait', 'abort' and 'keep'")
    return mode


def check_version(version: object, current: int) -> None:
    """Raise ConfigError if the weights cannot get this version. Equal versions would hide an update."""
    if not isinstance(version, int) or isinstance(version, bool) or version <= current:
        raise ConfigError(f"weight_version={version!r} is not valid; give an integer above the present {current}")


class Core(Protocol):
    """The engine core, as far as a pause or an update needs it; see ``EngineCore``."""

    manager: Manager
    scheduler: Scheduler

    @property
    def executor(self) -> Executor: ...
    @property
    def requests(self) -> list[Request]: ...
    @property
    def has_work(self) -> bool: ...
    def enter(self, request: Request) -> None: ...
    def refuse(self, request: Request, why: str) -> None: ...
    def finish(self, request_id: str, reason: FinishReason, stop_reason: str | None = None) -> bool: ...
    def settle(self) -> list[Request]: ...
    def move_copies(self) -> list[Request]: ...


class Rollouts:
    """The pauses and updates of one engine.

    Attributes:
        version: version of the weights; 0 for those of the start.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._mode: PauseMode | None = None
        self._held: list[Request] = []
        self._lost = ""
        self._asleep: list[Tag] = []
        self._groups: set[str] = set()
        self.version = 0

    @property
    def unavailable(self) -> str:
        """The reason why no request can run; empty if requests can run."""
        if self._asleep:
            return f"the engine is asleep ({', '.join(self._asleep)} given back); call wake_up()"
        return self._lost

    @property
    def has_lost_weights(self) -> bool:
        """Whether an update must bring all weights."""
        return bool(self._lost)

    # -- pauses ----------------------------------------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        return self._mode is not None

    @property
    def is_still(self) -> bool:
        """Whether no step may be launched."""
        return self._mode in ("abort", "keep") or bool(self.unavailable)

    @property
    def is_quiet(self) -> bool:
        """Whether the engine rests, so that a command can run."""
        return self.is_paused and not self._core.has_work

    def pause(self, mode: PauseMode) -> list[Request]:
        """Begin a pause. The engine rests when ``is_quiet``; in mode "wait" this takes steps.

        Returns:
            The requests that got a token or ended.
        """
        core, scheduler = self._core, self._core.scheduler
        if mode == "wait":
            self._mode = self._mode or mode
            return []
        self._mode = mode
        changed = core.settle()
        if mode == "abort":
            changed += [request for request in core.requests if core.finish(request.request_id, "abort")]
        else:
            scheduler.preempt_all()
        restores = scheduler.restores
        while restores is not None and restores.needs_steps:
            restores.give_up()
            changed += core.move_copies()
        return changed

    def resume(self) -> None:
        """End the pause. The requests that arrived during it are added."""
        self._mode = None
        held, self._held = self._held, []
        for request in held:
            self._core.enter(request)

    def holds(self, request: Request) -> bool:
        """Whether a new request must not be added now. It is held back, or ends with an error."""
        request.note_version(self.version)
        if self.unavailable:
            self._core.refuse(request, self.unavailable)
            return True
        if self.is_paused:
            self._held.append(request)
        return self.is_paused

    def drop_held(self, request_id: str, reason: FinishReason, stop_reason: str | None) -> bool:
        """End a request that is held back. Returns False if there is none of this id."""
        request = next((r for r in self._held if r.request_id == request_id), None)
        if request is None:
            return False
        self._held.remove(request)
        request.end(reason, stop_reason)
        return True

    # -- updates ---------------------------------------------------------------------------------------------------

    def update(self, command: Update, tensors: Source | None = None, version: int | None = None) -> Done:
        """Update the weights of an engine that rests.

        Args:
            tensors: the tensors, if the command takes them from this process.
            version: version of the new weights; None: one more than the present.

        Raises:
            WeightsError: the update was refused or failed; the old weights are served on.
            UnavailableError: the weights are asleep, or the update failed in the middle and the old ones are lost.
        """
        assert self.is_quiet, "weights change between steps"
        if "weights" in self._asleep:
            raise UnavailableError("the weights are asleep; call wake_up(tags=['weights']) before an update")
        if isinstance(command, Receive):
            self.check_group(command.group)
        new = self.version + 1 if version is None else version
        check_version(new, self.version)
        self._forget()
        try:
            done = self._core.executor.command(command, tensors)
        except UnavailableError as error:
            self._lost = str(error)
            self._refuse_all([*self._core.requests, *self._held])
            raise
        self.version, self._lost = new, ""
        for request in (*self._core.requests, *self._held):
            request.note_version(new)
        return done

    def lose(self, version: int) -> None:
        """Note that the weights are those of the checkpoint, while clients know of those of ``version``."""
        self.version = version
        self._lost = (
            f"the engine was started again with the weights of its checkpoint, and weights of version {version} are "
            "expected; update all of them"
        )

    def join(self, group: JoinGroup) -> None:
        """Join a group through which weights will come. Raises ConfigError if its members do not meet."""
        if group.name in self._groups:
            raise ConfigError(f"there is a group {group.name!r} already; call destroy_weights_update_group first")
        self._core.executor.command(group)
        self._groups.add(group.name)

    def leave(self, name: str) -> None:
        """Leave a group."""
        self.check_group(name)
        self._core.executor.command(LeaveGroup(name))
        self._groups.remove(name)

    def check_group(self, name: str) -> None:
        """Raise ConfigError if there is no group of this name."""
        if name not in self._groups:
            raise ConfigError(f"there is no group {name!r}; call init_weights_update_group first")

    def _forget(self) -> None:
        """Drop everything that depends on the weights: prefixes and states in all tiers, and embeddings of images."""
        core = self._core
        scheduler, manager = core.scheduler, core.manager
        assert manager.reset(), "a request holds a lease at rest"
        if manager.tier is not None:
            # A later start with the old weights may find files of new ones, and must not know their names.
            scheduler_tier = scheduler.restores.tier if scheduler.restores is not None else None
            assert scheduler_tier is manager.tier
            scheduler_tier.keys = PageKeys(f"weights {uuid.uuid4().hex}", manager.spec.page_size)
        if scheduler.encoder is not None:
            scheduler.encoder.clear()

    def _refuse_all(self, requests: Iterable[Request]) -> None:
        """End requests that cannot go on. The next step returns them."""
        for request in requests:
            self._core.finish(request.request_id, "error", self.unavailable)
            self._core.refuse(request, self.unavailable)

    # -- sleep -----------------------------------------------------------------------------------------------------

    @property
    def is_sleeping(self) -> bool:
        return bool(self._asleep)

    def sleep(self, level: int) -> Done:
        """Give memory back while the engine rests. Level 1 keeps a copy of the weights on the host, level 2 none.

        Raises:
            ConfigError: the level is not valid.
            UnavailableError: the engine is asleep already.
            CapacityError: the host has no room for the copy. The engine stays awake.
        """
        assert self.is_quiet, "an engine falls asleep between steps"
        if level not in (1, 2):
            raise ConfigError(f"level={level!r} is not valid; allowed are 1 (keep weights on the host) and 2")
        if self._asleep:
            raise UnavailableError("the engine is asleep already; call wake_up()")
        self._forget()
        done = self._core.executor.command(Sleep(keeps_weights=level == 1 and not self._lost))
        self._asleep = list(TAGS)
        if level == 2:
            self._lost = "sleep(level=2) has dropped the weights; update all of them"
        return done

    def wake_up(self, tags: Sequence[str] | None) -> Done:
        """Get the memory of some tags back; None: of all that are asleep. Raises ConfigError for an unknown tag."""
        unknown = [tag for tag in tags or () if tag not in TAGS]
        if unknown:
            raise ConfigError(f"tags {unknown} are not valid; allowed are {list(TAGS)}")
        woken = [tag for tag in self._asleep if tags is None or tag in tags]
        done = self._core.executor.command(WakeUp(woken))
        self._asleep = [tag for tag in self._asleep if tag not in woken]
        return done
