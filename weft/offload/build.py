"""The tier of one engine, made from its settings."""

import logging

from weft.cache.manager import Manager
from weft.cache.spec import CacheSpec
from weft.config import EngineConfig
from weft.offload.disk_tier import DiskTier
from weft.offload.fingerprint import fingerprint_of
from weft.offload.plan import TierPlan, plan_tier
from weft.offload.restores import Restores
from weft.offload.tier import HostTier

logger = logging.getLogger(__name__)

SLICE_BYTES = 256 * 2**20
"""Upper bound on the bytes of a slice of a restore, and of reused pages that one step copies. It bounds how long a step
waits for the pages of a restore to be evicted."""

SLICE_PAGES = 768
"""Upper bound on the pages in a slice of a restore. The host takes about a microsecond to order the copy of a page, and
the link of a GPU should not wait for it."""


def make_tier(config: EngineConfig, spec: CacheSpec) -> HostTier:
    """Make the index of the host tier, empty.

    Raises:
        ConfigError: the given memory holds nothing.
    """
    plan, disk, fingerprint = plan_tier(config, spec), None, ""  # memory holds the entries of this engine alone
    if config.kv_offloading_dir is not None:
        assert config.kv_offloading_disk_size is not None
        fingerprint = fingerprint_of(config, spec)
        ranks, max_age_s = config.tensor_parallel_size, config.kv_offloading_disk_hours * 3600
        max_bytes = int(config.kv_offloading_disk_size * 2**30) // ranks
        disk = DiskTier(config.kv_offloading_dir, fingerprint, max_bytes, max_age_s, ranks)
        logger.info("disk tier: %d entries, %.2f GiB on each rank", len(disk), disk.num_bytes / 2**30)
    return HostTier(
        spec,
        num_pages=plan.num_pages,
        num_slots=plan.num_slots,
        fingerprint=fingerprint,
        policy=config.kv_offloading_policy,
        page_budget=slice_pages(plan),
        disk=disk,
    )


def make_restores(manager: Manager, tier: HostTier, config: EngineConfig) -> Restores:
    """Make the restores of the engine's scheduler."""
    return Restores(manager, tier, min(SLICE_PAGES, slice_pages(plan_tier(config, manager.spec))))


def slice_pages(plan: TierPlan) -> int:
    """Pages of ``SLICE_BYTES``."""
    return max(1, SLICE_BYTES // plan.page_bytes) if plan.page_bytes else 1
