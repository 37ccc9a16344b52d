"""Costs by which every restore is worth it, however quick the tiny models of tests compute."""

from __future__ import annotations

from weft.offload.costs import RestoreCosts


class AlwaysRestore(RestoreCosts):
    def refusal(self, num_bytes: int, flops: float, disk_bytes: int = 0) -> str:
        return ""

    def seconds_to_compute(self, flops: float) -> float | None:
        return None
