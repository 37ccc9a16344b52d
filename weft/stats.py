"""Engine statistics: each gauge and counter, defined once.

Counters count since the start of the engine.
"""

from typing import Any

import msgspec


class CacheStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and counters of the cache, in tokens, pages and slots.

    ``num_evictable_*`` count entries that no running request needs. Queries and hits count every admission of a
    request, resumed ones too.
    """

    num_free_pages: int = 0
    num_evictable_pages: int = 0
    num_free_slots: int = 0
    num_evictable_slots: int = 0
    num_query_tokens: int = 0
    num_hit_tokens: int = 0
    num_evicted_pages: int = 0
    num_evicted_states: int = 0


class SchedulerStats(CacheStats, frozen=True, kw_only=True):
    """Figures of cache and scheduler. In ``EngineStats`` requests whose grammar is compiled count as waiting.

    ``num_stalls`` counts requests that were preempted again before any request had computed a new token. It must stay
    0. ``spec_decode_num_drafts`` counts verifications of a request's drafts, the other ``spec_decode_*`` count draft
    tokens and accepted ones. The accepted ones are also counted by position: first draft ("0"), second ("1"), ….
    ``num_encoder_queries`` and ``num_encoder_hits`` count images and videos whose embeddings a step needed, and those
    that were cached. ``encoder_seconds`` is the time for encoding the others. ``encoder_cache_tokens``: tokens whose
    embeddings are cached now.

    With a tier in host memory, ``host_*`` are places there. ``disk_bytes`` are in files now, of at most
    ``disk_max_bytes``. ``num_external_query_tokens`` counts prompt tokens that the device did not have, and
    ``num_external_hit_tokens`` the restored ones, which also count as hits of the device. Bytes and seconds of copies
    are those of one rank, to the host (``stored``) and back (``restored``).
    """

    host_pages: int = 0
    host_states: int = 0
    host_pages_in_use: int = 0
    host_states_in_use: int = 0
    num_host_evicted_pages: int = 0
    num_host_evicted_states: int = 0
    num_external_query_tokens: int = 0
    num_external_hit_tokens: int = 0
    num_restores: int = 0
    num_refused_restores: int = 0
    num_failed_restores: int = 0
    num_disk_saves: int = 0
    num_disk_loads: int = 0
    num_rejected_files: int = 0
    num_failed_saves: int = 0
    num_disk_evictions: int = 0
    saved_bytes: int = 0
    loaded_bytes: int = 0
    disk_bytes: int = 0
    disk_max_bytes: int = 0
    stored_bytes: int = 0
    stored_seconds: float = 0.0
    restored_bytes: int = 0
    restored_seconds: float = 0.0
    num_waiting: int = 0
    num_running: int = 0
    num_preemptions: int = 0
    num_stalls: int = 0
    num_encoder_queries: int = 0
    num_encoder_hits: int = 0
    encoder_seconds: float = 0.0
    encoder_cache_tokens: int = 0
    spec_decode_num_drafts: int = 0
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0
    spec_decode_num_accepted_tokens_per_pos: dict[str, int] = {}


class EngineStats(SchedulerStats, frozen=True, kw_only=True):
    """Figures of cache, scheduler and steps. ``steps_by_mode``: number of steps by mode (NONE, PIECEWISE, FULL).
    ``weight_version``: version of the weights; of several replicas the newest one."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_padding_tokens: int = 0
    steps_by_mode: dict[str, int] = {}
    weight_version: int = 0


GAUGES = (
    "num_free_pages", "num_evictable_pages", "num_free_slots", "num_evictable_slots", "num_waiting", "num_running",
    "encoder_cache_tokens", "host_pages", "host_states", "host_pages_in_use", "host_states_in_use",
    "disk_bytes", "disk_max_bytes", "weight_version",
)  # fmt: skip
"""Fields that hold a current value. All other fields count events since the engine started."""


def counters(stats: EngineStats) -> EngineStats:
    """The statistics without the gauges: the events of an engine that is gone."""
    return msgspec.structs.replace(stats, **dict.fromkeys(GAUGES, 0))


def merged(stats: list[EngineStats]) -> EngineStats:
    """Sums over all replicas."""
    sums = {name: _sum([getattr(s, name) for s in stats]) for name in EngineStats.__struct_fields__}
    return EngineStats(**sums | {"weight_version": max(s.weight_version for s in stats)})


def _sum(values: list[Any]) -> Any:
    """The sum of numbers, or of dicts of numbers by key."""
    if not any(isinstance(value, dict) for value in values):
        return sum(values)
    keys = dict.fromkeys(key for value in values for key in value)
    return {key: sum(value.get(key, 0) for value in values) for key in keys}
