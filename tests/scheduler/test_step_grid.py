"""Steps on a grid: the pieces in which a request's tokens run do not depend on other requests."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.fake_runner import FakeRunner
from tests.scheduler.test_scheduler import PAGE, Rig, expect, make_request, make_spec, random_requests
from tests.speculation.traffic import Drafter
from weft.cache.manager import Manager
from weft.cache.reuse_grid import ReuseGrid
from weft.messages import ScheduledRequest, SchedulerOutput
from weft.scheduler.draft_planner import DeviceDrafts, DraftPlanner
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.step_grid import StepGrid

SIZE = 8
MOST_DRAFTS = 2
BORDERS = (24, 48)


class GridRig(Rig):
    """A scheduler and a cache with a grid of 8 tokens. Notes the pieces of each request: start, end, prompt length."""

    def __init__(self, *, pages: int, seqs: int, budget: int, hybrid: bool, slots: int = 12) -> None:
        super().__init__(pages=pages, seqs=seqs, budget=budget, hybrid=hybrid)
        slots = slots if hybrid else 1
        self.manager = Manager(
            make_spec(hybrid), num_pages=pages, num_slots=slots, enable_prefix_caching=True, grid=ReuseGrid(SIZE)
        )
        self.scheduler = Scheduler(
            self.manager, max_num_seqs=seqs, max_num_batched_tokens=budget, grid=StepGrid(SIZE)
        )  # fmt: skip
        self.runner = FakeRunner(pages, PAGE, slots, hybrid)
        self.pieces: list[tuple[int, int, int]] = []
        self._prompts: dict[int, int] = {}

    def draft(self, *, on_device: bool) -> None:
        """Draft from now on, often rightly."""
        drafter, self.scheduler._grid = Drafter(random.Random(3), 0.7), StepGrid(SIZE, BORDERS, MOST_DRAFTS)
        proposer = DeviceDrafts() if on_device else drafter
        self.scheduler.drafts = DraftPlanner(
            proposer, self.manager, MOST_DRAFTS, lambda seqs: MOST_DRAFTS, 200, on_device=on_device
        )
        self.runner.drafter = (lambda tokens: drafter.head(tokens, MOST_DRAFTS)) if on_device else None

    def _run(self, step):  # type: ignore[no-untyped-def]
        if isinstance(step, SchedulerOutput):
            self._prompts |= {new.row: new.num_prompt_tokens for new in step.new_requests}
            self.pieces += [(r.start, r.start + r.num_tokens, self._prompts[r.row]) for r in step.requests]
            counts = {len(request.draft_token_ids) for request in step.requests}
            assert len(counts) < 2, "a step verifies drafts of all its requests, or of none"
            for request in step.requests:
                check_piece(request, self._prompts[request.row])
        return super()._run(step)


def check_piece(request: ScheduledRequest, prompt: int) -> None:
    start, end = request.start, request.start + request.num_tokens
    if start >= prompt:
        drafts = len(request.draft_token_ids)
        assert request.num_tokens == 1 + drafts, "a generated token runs alone"
        assert request.is_decode or drafts, "and stores no state for others"
        for earliest in range(start - MOST_DRAFTS * request.follows, start + 1) if drafts else ():
            lengths = range(earliest + 1, earliest + 2 + drafts)
            assert all(b >= lengths[-1] or b < lengths[0] for b in BORDERS), "a verification has splits of one length"
        return
    assert start % SIZE == 0 and end <= prompt
    assert end == prompt or (end % SIZE == 0 and prompt - end >= 2)
    assert request.num_tokens >= 2 or prompt == 1
    assert all(position % SIZE == 0 for position, _ in request.checkpoints)


def rigs(slots: int = 12) -> Iterator[GridRig]:
    for seed in range(6):
        rng, hybrid = random.Random(seed), bool(seed % 2)
        pages, budget = rng.choice([40, 60, 200]), rng.choice([13, 17, 40])
        yield GridRig(pages=pages, seqs=5, budget=budget, hybrid=hybrid, slots=slots)


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


@pytest.mark.parametrize("on_device", [False, True])
def test_all_requests_of_a_step_verify_drafts_or_none_does(on_device: bool) -> None:
    num_accepted = num_followed = 0
    for seed, rig in enumerate(rigs(slots=24)):
        rig.draft(on_device=on_device)
        requests = random_requests(random.Random(seed), 40, 60, 30, frozenset())
        for request in requests:
            rig.scheduler.add(request)
        rig.run(int(on_device))
        for request in requests:
            expect(request)
        num_accepted += rig.scheduler.stats().spec_decode_num_accepted_tokens
        num_followed += rig.runner.num_followed
    assert num_accepted and bool(num_followed) == on_device


def test_a_preempted_request_replays_its_tokens() -> None:
    """The generated tokens run one by one after the prompt, although they are known."""
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
