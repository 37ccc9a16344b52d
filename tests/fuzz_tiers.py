"""Random traffic at engines with a tier in host memory, against transformers: ``make fuzz-tiers``.

The traffic of ``fuzz_engine.py`` with pools hardly larger than the context, so that prefixes move down and up all the
time. Host memory holds a few pages, or many.

    python -m tests.fuzz_tiers [--seconds 110] [--first 0] [--count N]
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tests.fuzz_engine import Episode, run_for
from tests.fuzz_references import ARCHITECTURES, Reference
from tests.offload.always import AlwaysRestore
from tests.unread import Unread
from weft.cache.spec import CacheSpec
from weft.config import resolve
from weft.messages import SchedulerOutput


class TierEpisode(Episode):
    """One engine with a tier, and its traffic."""

    restored: Counter[str]
    _folder: str = ""

    def _settings(self) -> dict[str, Any]:
        settings, rng = super()._settings(), self.rng
        settings |= {"enable_prefix_caching": True}
        self.restored = Counter()
        spec = CacheSpec.of(resolve(model=str(self.reference.folder), **settings))
        contexts = rng.choice([1, 2, 8])
        slots = contexts * rng.choice([2, 4]) * 4  # a quarter of the memory is for states
        size = max(contexts * self.context * spec.kv_bytes_per_token, slots * (spec.slot_bytes + spec.page_bytes))
        settings["kv_offloading_size"] = (size + 5 * (spec.slot_bytes + 2 * spec.page_bytes)) / 2**30
        if rng.random() < 0.4:
            settings["kv_offloading_dir"] = self._folder = tempfile.mkdtemp(prefix="weft-tier-")
        settings["kv_offloading_policy"] = rng.choice(["write_back", "write_back", "write_through_selective"])
        return settings

    def _traffic(self) -> None:
        restores = self.llm._core.scheduler.restores
        assert restores is not None
        if self.rng.random() < 0.9:
            restores.tier.costs = AlwaysRestore()
        self._unread = Unread(self.llm)
        restores._slice_pages = self.rng.randint(1, 20)
        super()._traffic()
        stats = self.llm.stats()
        self.restored.update(
            restores=stats.num_restores, failed_restores=stats.num_failed_restores,
            restored_tokens=stats.num_external_hit_tokens, refused_restores=stats.num_refused_restores,
            files_read=stats.num_disk_loads, files_written=stats.num_disk_saves,
        )  # fmt: skip

    def run(self) -> None:
        try:
            super().run()
        finally:
            if self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _poison(self, step: SchedulerOutput) -> None:
        manager = self.llm._core.manager
        unread_pages, unread_slots = self._unread.before(step)
        pages = torch.tensor([0, *(set(manager.pages._free) - unread_pages)])
        slots = torch.tensor([0, *(set(manager.slots._free) - unread_slots)])
        for cache in self.llm._core._executor._runner.caches.values():  # type: ignore[attr-defined]
            unowned = pages if "k" in cache else slots
            for tensor in cache.values():
                with torch.inference_mode():
                    tensor.index_fill_(0, unowned, float("nan"))

    def figures(self) -> Counter[str]:
        return super().figures() + self.restored


def make_references(folder: Path) -> dict[str, Reference]:
    return {arch: Reference(arch, folder / arch) for arch in dict.fromkeys(ARCHITECTURES)}


def main(arguments: list[str] | None = None) -> int:
    return run_for(110, "random traffic at engines with tiers", make_references, TierEpisode, arguments)


if __name__ == "__main__":
    sys.exit(main())
