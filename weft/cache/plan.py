"""Pool sizes: the pages and slots that a memory budget holds, and the limits that shrink to fit.

``runner/memory.py`` measures the budget. The result has a reason for every value.
"""

from collections.abc import Callable
from dataclasses import dataclass

from weft.cache.spec import CacheSpec
from weft.config import EngineConfig
from weft.errors import CapacityError

KEPT_STATES = (4, 256)
"""Upper bounds on state slots for the prefix cache: per running request, and in all. The larger bound holds."""

KEPT_CONTEXTS = (3, 16)
"""Upper bounds on contexts of KV for the prefix cache: per running request, and in all. The larger bound holds."""


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Sizes of the pools, the reserved page and slot included, and the limits that follow from them.

    Attributes:
        num_pages, num_slots: pool sizes.
        max_num_seqs: running requests, clamped to the slots that fit.
        max_model_len: context length, clamped to what one request can hold.
        cache_bytes: bytes of all cache tensors; equals what they hold once allocated.
        reasons: the reason for each value.
        encoder_bytes: bytes of cached image embeddings, not part of ``cache_bytes``.
        max_num_batched_tokens: tokens per step, if the device lacks memory for a step as large as configured; else
            None.
    """

    num_pages: int
    num_slots: int
    max_num_seqs: int
    max_model_len: int
    cache_bytes: int
    reasons: dict[str, str]
    max_num_batched_tokens: int | None = None
    encoder_bytes: int = 0

    def num_full_contexts(self, page_size: int) -> int:
        """Number of requests of the full context length that can run at a time."""
        pages = (self.num_pages - 1) // -(-self.max_model_len // page_size)
        return min(pages, self.max_num_seqs)


def plan_for(config: EngineConfig, spec: CacheSpec, budget_bytes: int) -> CachePlan:
    return plan_caches(
        spec,
        budget_bytes=budget_bytes,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        num_kv_pages=config.num_kv_pages,
        num_state_slots=config.num_state_slots,
        keeps_prefixes=config.enable_prefix_caching,
        num_drafts_at=config.num_drafts_at,
    )


def plan_caches(
    spec: CacheSpec,
    *,
    budget_bytes: int,
    max_num_seqs: int,
    max_model_len: int,
    num_kv_pages: int | None = None,
    num_state_slots: int | None = None,
    keeps_prefixes: bool = False,
    num_drafts_at: Callable[[int], int] = lambda num_seqs: 0,
) -> CachePlan:
    """Share ``budget_bytes`` between state slots and KV pages. There is a slot per running request and per draft
    (``num_drafts_at`` gives the number of drafts by batch size).

    With ``keeps_prefixes`` both pools get more than the running requests need, for the prefix cache: up to
    ``KEPT_STATES`` slots and ``KEPT_CONTEXTS`` contexts.

    Pool sizes set by the user (``num_kv_pages``, ``num_state_slots``, the reserved page and slot included) are used as
    they are. Otherwise slots take at most half of the budget and pages the rest, but no more pages than
    ``max_num_seqs`` requests at full context length could fill.

    Raises:
        CapacityError: not even one request of one page fits.
    """
    reasons: dict[str, str] = {}
    running = working_slots(max_num_seqs, num_drafts_at)
    num_drafts = running - max_num_seqs
    wanted_slots = running + _kept(KEPT_STATES, max_num_seqs, keeps_prefixes)
    num_slots = _plan_slots(spec, budget_bytes, wanted_slots, running, num_drafts, num_state_slots, reasons)
    if spec.slot_bytes and num_slots - 1 < running:
        while max_num_seqs > 1 and working_slots(max_num_seqs, num_drafts_at) > num_slots - 1:
            max_num_seqs -= 1
        drafts = working_slots(max_num_seqs, num_drafts_at) - max_num_seqs
        each = f", {drafts} of them for drafts" if drafts else ""
        reasons["max_num_seqs"] = (
            f"clamped to {max_num_seqs}: {num_slots - 1} state slots of {mib(spec.slot_bytes)} fit{each}"
        )
    contexts = max_num_seqs + _kept(KEPT_CONTEXTS, max_num_seqs, keeps_prefixes)
    num_pages = _plan_pages(
        spec, budget_bytes - num_slots * spec.slot_bytes, contexts, max_model_len, num_kv_pages, reasons
    )
    capacity = (num_pages - 1) * spec.page_size
    if capacity < max_model_len:
        max_model_len = capacity
        reasons["max_model_len"] = (
            f"clamped to {capacity}: {num_pages - 1} pages of {spec.page_size} tokens are all there is"
        )
    total = num_pages * spec.page_bytes + num_slots * spec.slot_bytes
    return CachePlan(num_pages, num_slots, max_num_seqs, max_model_len, total, reasons)


def working_slots(max_num_seqs: int, num_drafts_at: Callable[[int], int]) -> int:
    """State slots that ``max_num_seqs`` requests and their drafts need. Slots for the way to that number are included:
    while one request is admitted, the others still hold the slots of a smaller batch."""
    drafts = [n * num_drafts_at(n) for n in range(max_num_seqs + 1)]
    return max(n + max(drafts[n - 1 : n + 1]) for n in range(1, max_num_seqs + 1))


def _kept(most: tuple[int, int], max_num_seqs: int, keeps_prefixes: bool) -> int:
    per_request, in_all = most
    return max(per_request * max_num_seqs, in_all) if keeps_prefixes else 0


def _plan_slots(
    spec: CacheSpec,
    budget: int,
    wanted: int,
    running: int,
    num_drafts: int,
    given: int | None,
    reasons: dict[str, str],
) -> int:
    if not spec.slot_bytes:
        reasons["num_state_slots"] = "1: the model has no recurrent layers, only the reserved slot is left"
        return 1
    if given is not None:
        reasons["num_state_slots"] = f"{given}: given"
        return given
    fitting = budget // 2 // spec.slot_bytes - 1
    if fitting < 1:
        raise CapacityError(
            f"{mib(budget)} of cache memory is too little: half of it must hold at least two state slots of "
            f"{mib(spec.slot_bytes)}; raise cpu_cache_gib (or gpu_memory_utilization on a GPU)"
        )
    slots = min(wanted, fitting)
    kept = f", {slots - running} for the prefix cache" if slots > running else ""
    drafts = f", {num_drafts} for drafts" if num_drafts else ""
    reasons["num_state_slots"] = (
        f"{slots + 1}: one per running request{drafts}{kept} and the reserved one, {mib(spec.slot_bytes)} each"
    )
    return slots + 1


def _plan_pages(
    spec: CacheSpec, budget: int, contexts: int, max_model_len: int, given: int | None, reasons: dict[str, str]
) -> int:
    if given is not None:
        reasons["num_kv_pages"] = f"{given}: given"
        return given
    useful = contexts * spec.pages_for(max_model_len) + 1
    fitting = budget // spec.page_bytes if spec.page_bytes else useful
    if fitting < 2:
        raise CapacityError(
            f"{mib(budget)} of cache memory is left for KV pages, but two of {mib(spec.page_bytes)} are needed; "
            "raise cpu_cache_gib (or gpu_memory_utilization on a GPU), or lower max_num_seqs"
        )
    if fitting >= useful:
        reasons["num_kv_pages"] = f"{useful}: {contexts} contexts of {max_model_len} tokens; more is not taken"
        return useful
    reasons["num_kv_pages"] = f"{fitting}: what fits into {mib(budget)} at {mib(spec.page_bytes)} a page"
    return fitting


def mib(num_bytes: int) -> str:
    """Bytes in words."""
    return f"{num_bytes / 2**20:,.2f} MiB"
