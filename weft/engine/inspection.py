"""Snapshots of the engine for the inspector page.

Job: log the latest steps and requests, and combine them with the prefix tree and the pools into a ``Snapshot``. Owns:
the two logs. Does not know: how a step runs, or who looks.

The logs cost a few microseconds per step. A snapshot is made only on request, between two steps. Its size is bounded,
whatever the size of the tree (``snapshot.py``).
"""

import heapq
import time
from collections import deque
from collections.abc import Iterator

import numpy as np
from msgspec.structs import asdict

from weft.cache.manager import Manager
from weft.cache.nodes import Node, as_tokens
from weft.cache.radix_tree import RadixTree
from weft.engine.snapshot import (
    MAX_NODES,
    MAX_POSITIONS,
    MAX_REQUESTS,
    MAX_STEPS,
    NodeView,
    PoolView,
    RequestView,
    Snapshot,
    StepView,
)
from weft.messages import SchedulerOutput
from weft.multimodal.items import cache_token_ids, media_name
from weft.request import Request
from weft.stats import EngineStats, SchedulerStats


class StepLog:
    """The latest steps, and sums over all of them."""

    def __init__(self) -> None:
        self.steps: deque[StepView] = deque(maxlen=MAX_STEPS)
        self.num_steps = self.num_prefill_tokens = self.num_decode_tokens = self.num_padding_tokens = 0
        self._by_mode: dict[str, int] = {}
        self._last_end = 0.0

    def stats(self, scheduler: SchedulerStats) -> EngineStats:
        return EngineStats(
            num_steps=self.num_steps,
            num_prefill_tokens=self.num_prefill_tokens,
            num_decode_tokens=self.num_decode_tokens,
            num_padding_tokens=self.num_padding_tokens,
            steps_by_mode=dict(self._by_mode),
            **asdict(scheduler),
        )

    def ended(self, scheduler_output: SchedulerOutput, launched: float, mode: str, num_padding_tokens: int) -> None:
        """Log a step whose results are on the host. ``launched``: when its launch began."""
        now = time.monotonic()
        num_decodes = scheduler_output.num_decodes
        others = scheduler_output.requests[num_decodes:]
        verifying = [count for scheduled in others if (count := scheduled.num_decode_tokens)]
        num_prefill = sum(scheduled.num_tokens for scheduled in others) - sum(verifying)
        self.steps.append(
            StepView(
                step=scheduler_output.step,
                ended=now,
                seconds=now - max(launched, self._last_end),
                num_requests=len(scheduler_output.requests),
                num_decodes=num_decodes + len(verifying),
                num_prefill_tokens=num_prefill,
                num_padding_tokens=num_padding_tokens,
                mode=mode,
            )
        )
        self._last_end = now
        self.num_steps += 1
        self._by_mode[mode] = self._by_mode.get(mode, 0) + 1
        self.num_prefill_tokens += num_prefill
        self.num_decode_tokens += num_decodes + sum(verifying)
        self.num_padding_tokens += num_padding_tokens


class Inspection:
    """The logs of one engine, and its snapshots."""

    def __init__(self, manager: Manager) -> None:
        self.steps = StepLog()
        self._manager = manager
        self._requests: deque[Request] = deque(maxlen=MAX_REQUESTS)
        self._numbers: dict[Node, int] = {}
        self._num_numbered = 0

    def added(self, request: Request) -> None:
        self._requests.append(request)

    def snapshot(self, stats: EngineStats, tokens_per_node: int = 0) -> Snapshot:
        """Make a snapshot of the engine. ``tokens_per_node``: upper bound on token ids listed per node."""
        now, tree = time.monotonic(), self._manager.tree
        index: dict[Node, int] = {}
        views: list[NodeView] = []
        for node in _latest(tree):
            index[node] = len(views)
            parent = index[node.parent] if node.parent is not None else -1
            held = self._manager.tier.held(node) if self._manager.tier is not None else (0, [])
            views.append(_node_view(node, self._number(node), parent, tree.clock, now, tokens_per_node, held))
        self._numbers = {node: self._numbers[node] for node in index}  # earlier requests may have been dropped
        pages, slots, log = self._manager.pages, self._manager.slots, self.steps
        return Snapshot(
            now=now,
            totals=stats,
            pages=PoolView(pages.capacity, stats.num_free_pages, stats.num_evictable_pages, stats.num_evicted_pages),
            slots=PoolView(slots.capacity, stats.num_free_slots, stats.num_evictable_slots, stats.num_evicted_states),
            num_nodes=sum(1 for _ in tree.nodes()),
            nodes=views,
            steps=list(log.steps),
            requests=[_request_view(request, _path(request, tree, index)) for request in self._requests],
        )

    def _number(self, node: Node) -> int:
        if node not in self._numbers:
            self._numbers[node] = self._num_numbered
            self._num_numbered += 1
        return self._numbers[node]


def _latest(tree: RadixTree) -> Iterator[Node]:
    """The most recently used nodes, parents before children."""
    count = 0
    heap = [(-root.last_used, i, root) for i, root in enumerate(tree.roots)]
    heapq.heapify(heap)
    number = len(heap)
    while heap and count < MAX_NODES:
        _, _, node = heapq.heappop(heap)
        yield node
        count += 1
        for child in node.children.values():
            heapq.heappush(heap, (-child.last_used, number, child))
            number += 1


def _node_view(
    node: Node, number: int, parent: int, clock: int, now: float, tokens_per_node: int, held: tuple[int, list[int]]
) -> NodeView:
    lost = sorted(node.lost_states.items())[-MAX_POSITIONS:]
    return NodeView(
        number=number,
        parent=parent,
        start=node.start,
        end=node.end,
        num_pages=len(node.pages),
        num_leases=node.locks,
        states=sorted(node.checkpoints)[-MAX_POSITIONS:],
        lost_states=[(position, round(now - when, 3)) for position, when in lost],
        idle_ticks=clock - node.last_used,
        num_pages_below=held[0],
        states_below=held[1][-MAX_POSITIONS:],
        token_ids=[token for token in node.tokens[:tokens_per_node].tolist() if token >= 0],
        media=_media_spans(node),
    )


def _media_spans(node: Node) -> list[tuple[int, int, str]]:
    """The ``(start, tokens, name)`` of images in a node's span, as far as they are inside it."""
    keys = node.tokens
    if not (keys < 0).any():
        return []
    bounds = np.concatenate([[0], np.flatnonzero(np.diff(keys)) + 1, [len(keys)]])
    starts, lengths = bounds[:-1], np.diff(bounds)
    places = np.flatnonzero(keys[starts] < 0)[:MAX_POSITIONS]
    spans = zip(starts[places].tolist(), lengths[places].tolist(), strict=True)
    return [(node.start + start, length, media_name(int(keys[start]))) for start, length in spans]


def _path(request: Request, tree: RadixTree, index: dict[Node, int]) -> list[int]:
    keys = cache_token_ids(request.prompt_token_ids, request.media)
    node = tree.match(as_tokens(keys), request.cache_salt).node
    return [index[each] for each in reversed(list(node.path())) if each in index] if node is not None else []


def _request_view(request: Request, path: list[int]) -> RequestView:
    times, report = request.times, request.cache_report

    def since_arrival(moment: float | None) -> float | None:
        return None if moment is None else round(moment - times.arrival, 6)

    return RequestView(
        request_id=request.request_id,
        status=request.finish_reason or request.status.name.lower(),
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=len(request.output_token_ids),
        num_cached_tokens=request.num_cached_tokens or 0,
        num_preemptions=request.num_preemptions,
        report=report,
        words="" if report is None else str(report),
        path=path,
        arrived=times.arrival,
        queue_s=since_arrival(times.first_scheduled),
        first_token_s=since_arrival(times.first_token),
        e2e_s=since_arrival(times.finished),
    )
