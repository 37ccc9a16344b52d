"""Sizes of the host tier: the pages and states that the given memory holds on each rank."""

from dataclasses import dataclass

from weft.cache.plan import mib
from weft.cache.spec import CacheSpec
from weft.config import EngineConfig
from weft.errors import ConfigError

STATE_SHARE = 0.25
"""Share of the host memory that states get in models with recurrent layers. Contexts of 20,000 tokens and more, which
the tier is for, need less for their states than for their KV."""


@dataclass(frozen=True, slots=True)
class TierPlan:
    """Sizes on one rank.

    Attributes:
        num_pages, num_slots: places for KV pages and for states.
        page_bytes: bytes of a page's place.
        slot_bytes: bytes of a state's place: the state, and the KV of the partial page at its position.
        reasons: the reason for each number.
    """

    num_pages: int
    num_slots: int
    page_bytes: int
    slot_bytes: int
    reasons: dict[str, str]

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes + self.num_slots * self.slot_bytes


def plan_tier(config: EngineConfig, spec: CacheSpec) -> TierPlan:
    """Plan the tier of each rank, which gets its share of ``kv_offloading_size``.

    Raises:
        ConfigError: not even one page, or one state, fits.
    """
    assert config.kv_offloading_size is not None
    total = int(config.kv_offloading_size * 2**30) // config.tensor_parallel_size
    slot_bytes = spec.slot_bytes + spec.page_bytes if spec.has_states else 0
    share = STATE_SHARE if spec.page_bytes else 1.0
    num_slots = int(total * share) // slot_bytes if slot_bytes else 0
    num_pages = (total - num_slots * slot_bytes) // spec.page_bytes if spec.page_bytes else 0
    if (slot_bytes and not num_slots) or (spec.page_bytes and not num_pages):
        needed = (slot_bytes / share + spec.page_bytes) * config.tensor_parallel_size
        raise ConfigError(
            f"kv_offloading_size={config.kv_offloading_size:g} is too small: a state of {mib(slot_bytes)} and a page "
            f"of {mib(spec.page_bytes)} on each rank need at least {needed / 2**30:.3g} GiB"
        )
    reasons = {"host_pages": f"{num_pages}: {mib(spec.page_bytes)} each, {num_pages * spec.page_size} tokens of KV"}
    if slot_bytes:
        reasons["host_states"] = f"{num_slots}: {mib(slot_bytes)} each, {share:.0%} of the memory"
    return TierPlan(num_pages, num_slots, spec.page_bytes, slot_bytes, reasons)
