"""Drafts in a plan: which requests get them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from weft.scheduler.draft_planner import Drafts
from weft.scheduler.draft_steps import add_drafts
from weft.scheduler.running import Planned


def planned(row: int, num_tokens: int, num_pending: int = 0) -> Planned:
    request = SimpleNamespace(num_tokens_to_compute=num_tokens, num_pending=num_pending, row=row)
    return Planned(cast(Any, SimpleNamespace(request=request, lease=f"lease {row}", row=row)), num_tokens)


def test_a_request_drafts_beside_a_prefill() -> None:
    """Its own chunk gets no drafts, nor does a request whose token is not known yet."""
    asked: list[Any] = []

    def plan(decoding: Any, num_seqs: int, budget: int) -> list[Drafts]:
        asked.append(([request.row for request, _ in decoding], num_seqs, budget))
        return [Drafts([7, 8, 9], 2) for _ in decoding]

    given = [planned(4, 1), planned(5, 30), planned(6, 1), planned(7, 1, num_pending=1)]
    found, budget = add_drafts(cast(Any, SimpleNamespace(plan=plan)), given, 100)
    assert asked == [([4, 6], 4, 100)] and budget == 94
    assert [(p.running.row, p.num_tokens, p.drafts, p.num_proposed) for p in found] == [
        (4, 4, [7, 8, 9], 2), (5, 30, [], 0), (6, 4, [7, 8, 9], 2), (7, 1, [], 0),
    ]  # fmt: skip
