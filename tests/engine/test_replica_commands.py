"""One answer of several replicas to a command, whatever each of them does."""

from __future__ import annotations

from typing import Any

import pytest

from weft.engine import wire
from weft.engine.replica_commands import ReplicaCommands


class Replicas:
    """Replicas that answer as told."""

    def __init__(self, count: int = 2, num_ranks: int = 1) -> None:
        self.answers: list[wire.Controlled] = []
        self.commands = ReplicaCommands(self.answers.append, num_ranks)
        self.number = 0
        for replica in range(count):
            self.commands.started(replica)

    def ask(self, action: str, **arguments: Any) -> dict[int, wire.Control]:
        self.number += 1
        return self.commands.ask(wire.Control(self.number, action, arguments=arguments))

    def say(self, replica: int, version: int, error: str = "", number: int = 0, **fields: Any) -> None:
        state = {"is_sleeping": False, "is_paused": False} | fields
        self.commands.answered(
            replica, wire.Controlled(number or self.number, weight_version=version, error=error, **state)
        )

    def update(self, *versions: int, version: int | None = None, error: str = "") -> wire.Controlled:
        """An update, after which replicas have these versions."""
        for replica, share in self.ask("load", folder="x", version=version).items():
            wanted = share.arguments["version"]
            self.say(replica, versions[replica], error or ("" if versions[replica] == wanted else "refused"))
        return self.answers[-1]


def test_versions_agree_and_those_behind_need_all_weights() -> None:
    replicas = Replicas(3)
    assert replicas.update(1, 1, 0).replicas_out == {2: "refused"} and replicas.commands.agreeing == {0, 1}
    shares = replicas.ask("load", folder="x", version=None)
    given = [(shares[i].arguments["version"], shares[i].arguments["complete"]) for i in range(3)]
    assert given == [(2, False), (2, False), (2, True)]
    for replica in range(3):
        replicas.say(replica, 2)
    assert replicas.answers[-1].replicas_out == {} and replicas.commands.agreeing == {0, 1, 2}
    assert replicas.update(9, 9, 9, version=9).weight_version == 9
    assert replicas.ask("load", folder="x", version=None)[0].arguments["version"] == 10


def test_an_update_that_all_refuse_changes_nothing() -> None:
    replicas = Replicas()
    answer = replicas.update(0, 0, error="no such folder")
    assert answer.error == "no such folder" and answer.replicas_out == {} and replicas.commands.agreeing == {0, 1}
    assert replicas.ask("load", folder="x", version=None)[0].arguments["version"] == 1


def test_the_answer_waits_for_all_that_live() -> None:
    replicas = Replicas()
    replicas.ask("load", folder="x", version=None)
    replicas.say(0, 1)
    assert not replicas.answers
    replicas.commands.died(1)
    assert replicas.answers[-1].replicas_out == {1: "its process has ended"} and not replicas.answers[-1].error
    replicas.commands.started(1)
    assert replicas.commands.agreeing == {0}, "it has the weights of the checkpoint"
    replicas.ask("state")
    replicas.say(0, 1)
    replicas.say(1, 0)
    assert replicas.answers[-1].replicas_out == {1: "it is behind, with weights of version 0"}


def test_a_replica_that_starts_during_an_update_waits_for_its_end() -> None:
    replicas = Replicas(1)
    replicas.ask("load", folder="x", version=None)
    replicas.commands.started(1)
    assert replicas.commands.agreeing == {0}
    replicas.say(0, 0, "refused")
    assert replicas.commands.agreeing == {0, 1} and replicas.answers[-1].error == "refused"


def test_nobody_serves_old_weights_after_the_last_one_died() -> None:
    replicas = Replicas()
    replicas.update(4, 4, version=4)
    for replica in (0, 1):
        replicas.commands.died(replica)
    assert "no replica runs" in replicas.answers[-1].unavailable, "told without a command"
    for replica in (0, 1):
        replicas.commands.started(replica)
    assert "no replica has weights of version 4; update all of them" in replicas.answers[-1].unavailable
    assert len(replicas.answers) == 3 and replicas.answers[-1].number == -1
    replicas.ask("state")
    for replica in (0, 1):
        replicas.say(replica, 0)
    answer = replicas.answers[-1]
    assert "no replica has weights of version 4" in answer.unavailable and not replicas.commands.agreeing
    assert sorted(answer.replicas_out) == [0, 1] and answer.weight_version == 4
    assert replicas.ask("load", folder="x", version=None)[1].arguments == {
        "folder": "x", "version": 5, "complete": True
    }  # fmt: skip
    for replica in (0, 1):
        replicas.say(replica, 5)
    assert not replicas.answers[-1].unavailable and replicas.commands.agreeing == {0, 1}


def test_servers_are_told_when_no_replica_runs() -> None:
    replicas = Replicas(1)
    replicas.commands.died(0)
    replicas.ask("resume")
    assert all("no replica runs" in answer.unavailable for answer in replicas.answers)
    replicas.commands.started(0)
    assert [answer.number for answer in replicas.answers] == [-1, 1, -1] and not replicas.answers[-1].unavailable


@pytest.mark.parametrize("restarted", [0, 1])
def test_a_replica_that_starts_while_others_sleep_is_out_until_they_wake(restarted: int) -> None:
    replicas = Replicas()
    asleep: dict[str, Any] = {"is_sleeping": True, "unavailable": "asleep"}
    replicas.ask("sleep", level=1)
    for replica in (0, 1):
        replicas.say(replica, 0, **asleep)
    replicas.commands.died(restarted)
    replicas.commands.started(restarted)
    replicas.ask("state")
    for replica in (0, 1):
        replicas.say(replica, 0, **({} if replica == restarted else asleep))
    assert replicas.answers[-1].is_sleeping and sorted(replicas.answers[-1].replicas_out) == [restarted]
    replicas.ask("wake_up", tags=None)
    for replica in (0, 1):
        replicas.say(replica, 0)
    assert not replicas.answers[-1].is_sleeping and replicas.commands.agreeing == {0, 1}


def test_commands_may_overlap() -> None:
    """A pause that waits is cut short by another one, and two updates get two versions."""
    replicas = Replicas()
    replicas.ask("load", folder="x", version=None)
    assert replicas.ask("load", folder="y", version=None)[0].arguments["version"] == 2
    for number in (1, 2):
        for replica in (0, 1):
            replicas.say(replica, number, number=number)
    assert [(a.number, a.weight_version) for a in replicas.answers] == [(1, 1), (2, 2)]


def test_a_question_during_an_update_takes_no_replica_out() -> None:
    """One replica has the new weights, the other waits for its requests to end."""
    replicas = Replicas()
    replicas.ask("load", folder="x", version=None)
    replicas.say(0, 1)
    replicas.ask("state")
    replicas.say(0, 1)
    replicas.say(1, 0, is_paused=True)
    assert replicas.answers[-1].replicas_out == {} and replicas.commands.agreeing == {0, 1}
    replicas.ask("load", folder="y", version=None)
    replicas.say(1, 0, "refused", number=1, is_paused=True)
    assert replicas.answers[-1].replicas_out == {1: "refused"} and not replicas.answers[-1].error
    assert replicas.commands.agreeing == {0}
    replicas.say(0, 2)
    replicas.say(1, 2)
    assert replicas.answers[-1].replicas_out == {} and replicas.commands.agreeing == {0, 1}


def test_ranks_of_a_group_follow_each_other() -> None:
    replicas, given = Replicas(3, num_ranks=2), {"rank_offset": 1, "world_size": 7}
    replicas.commands.died(1)
    shares = replicas.ask("join", **given | {"world_size": 5})
    assert {i: share.arguments["rank_offset"] for i, share in shares.items()} == {0: 1, 2: 3}
    assert replicas.ask("join", **given | {"world_size": 4}) == {}
    assert "leave no room for 2 replicas with 2 ranks each" in replicas.answers[-1].error


def test_without_a_replica_a_command_is_refused() -> None:
    replicas = Replicas(0)
    assert replicas.ask("pause") == {} and replicas.answers[-1].error == "no replica is up; try again later"
