"""Steps that verify drafts, as the scheduler sees them.

Job: put drafts into a plan; say whether the next step has to wait for the results of the one in flight, or follows it
without knowing how many drafts are accepted there; take in what became of drafts. Owns: nothing of its own.
Does not know: how drafts are made, tensors.

A step that follows another is planned as if all drafts of that one were accepted: pages, positions and the room for
tokens are those of the most that there can be. The device knows what was accepted and begins where the sequence ends;
the host corrects its counts when the results are in::

    host    plan 2 (K accepted in 1?) | launch 2 | results of 1: counts less what was rejected | plan 3 | …
    device  ---- step 1: a accepted -------------| ---- step 2, from the position after a ------------ …
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.cache.manager import Manager
from weft.messages import ModelOutput
from weft.scheduler.running import NOTHING, Launched, Planned, Running
from weft.speculation.planner import DraftPlanner, Drafts

ON_DEVICE = -1
"""Stands for a draft that only the device knows."""


def add_drafts(planner: DraftPlanner, planned: list[Planned], budget: int) -> tuple[list[Planned], int]:
    """Drafts for the decoding requests of a plan, from what pages, slots and budget are left. Returns both anew."""
    requests = [plan.running.request for plan in planned]
    decoding = [p for p, r in zip(planned, requests, strict=True) if r.num_tokens_to_compute == 1 and not r.num_pending]
    drafts = planner.plan([(p.running.request, p.running.lease) for p in decoding], len(planned), budget)
    if not drafts:
        return planned, budget
    found = {plan.running.row: entry for plan, entry in zip(decoding, drafts, strict=True)}
    nothing = Drafts(NOTHING, 0)
    with_drafts = []
    for plan in planned:
        token_ids, num_proposed = found.get(plan.running.row, nothing)
        with_drafts.append(Planned(plan.running, plan.num_tokens + len(token_ids), token_ids, num_proposed))
    return with_drafts, budget - sum(len(entry.token_ids) for entry in drafts)


Steps = Mapping[int, Sequence[Launched]]
"""Launched steps by number."""


def must_wait(planner: DraftPlanner, running: Sequence[Running], in_flight: Steps) -> bool:
    """Whether a step can be planned only from the results of those in flight, or as one that follows them: they verify
    drafts, or the next one's drafts come after tokens that are on their way."""
    if any(entry.num_drafts for launched in in_flight.values() for entry in launched):
        return True
    return planner.num_drafts_at(len(running)) > 0 and any(each.request.num_pending for each in running)


def following_step(
    planner: DraftPlanner, manager: Manager, running: Sequence[Running], in_flight: Steps
) -> list[Planned] | None:
    """The step that follows the one in flight, in which every sequence verifies as many drafts as there; None if it
    has to wait for results: other sequences, other numbers of drafts, an option that needs the tokens on the host, a
    request that may be through, no room for the most tokens that there can be."""
    count = planner.num_drafts_at(len(running))
    if not (planner.on_device and running and count and manager.drafts.can_follow and len(in_flight) == 1):
        return None
    (launched,) = in_flight.values()
    alike = planner.drafts_at(len(launched)) == count and all(entry.num_drafts == count for entry in launched)
    if not alike or len(running) > len(launched):
        return None
    planned = []
    for each in running:
        request, end = each.request, each.request.num_computed_tokens + 1 + count
        is_there = each.in_flight == 1 and request.num_pending == 1 + count
        if not is_there or request.will_be_full or request.needs_tokens_on_host or end > planner.max_model_len:
            return None
        if manager.allocate(each.lease, end) is None:
            return None
        manager.allocate(each.lease, min(end + planner.reach, planner.max_model_len))
        planned.append(Planned(each, 1 + count, [ON_DEVICE] * count, count, follows=True))
    return planned


def settle(planner: DraftPlanner, manager: Manager, launched: Launched, num_tokens: int) -> None:
    """Drafts were verified, and ``num_tokens`` tokens came back: what was fed behind those accepted does not count."""
    request, num_accepted = launched.running.request, max(0, num_tokens - 1)
    request.num_computed_tokens -= launched.num_drafts - num_accepted
    manager.drafts.settle(launched.running.lease, launched.num_drafts, num_accepted)
    if launched.num_proposed:
        planner.verified(request, launched.num_proposed, min(num_accepted, launched.num_proposed))


def tokens_by_row(output: ModelOutput) -> dict[int, list[int]]:
    """Row -> all its tokens."""
    tokens: dict[int, list[int]] = {}
    for row, token_id in zip(output.rows, output.token_ids, strict=True):
        tokens.setdefault(row, []).append(token_id)
    return tokens
