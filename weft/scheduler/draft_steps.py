"""Scheduling of steps that verify drafts.

Job: add drafts to a plan, and apply their acceptance. Decide whether the next step waits for the results of the step in
flight, or follows without knowing how many drafts are accepted.

A step that follows another is planned as if all drafts of that one were accepted. Pages, positions and room for tokens
are planned for the maximum. The device knows what was accepted, and begins at the real end of the sequence. The host
corrects its counts when the results arrive::

    host    plan 2 (K accepted in 1?) | launch 2 | results of 1: counts less what was rejected | plan 3 | …
    device  ---- step 1: a accepted -------------| ---- step 2, from the position after a ------------ …
"""

import logging
from collections.abc import Mapping, Sequence

from weft.cache.manager import Manager
from weft.scheduler.draft_planner import DraftPlanner, Drafts
from weft.scheduler.running import EMPTY, Launched, Planned, Running
from weft.scheduler.step_grid import StepGrid

logger = logging.getLogger(__name__)

ON_DEVICE = -1
"""A placeholder for a draft that only the device knows, and for the number of such drafts."""


def add_drafts(
    planner: DraftPlanner, planned: list[Planned], budget: int, grid: StepGrid | None = None
) -> tuple[list[Planned], int]:
    """Add drafts to a plan's decoding requests as pages, slots and budget allow. With a grid all requests of the plan
    get equally many, or none does. Returns the new plan and budget."""
    requests = [plan.running.request for plan in planned]
    decoding = [p for p, r in zip(planned, requests, strict=True) if r.num_tokens_to_compute == 1 and not r.num_pending]
    if grid is not None and not (len(decoding) == len(planned) and all(map(grid.may_verify, requests))):
        return planned, budget
    drafts = planner.plan([(p.running.request, p.running.lease) for p in decoding], len(planned), budget)
    if not drafts:
        return planned, budget
    if grid is not None and any(len(e.token_ids) != planner.num_drafts_at(len(planned)) for e in drafts):
        return planned, budget
    found = {plan.running.row: entry for plan, entry in zip(decoding, drafts, strict=True)}
    nothing = Drafts(EMPTY, 0)
    with_drafts = []
    for plan in planned:
        token_ids, num_proposed = found.get(plan.running.row, nothing)
        with_drafts.append(Planned(plan.running, plan.num_tokens + len(token_ids), token_ids, num_proposed))
    return with_drafts, budget - sum(len(entry.token_ids) for entry in drafts)


Steps = Mapping[int, Sequence[Launched]]
"""Launched steps by number."""


def must_wait(planner: DraftPlanner, running: Sequence[Running], in_flight: Steps) -> bool:
    """Whether planning needs the results of the steps in flight, or the plan must follow them. That is so if they
    verify drafts, or if the next drafts continue tokens that are still on the device. Without recent drafts, decodes
    run ahead as usual."""
    if any(entry.num_drafts for launched in in_flight.values() for entry in launched):
        return True
    if not planner.num_drafts_at(len(running)) or not any(each.request.num_pending for each in running):
        return False
    return not (planner.on_device and planner.may_be_none) or _any_drafts(running)


def _any_drafts(running: Sequence[Running]) -> bool:
    """Whether the host knows of drafts for a request."""
    return any(each.request.draft_token_ids for each in running)


def following_step(
    planner: DraftPlanner, manager: Manager, running: Sequence[Running], in_flight: Steps, budget: int,
    grid: StepGrid | None = None,
) -> list[Planned] | None:  # fmt: skip
    """Plan the step after the one in flight, in which every sequence verifies as many drafts as there, or decodes.

    Returns None if the plan needs the results first, for one of these reasons:

    - The sequences, or their numbers of drafts, change.
    - An option needs the tokens on the host, or a request may have ended.
    - The maximum of tokens finds no room, or exceeds ``budget``.
    - Nothing was drafted recently.
    - States have to be stored at certain positions.
    - The grid lets a sequence decode only.
    """
    count = planner.num_drafts_at(len(running))
    if (1 + count) * len(running) > budget:
        return None
    if not (planner.on_device and running and count and len(in_flight) == 1) or manager.states.at_multiples:
        return None
    (launched,) = in_flight.values()
    before = launched[0].num_drafts  # a decode leaves drafts on the device where some may be missing
    alike = planner.drafts_at(len(launched)) == count and all(e.samples and e.num_drafts == before for e in launched)
    if not alike or before not in ((0, count) if planner.may_be_none else (count,)) or len(running) > len(launched):
        return None
    if planner.may_be_none and not _any_drafts(running):
        return None
    if grid is not None and not all(grid.may_verify(each.request) for each in running):
        return None
    planned = []
    for each in running:
        request, end = each.request, each.request.num_computed_tokens + 1 + count
        is_there = each.in_flight == 1 and request.num_pending == 1 + before
        if not is_there or request.will_be_full or request.needs_tokens_on_host or end > planner.max_model_len:
            return None
        has_room = (
            manager.allocate(each.lease, end) is not None if before else planner.make_room(request, each.lease, count)
        )
        if not has_room:
            return None
        manager.allocate(each.lease, min(end + planner.reach, planner.max_model_len))
        planned.append(Planned(each, 1 + count, [ON_DEVICE] * count, ON_DEVICE, follows=True))
    return planned


def apply_acceptance(planner: DraftPlanner, manager: Manager, launched: Launched, num_tokens: int) -> None:
    """Apply the acceptance of drafts. ``num_tokens`` tokens came back; tokens fed after the accepted drafts do not
    count."""
    request, num_accepted = launched.running.request, max(0, num_tokens - 1)
    request.num_computed_tokens -= launched.num_drafts - num_accepted
    manager.drafts.accept(launched.running.lease, launched.num_drafts, num_accepted)
    num_proposed = launched.num_proposed
    if num_proposed == ON_DEVICE:  # tokens that came back with the results of the step before
        num_proposed = min(len(request.draft_token_ids), launched.num_drafts)
    if num_proposed:
        planner.verified(request, num_proposed, min(num_accepted, num_proposed))


def retry_without_drafts(running: Running) -> bool:
    """Mark a request to be computed anew, because a step that verified its drafts computed NaN.

    A draft that is not finite can reach the tokens before it: a masked product adds zero times NaN. Drafts may change
    no token, so the request drops what was computed, waits again, and never drafts again.

    Returns:
        False if the request has ended, or has no drafts any more.
    """
    request = running.request
    if request.finish_reason is not None or request.no_drafts_because:
        return False
    logger.warning("%s: NaN in a step with drafts; the request is computed anew without drafts", request.request_id)
    request.no_drafts_because = "a step with drafts computed NaN"
    request.draft_token_ids = []
    running.retries = True
    return True
