"""Random requests with drafts through scheduler and cache, some of them; ``make fuzz-drafts`` runs 10,000."""

from __future__ import annotations

from tests.speculation.traffic import Episode, figures


def test_random_traffic() -> None:
    episodes = [Episode(seed) for seed in range(1000, 1010)]
    for episode in episodes:
        episode.run()
    found = figures(episodes, [])
    counted = ("aborted", "preemptions", "cached_prompt_tokens", "followed", "accepted_drafts")
    assert all(found[name] for name in counted) and found["accepted_drafts"] < found["verified_drafts"], found
