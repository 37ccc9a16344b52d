"""Callers share the engine by the work computed for each caller, not by the work requested."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from tests.scheduler.test_scheduler import Rig
from weft.engine.process import EngineLoop
from weft.messages import RowSampling
from weft.request import FinishReason, Request, RequestSpec

UNSET = 60_000
"""``max_tokens`` as the server resolves it where a caller does not say: what the context has room for."""


class RigCore(Rig):
    """An engine core over the fake model; every step computes at most ``budget`` tokens."""

    def __init__(self, budget: int, seqs: int = 4, **options: Any) -> None:
        super().__init__(pages=40_000, seqs=seqs, budget=budget, **options)
        self.late = 0.0
        self.prefilled: list[str] = []

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def finish(self, request_id: str, reason: FinishReason, stop_reason: str | None = None) -> bool:
        return self.scheduler.finish(request_id, reason, stop_reason)

    def step(self, depth: int = 0) -> list[Request]:  # type: ignore[override]
        output = self.scheduler.schedule()
        changed = self.scheduler.update(self.runner.run(output)) if output is not None else []
        self.prefilled += [request.request_id for request in changed if len(request.output_token_ids) == 1]
        return changed

    def stats(self) -> Any:
        return None

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work


class Engine:
    """An engine process's loop that runs when it is told to."""

    def __init__(self, budget: int, **options: Any) -> None:
        self.core = RigCore(budget, **options)
        self.loop = EngineLoop(self.core, SimpleNamespace(send=lambda message: None))  # type: ignore[arg-type]
        self.number = 0

    def send(self, caller: str, prompt: list[int], max_tokens: int, ends: frozenset[int] = frozenset()) -> str:
        self.number += 1
        name = f"{caller}{self.number}"
        self.loop._handle(
            RequestSpec(
                name, array("I", prompt), RowSampling(), max_tokens, arrival=self.number, caller=caller,
                eos_token_ids=ends,
            )
        )  # fmt: skip
        return name

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            if self.core.has_work:
                self.loop._step()

    def run(self) -> list[str]:
        """Until nothing is left. Returns the requests in the order of their first tokens."""
        while self.core.has_work:
            self.loop._step()
        return self.core.prefilled


def tokens(number: int, count: int) -> list[int]:
    """A prompt that shares no prefix with one of another number."""
    return [10 + number, *(i % 7 for i in range(count - 1))]


@pytest.mark.parametrize("max_tokens", [1, 16])
def test_a_short_call_does_not_wait_for_the_long_prompts_of_another(max_tokens: int) -> None:
    """By ``max_tokens`` alone, these prompts cost next to nothing."""
    engine = Engine(budget=3000)
    for number in range(24):
        engine.send("a", tokens(number, 3000), max_tokens)
    engine.step()
    mine = engine.send("b", tokens(90, 20), 32)
    order = engine.run()
    assert order.index(mine) <= 2, order
    assert [name for name in order if name != mine] == [f"a{i + 1}" for i in range(24)]


def test_what_is_computed_is_shared_equally() -> None:
    """A caller with long prompts runs fewer requests than a caller with short prompts, while both have some waiting."""
    engine = Engine(budget=600, seqs=1)
    for number in range(40):
        engine.send("a", tokens(number, 600), 1)
        engine.send("b", tokens(number + 40, 200), 1)
    engine.step(40)
    ran = "".join(name[0] for name in engine.core.prefilled)
    assert ran.count("b") == pytest.approx(3 * ran.count("a"), abs=3), ran


def test_an_unset_length_is_charged_as_it_is_used() -> None:
    """Both callers get equally many answers, although only one caller sets their short length."""
    engine = Engine(budget=512, seqs=1)
    for number in range(40):
        engine.send("a", tokens(number, 50), UNSET, ends=frozenset(range(10_000)))
        engine.send("b", tokens(number + 40, 50), 1)
    engine.step(30)
    ran = "".join(name[0] for name in engine.core.prefilled)
    assert abs(ran.count("a") - ran.count("b")) <= 12 and ran.count("a") >= 8, ran


def test_output_tokens_are_charged_as_they_come() -> None:
    engine = Engine(budget=64, seqs=2)
    for number in range(20):
        engine.send("a", tokens(number, 8), 100)
        engine.send("b", tokens(number + 20, 8), 10)
    engine.step(300)
    ran = "".join(name[0] for name in engine.core.prefilled)
    assert ran.count("b") > 3 * ran.count("a"), ran


def test_cached_prompt_tokens_cost_nothing() -> None:
    engine = Engine(budget=4000, seqs=1, caches=True, slots=64)
    prompt = tokens(0, 2000)
    engine.send("a", prompt, 1)
    engine.run()
    for number in range(20):
        engine.send("a", [*prompt, 5, number], 1)
        engine.send("b", tokens(number + 40, 500), 1)
    engine.core.prefilled.clear()
    engine.step(22)
    ran = "".join(name[0] for name in engine.core.prefilled)
    assert ran.count("a") > 2 * ran.count("b"), ran


def test_who_was_idle_has_no_credit() -> None:
    """A caller also pays nothing for tokens that were computed while nobody else wanted anything."""
    engine = Engine(budget=100, seqs=1)
    for number in range(50):
        engine.send("a", tokens(number, 100), 1)
    engine.run()
    engine.core.prefilled.clear()
    for number in range(20):
        engine.send("b", tokens(number + 50, 100), 1)
        engine.send("a", tokens(number + 70, 100), 1)
    engine.step(20)
    ran = "".join(name[0] for name in engine.core.prefilled)
    assert abs(ran.count("a") - ran.count("b")) <= 2, ran
