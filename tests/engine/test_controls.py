"""Commands of an administrator that arrive while others wait for the engine to rest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weft.engine import wire
from weft.engine.controls import Controls
from weft.errors import ConfigError


class FakeRollouts:
    """Notes what runs. The engine rests once ``is_busy`` is False."""

    version, unavailable, is_sleeping, has_lost_weights = 3, "", False, False

    def __init__(self) -> None:
        self.is_busy, self.is_paused = True, False
        self.ran: list[str] = []

    @property
    def is_quiet(self) -> bool:
        return self.is_paused and not self.is_busy

    def pause(self, mode: str) -> list[Any]:
        self.is_paused = True
        return []

    def resume(self) -> None:
        self.is_paused = False

    def update(self, command: Any, version: int | None) -> None:
        self.ran.append(command.folder)
        if command.folder == "broken":
            raise ConfigError("no such folder")


class Rig:
    def __init__(self) -> None:
        self.rollouts, self.answers = FakeRollouts(), list[wire.Controlled]()
        core: Any = SimpleNamespace(rollouts=self.rollouts)
        self.controls = Controls(core, self.answers.append, lambda changed: None, enables_sleep=True)

    def begin(self, number: int, action: str, **arguments: Any) -> None:
        self.controls.begin(wire.Control(number, action, "wait", arguments))

    def rest(self) -> None:
        self.rollouts.is_busy = False
        self.controls.poll()

    @property
    def answered(self) -> list[tuple[int, bool]]:
        return [(answer.number, answer.is_paused) for answer in self.answers]


@pytest.mark.parametrize("folders", [("one",), ("one", "two"), ("one", "broken"), ("broken", "one", "two")])
def test_the_engine_goes_on_after_the_last_of_several_updates(folders: tuple[str, ...]) -> None:
    rig = Rig()
    for number, folder in enumerate(folders):
        rig.begin(number, "load", folder=folder, version=None)
    rig.controls.poll()
    assert rig.rollouts.is_paused and not rig.answers, "the engine does not rest yet"
    rig.rest()
    assert rig.rollouts.ran == list(folders) and not rig.rollouts.is_paused
    assert [(a.number, bool(a.error)) for a in rig.answers] == [(i, f == "broken") for i, f in enumerate(folders)]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_pause_outlives_an_update_beside_it(is_first: bool) -> None:
    rig = Rig()
    for number, action in enumerate(("pause", "load") if is_first else ("load", "pause")):
        rig.begin(number, action, folder="one", version=None)
    rig.rest()
    assert rig.rollouts.is_paused and rig.rollouts.ran == ["one"]
    rig.begin(2, "resume")
    assert not rig.rollouts.is_paused and rig.answered[-1] == (2, False)


def test_resume_ends_a_pause_that_still_waits() -> None:
    rig = Rig()
    rig.begin(0, "pause")
    rig.begin(1, "resume")
    assert rig.answered == [(0, False), (1, False)] and not rig.rollouts.is_paused


def test_resume_lets_a_waiting_update_run() -> None:
    rig = Rig()
    rig.begin(0, "pause")
    rig.begin(1, "load", folder="one", version=None)
    rig.begin(2, "resume")
    assert rig.answered == [(0, True), (2, True)], "the engine is paused until the update has run"
    rig.rest()
    assert rig.rollouts.ran == ["one"] and rig.answered[-1] == (1, False)
