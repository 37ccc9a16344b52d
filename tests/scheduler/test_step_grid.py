"""Steps on a grid: the pieces in which a request's tokens run do not depend on other requests."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.fake_runner import FakeRunner
from tests.scheduler.test_scheduler import PAGE, Rig, expect, make_request, make_spec, random_requests
from weft.cache.manager import Manager
from weft.cache.reuse_grid import ReuseGrid
from weft.messages import ScheduledRequest, SchedulerOutput
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.step_grid import StepGrid

SIZE = 8


class GridRig(Rig):
    """A scheduler and a cache with a grid of 8 tokens. Notes the pieces of each request: start, end, prompt length."""

    def __init__(self, *, pages: int, seqs: int, budget: int, hybrid: bool) -> None:
        super().__init__(pages=pages, seqs=seqs, budget=budget, hybrid=hybrid)
        slots = 12 if hybrid else 1
        self.manager = Manager(
            make_spec(hybrid), num_pages=pages, num_slots=slots, enable_prefix_caching=True, grid=ReuseGrid(SIZE)
        )
        self.scheduler = Scheduler(
            self.manager, max_num_seqs=seqs, max_num_batched_tokens=budget, grid=StepGrid(SIZE)
        )  # fmt: skip
        self.runner = FakeRunner(pages, PAGE, slots, hybrid)
        self.pieces: list[tuple[int, int, int]] = []
        self._prompts: dict[int, int] = {}

    def _run(self, step):  # type: ignore[no-untyped-def]
        if isinstance(step, SchedulerOutput):
            self._prompts |= {new.row: new.num_prompt_tokens for new in step.new_requests}
            self.pieces += [(r.start, r.start + r.num_tokens, self._prompts[r.row]) for r in step.requests]
            for request in step.requests:
                check_piece(request, self._prompts[request.row])
        return super()._run(step)


def check_piece(request: ScheduledRequest, prompt: int) -> None:
    start, end = request.start, request.start + request.num_tokens
    if start >= prompt:
        assert request.is_decode, "a generated token runs alone, and stores no state"
        return
    assert start % SIZE == 0 and end <= prompt
    assert end == prompt or (end % SIZE == 0 and prompt - end >= 2)
    assert request.num_tokens >= 2 or prompt == 1
    assert all(position % SIZE == 0 for position, _ in request.checkpoints)


def rigs() -> Iterator[GridRig]:
    for seed in range(6):
        rng = random.Random(seed)
        yield GridRig(pages=rng.choice([40, 60, 200]), seqs=5, budget=rng.choice([13, 17, 40]), hybrid=bool(seed % 2))


@pytest.mark.parametrize("depth", [0, 1])
def test_random_traffic_runs_in_the_same_pieces(depth: int) -> None:
    num_preemptions = num_reused = 0
    for seed, rig in enumerate(rigs()):
        requests = random_requests(random.Random(seed), 40, 60, 30, frozenset())
        for request in requests:
            rig.scheduler.add(request)
        rig.run(depth)
        for request in requests:
            expect(request)
        num_preemptions += rig.scheduler.stats().num_preemptions
        num_reused += rig.manager.stats().num_hit_tokens
        assert rig.manager.stats().num_hit_tokens % SIZE == 0
    assert num_preemptions and num_reused


def test_a_preempted_request_replays_its_tokens() -> None:
    """One by one, after its prompt, although they are known."""
    rig = GridRig(pages=14, seqs=2, budget=40, hybrid=True)
    first, second = make_request("first", [1] * 10, 30), make_request("second", [2] * 12, 28)
    for request in (first, second):
        rig.scheduler.add(request)
    rig.run()
    assert second.num_preemptions
    expect(second)
    replayed = [piece for piece in rig.pieces if piece[2] == 12 and piece[0] >= 12]
    assert len(replayed) > len({start for start, _, _ in replayed}), "a generated token ran twice"


@pytest.mark.parametrize(
    ("start", "prompt", "num_tokens", "reach"),
    [
        (0, 1, 9, 1), (0, 9, 9, 9), (0, 9, 8, 0), (0, 10, 9, 8), (0, 30, 20, 16), (8, 30, 7, 0), (16, 17, 1, 1),
        (8, 17, 8, 0), (8, 17, 9, 9), (30, 30, 5, 1), (31, 30, 1, 1), (30, 30, 0, 0), (8, 30, -1, -1),
    ],
)  # fmt: skip
def test_reach(start: int, prompt: int, num_tokens: int, reach: int) -> None:
    assert StepGrid(SIZE).reach(make_request("r", [1] * prompt, 5), start, num_tokens) == reach
