"""Random requests with drafts through scheduler and cache, some of them; ``make fuzz-drafts`` runs 10,000."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

from tests.fake_runner import oracle
from tests.scheduler.test_scheduler import Rig, make_request
from tests.speculation.traffic import Episode, figures
from weft.scheduler.draft_planner import DeviceDrafts, DraftPlanner


def test_random_traffic() -> None:
    episodes = [Episode(seed) for seed in range(1000, 1010)]
    for episode in episodes:
        episode.run()
    found = figures(episodes, [])
    counted = ("aborted", "preemptions", "cached_prompt_tokens", "followed", "accepted_drafts")
    assert all(found[name] for name in counted) and found["accepted_drafts"] < found["verified_drafts"], found


def test_drafts_end_with_the_context() -> None:
    """A step verifies the last known token and drafts behind it, no further than the longest context."""
    planner = DraftPlanner(cast(Any, None), cast(Any, None), 4, lambda num_seqs: 4, max_model_len=50)
    for start, room in ((40, 4), (46, 3), (48, 1), (49, 0)):
        request = cast(Any, SimpleNamespace(num_computed_tokens=start, no_drafts_because=""))
        assert planner.room(request, cast(Any, SimpleNamespace(tokens=[0] * 20)), 4) == room


def test_a_step_that_follows_a_decode_is_within_the_budget() -> None:
    """A decode takes one token of each request. The next step takes one token and all drafts of each request. If these
    exceed the budget, the scheduler waits for the results. (``Rig`` checks the size of every step.)"""
    rig, rng = Rig(pages=60, seqs=3, budget=4, slots=20), random.Random(2)
    rig.scheduler.drafts = DraftPlanner(
        DeviceDrafts(), rig.manager, 2, lambda num_seqs: 2, 60, on_device=True, may_be_none=True
    )
    rig.runner.drafter = lambda tokens: oracle(tokens, 2)
    rig.runner.finds = lambda: rng.random() < 0.5
    requests = [make_request(f"r{i}", [i + 1, 7], 20 + 10 * i, i) for i in range(3)]
    for request in requests:
        rig.scheduler.add(request)
    rig.run(depth=1)
    assert rig.runner.num_followed > 0, "one request alone has room for its drafts"
    for request in requests:
        assert request.output_token_ids == oracle(request.prompt_token_ids.tolist(), request.max_tokens)


def test_no_step_follows_one_that_may_be_the_last() -> None:
    """With drafts that are all right, no token is computed that the answer does not need."""
    rig = Rig(pages=20, seqs=1, budget=16, slots=8)
    rig.scheduler.drafts = DraftPlanner(DeviceDrafts(), rig.manager, 2, lambda num_seqs: 2, 60, on_device=True)
    rig.runner.drafter = lambda tokens: oracle(tokens, 2)
    request = make_request("r", [1, 2, 3, 4], 10)
    rig.scheduler.add(request)
    rig.run(depth=1)
    assert request.output_token_ids == oracle([1, 2, 3, 4], 10)
    assert rig.runner.num_tokens_run == 4 + 3 * 3 and rig.runner.num_followed == 2


def test_who_comes_is_admitted_between_steps_that_follow_each_other() -> None:
    rig = Rig(pages=60, seqs=2, budget=16, slots=20)
    rig.scheduler.drafts = DraftPlanner(DeviceDrafts(), rig.manager, 2, lambda num_seqs: 2, 60, on_device=True)
    rig.runner.drafter = lambda tokens: oracle(tokens, 2)
    requests = [make_request("long", [1, 2, 3], 50), make_request("later", [4, 5], 4, 1)]
    for request in requests:
        rig.scheduler.add(request)
        for _ in range(5):
            rig.step(depth=1)
    assert rig.runner.num_followed and requests[1].output_token_ids and not requests[0].is_finished
    rig.run(depth=1)
    for request in requests:
        assert request.output_token_ids == oracle(request.prompt_token_ids.tolist(), request.max_tokens)
