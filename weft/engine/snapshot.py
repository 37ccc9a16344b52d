"""Snapshots of the engine as plain values, made in ``inspection.py``.

Lengths are in tokens, moments in seconds of ``time.monotonic()``, ages in seconds.
"""

import msgspec

from weft.outputs import CacheReport
from weft.stats import EngineStats

MAX_NODES = 400
"""Upper bound on tree nodes in one snapshot, the most recently used ones."""

MAX_STEPS = 120
"""Upper bound on steps in one snapshot, the latest ones."""

MAX_REQUESTS = 32
"""Upper bound on requests in one snapshot, the latest ones."""

MAX_POSITIONS = 64
"""Upper bound on states, and on evicted states, listed per node, the last ones."""


class NodeView(msgspec.Struct, frozen=True):
    """A node of the prefix tree.

    Attributes:
        number: constant while the node lives and is among the latest.
        parent: index of its parent in ``Snapshot.nodes``, which comes earlier; -1 for a root, which has no tokens.
        start, end: its span of positions.
        num_leases: running requests that need it.
        states: positions of recurrent states, ascending.
        lost_states: ``(position, age)`` of states that were evicted while the KV remained.
        idle_ticks: admissions of requests since it was last used.
        token_ids: its first tokens without those of images, as many as were asked for.
        num_pages_below: its whole pages that are in the tier below the device, too.
        states_below: positions of states, present or evicted, that are there.
        media: ``(start, tokens, name)`` of images and video frames in its span; the name is the first digits of the
            content's hash.
    """

    number: int
    parent: int
    start: int
    end: int
    num_pages: int
    num_leases: int
    states: list[int]
    lost_states: list[tuple[int, float]]
    idle_ticks: int
    num_pages_below: int = 0
    states_below: list[int] = []
    token_ids: list[int] = []
    media: list[tuple[int, int, str]] = []


class StepView(msgspec.Struct, frozen=True):
    """A finished step.

    Attributes:
        step: its number.
        ended: when its results were on the host.
        seconds: seconds since the previous step ended, or since this one was launched, whichever is less.
        num_requests: number of requests. ``num_decodes`` of them ran one token and its drafts.
        num_prefill_tokens: tokens of the other requests.
        num_padding_tokens: padding rows, computed to fit a graph.
        mode: how it ran: NONE, PIECEWISE or FULL.
    """

    step: int
    ended: float
    seconds: float
    num_requests: int
    num_decodes: int
    num_prefill_tokens: int
    num_padding_tokens: int
    mode: str


class RequestView(msgspec.Struct, frozen=True):
    """A request that runs or has ended recently.

    Attributes:
        request_id: its name in the server.
        status: waiting, running, or the reason of its end.
        num_prompt_tokens, num_output_tokens, num_cached_tokens, num_preemptions: as in ``weft.request.Request``.
        report: the prefix that it found in the cache; None until it was first scheduled.
        path: indices in ``Snapshot.nodes`` of the nodes that hold its prompt now, as far as stored.
        arrived: the moment of its arrival.
        queue_s, first_token_s, e2e_s: seconds since its arrival; None if not reached.
    """

    request_id: str
    status: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    report: CacheReport | None
    words: str
    path: list[int]
    arrived: float
    queue_s: float | None
    first_token_s: float | None
    e2e_s: float | None


class PoolView(msgspec.Struct, frozen=True):
    """A pool of pages or of state slots: ``num_total = num_free + num_evictable + those of running requests``."""

    num_total: int
    num_free: int
    num_evictable: int
    num_evicted: int


class Snapshot(msgspec.Struct, frozen=True):
    """The engine at one moment.

    Attributes:
        num_nodes: nodes of the whole tree; ``nodes`` holds at most ``MAX_NODES``, parents before children.
        steps, requests: oldest first.
    """

    now: float
    totals: EngineStats
    pages: PoolView
    slots: PoolView
    num_nodes: int
    nodes: list[NodeView]
    steps: list[StepView]
    requests: list[RequestView]


class ReplicaView(msgspec.Struct, frozen=True):
    """One of several replicas.

    Attributes:
        replica: its number.
        state: starting, up, behind (in another state than the other replicas, without new requests), draining,
            drained (nobody starts it unasked), or down (it could not be started again).
        pid: process id on the replica's machine; 0 if unknown or without a process.
        num_open: completions that were sent to it and have not ended.
        max_num_seqs: completions that it runs at a time; 0 while it is not ready.
        num_running, num_waiting, num_free_pages, num_query_tokens, num_hit_tokens, num_prefill_tokens,
            num_decode_tokens: as in ``EngineStats``, of its present process.
        num_restarts: number of processes started after a death.
    """

    replica: int
    state: str
    pid: int
    num_open: int
    max_num_seqs: int
    num_running: int
    num_waiting: int
    num_free_pages: int
    num_query_tokens: int
    num_hit_tokens: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_restarts: int


def why_not_drain(replicas: list[ReplicaView], index: int) -> str | None:
    """The reason why a replica cannot be drained; None if it can."""
    refusal = _why_not(replicas, index, ("up", "behind"), "drained")
    if refusal is None and not any(view.state == "up" for view in replicas if view.replica != index):
        return f"replica {index} is the only one that is up; start another one first"
    return refusal


def why_not_start(replicas: list[ReplicaView], index: int) -> str | None:
    """The reason why a replica cannot be started; None if it can."""
    return _why_not(replicas, index, ("drained", "down"), "started")


def _why_not(replicas: list[ReplicaView], index: int, states: tuple[str, ...], what: str) -> str | None:
    if index >= len(replicas):
        return f"there is no replica {index}; there are {len(replicas)}, from 0 on"
    if replicas[index].state not in states:
        return f"replica {index} is {replicas[index].state}; only one that is {' or '.join(states)} can be {what}"
    return None
