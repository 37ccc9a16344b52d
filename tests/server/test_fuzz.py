"""Hostile inputs at the bundled model's server; see ``fuzz.py``. ``WEFT_FUZZ_INPUTS`` says how many."""

from __future__ import annotations

import os
import random

import pytest

from tests.server.corpus import CHAT, FAMILIES, Case, cases
from tests.server.fuzz import FLAGS, Answer, Fuzzer, judge
from tests.server.running import RunningServer
from tests.whole import takes_long

NUM_INPUTS = int(os.environ.get("WEFT_FUZZ_INPUTS", "200"))


@takes_long
def test_no_input_breaks_the_server() -> None:
    server = RunningServer(*FLAGS, module="weft")
    try:
        findings = Fuzzer(server.wait_ready()).run(NUM_INPUTS, seed=1)
    finally:
        server.close()
    assert findings.inputs == NUM_INPUTS
    assert not findings.problems, "\n".join(findings.problems[:20])
    assert not any("Traceback" in line for line in server.log), "".join(server.log[-60:])


def test_the_corpus_is_the_same_for_a_seed_and_holds_every_family() -> None:
    def some() -> list[Case]:
        stream = cases(random.Random(3))
        return [next(stream) for _ in range(1000)]

    assert some() == some()
    assert {case.family for case in some()} == {family.__name__ for family in FAMILIES}


GOOD = b'{"error": {"message": "n is 5, allowed: 4", "type": "t", "param": "n", "code": null}}'


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (Answer(400, "application/json", GOOD), None),
        (Answer(200, "application/json", b"{}"), "accepted"),
        (Answer(500, "application/json", GOOD), "5xx"),
        (Answer(None, "", b""), "no answer"),
        (Answer(400, "application/json", b'{"error": "n is 5, allowed: 4"}'), "shape"),
        (Answer(400, "application/json", GOOD.replace(b'"n"', b'"m"')), "param should be n"),
        (Answer(400, "application/json", GOOD.replace(b"4", b"3")), "limit 4 is not named"),
    ],
)
def test_bad_answers_are_noticed(answer: Answer, problem: str | None) -> None:
    found = judge(Case("x", CHAT, param="n", says="4", refused=True), answer)
    assert found is None if problem is None else found is not None and problem in found
