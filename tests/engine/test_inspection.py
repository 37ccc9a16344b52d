"""Looks into the engine: what a snapshot tells, its bounds, and its way through the wire."""

from __future__ import annotations

import time
from array import array

from msgspec.structs import asdict

from tests.cache.test_manager import PROMPT, make, run
from weft import LLM, SamplingParams
from weft.cache.manager import Manager
from weft.cache.nodes import as_tokens
from weft.engine import wire
from weft.engine.inspection import Inspection, StepLog
from weft.engine.snapshot import MAX_NODES, MAX_REQUESTS, MAX_STEPS, PoolView, RequestView
from weft.messages import RowSampling, ScheduledRequest, SchedulerOutput
from weft.outputs import CacheReport
from weft.request import Request, RequestTimes
from weft.stats import EngineStats, SchedulerStats


def stats_of(manager: Manager) -> EngineStats:
    return EngineStats(num_running=1, **asdict(manager.stats()))


def scheduled(row: int, num_tokens: int) -> ScheduledRequest:
    return ScheduledRequest(row, 10, num_tokens, [], 1, True)


def request(name: str, tokens: list[int]) -> Request:
    return Request(name, array("I", tokens), RowSampling(), max_tokens=4)


def test_steps_are_counted_and_only_the_latest_kept() -> None:
    log = StepLog()
    for step in range(MAX_STEPS + 5):
        log.ended(
            SchedulerOutput(step, [scheduled(0, 1), scheduled(1, 1), scheduled(2, 65)]), time.monotonic(), "FULL", 3
        )
    assert len(log.steps) == MAX_STEPS and log.steps[-1].step == MAX_STEPS + 4
    latest = log.steps[-1]
    assert (latest.num_requests, latest.num_decodes, latest.num_prefill_tokens) == (3, 2, 65)
    assert latest.num_padding_tokens == 3 and latest.mode == "FULL"
    count = MAX_STEPS + 5
    assert (log.num_steps, log.num_decode_tokens, log.num_prefill_tokens) == (count, 2 * count, 65 * count)


def test_verified_drafts_count_as_decodes() -> None:
    log = StepLog()
    verified = ScheduledRequest(1, 10, 3, [], 1, True, draft_token_ids=[5, 6])
    log.ended(SchedulerOutput(4, [scheduled(0, 1), verified, scheduled(2, 65)]), time.monotonic(), "FULL", 3)
    log.ended(SchedulerOutput(5, [scheduled(0, 1)]), time.monotonic(), "NONE", 0)
    (step, _) = log.steps
    assert (step.num_requests, step.num_decodes, step.num_prefill_tokens) == (3, 2, 65)
    assert log.stats(SchedulerStats(num_waiting=8)) == EngineStats(
        num_steps=2, num_prefill_tokens=65, num_decode_tokens=5, num_padding_tokens=3,
        steps_by_mode={"FULL": 1, "NONE": 1}, num_waiting=8,
    )  # fmt: skip


def test_a_request_is_shown_with_its_own_figures() -> None:
    manager, memory = make()
    run(manager, memory, PROMPT)
    inspection = Inspection(manager)
    asked, salted = request("one", [*PROMPT, 1, 2]), request("two", [*PROMPT, 1, 2])
    salted.cache_salt = "other"
    asked.output_token_ids, asked.num_cached_tokens, asked.num_preemptions = [3] * 5, 6, 7
    asked.cache_report = CacheReport(212, 210, None, 210, 0, "")
    asked.times = RequestTimes(arrival=100.0, first_scheduled=102.0, first_token=105.0, finished=114.0)
    inspection.added(asked)
    inspection.added(salted)
    pools = EngineStats(
        num_free_pages=1, num_evictable_pages=2, num_evicted_pages=3,
        num_free_slots=4, num_evictable_slots=5, num_evicted_states=6,
    )  # fmt: skip
    snapshot = inspection.snapshot(pools)
    shown, other = snapshot.requests
    assert len(shown.path) == 2 and len(other.path) < 2, "what is cached under another salt is not its own"
    assert shown == RequestView(
        request_id="one", status="waiting", num_prompt_tokens=212, num_output_tokens=5, num_cached_tokens=6,
        num_preemptions=7, report=asked.cache_report, words=str(asked.cache_report), path=shown.path, arrived=100.0,
        queue_s=2.0, first_token_s=5.0, e2e_s=14.0,
    )  # fmt: skip
    assert (other.words, other.queue_s, other.num_cached_tokens) == ("", None, 0)
    assert snapshot.totals == pools
    assert snapshot.pages == PoolView(manager.pages.capacity, 1, 2, 3)
    assert snapshot.slots == PoolView(manager.slots.capacity, 4, 5, 6)


def test_a_step_launched_ahead_counts_from_the_end_of_the_one_before() -> None:
    log = StepLog()
    scheduler_output = SchedulerOutput(1, [scheduled(0, 1)])
    launched = time.monotonic() - 10.0
    log.ended(scheduler_output, launched, "NONE", 0)
    log.ended(scheduler_output, launched, "NONE", 0)
    assert log.steps[0].seconds >= 10.0 and log.steps[1].seconds < 1.0


def test_the_tree_with_states_leases_and_tombstones() -> None:
    manager, memory = make()
    inspection = Inspection(manager)
    run(manager, memory, PROMPT)
    run(manager, memory, PROMPT[:130] + [5] * 20)
    asked = request("one", [*PROMPT, 1, 2])
    inspection.added(asked)
    snapshot = inspection.snapshot(stats_of(manager), tokens_per_node=4)
    nodes = snapshot.nodes
    assert snapshot.num_nodes == len(nodes) == 4
    assert nodes[0].parent == -1 and all(node.parent < i for i, node in enumerate(nodes))
    assert all(nodes[node.parent].end == node.start for node in nodes[1:])
    path = snapshot.requests[0].path
    assert [(nodes[i].start, nodes[i].end) for i in path] == [(0, 0), (0, 130), (130, 210)]
    assert 130 in nodes[path[1]].states and nodes[path[1]].token_ids == PROMPT[:4]

    stored = manager.tree.match(as_tokens(PROMPT)).node
    assert stored is not None
    manager.slots.release(manager.tree.take_checkpoint(stored.checkpoints[210], lost=True))
    lease = manager.lease(manager.match(PROMPT))
    assert lease is not None
    later = inspection.snapshot(stats_of(manager))
    leaf = next(node for node in later.nodes if node.end == 210)
    assert leaf.num_leases == 1 and [position for position, _ in leaf.lost_states] == [210] and not leaf.token_ids
    numbers = {(n.start, n.end): n.number for n in later.nodes}
    assert numbers[(0, 130)] == nodes[path[1]].number, "a node keeps its number"


def test_snapshots_are_bounded_and_cross_the_wire() -> None:
    manager, memory = make(hybrid=False, pages=MAX_NODES + 100)
    inspection = Inspection(manager)
    for i in range(MAX_NODES + 20):
        run(manager, memory, [i, i, i])
        inspection.added(request(str(i), [i, i, i, 7]))
    snapshot = inspection.snapshot(stats_of(manager))
    assert len(snapshot.nodes) == MAX_NODES < snapshot.num_nodes
    assert len(snapshot.requests) == MAX_REQUESTS and snapshot.requests[-1].request_id == str(MAX_NODES + 19)
    assert snapshot.requests[-1].path, "the latest used nodes are the ones shown"
    inspected = wire.Inspected(7, snapshot, replica=1)
    message = wire.encode(inspected)
    assert wire.decode_from_engine(message) == inspected and len(message) < 200_000


def test_steps_tell_how_they_ran() -> None:
    sizes = {"max_num_seqs": 4, "max_model_len": 160, "max_num_batched_tokens": 64, "cuda_graph_bs": [4]}
    with LLM(cuda_graph_mode="FULL_AND_PIECEWISE", piecewise_cuda_graph_tokens=[64], **sizes) as llm:
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        llm.generate([{"prompt_token_ids": [7 + i] * 13} for i in range(3)], params, use_tqdm=False)
        snapshot = llm._core.snapshot()
    first, second = snapshot.steps[:2]
    assert (first.mode, first.num_prefill_tokens, first.num_padding_tokens) == ("PIECEWISE", 39, 25)
    assert (second.mode, second.num_decodes, second.num_padding_tokens) == ("FULL", 3, 1)
    assert [r.status for r in snapshot.requests] == ["length"] * 3 and snapshot.totals.num_padding_tokens >= 26
    assert snapshot.totals.num_steps == len(snapshot.steps) and snapshot.totals.num_prefill_tokens == 39


def test_eager_steps_have_no_padding() -> None:
    with LLM(max_num_seqs=4, max_model_len=160) as llm:
        llm.generate([{"prompt_token_ids": [5] * 13}], SamplingParams(max_tokens=2), use_tqdm=False)
        steps = llm._core.snapshot().steps
    assert {(step.mode, step.num_padding_tokens) for step in steps} == {("NONE", 0)}
