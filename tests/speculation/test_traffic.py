"""Random requests with drafts through scheduler and cache, some of them; ``make fuzz-drafts`` runs 10,000."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from tests.speculation.traffic import Episode, figures
from weft.speculation.planner import DraftPlanner


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
