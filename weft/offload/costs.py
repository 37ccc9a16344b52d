"""The cost of a restore against that of computing again, both from measurements of this engine.

Rates are moving averages. Before the first measurement of a rate, a restore counts as the quicker way.
"""

from dataclasses import dataclass

WEIGHT = 0.2
"""Weight of a new measurement."""

LATENCY_S = 2e-3
"""The latency of a restore before the first one is measured."""


@dataclass(slots=True)
class RestoreCosts:
    """Rates of one engine.

    Attributes:
        bytes_per_s: of restores.
        flops_per_s: of prefills.
        disk_bytes_per_s: of reading files.
        latency_s: fewest seconds that a restore took besides its copies. One step orders the copies, and a later step
            uses them. Steps of other requests in between do not count, as they would also delay a prefill.
    """

    bytes_per_s: float | None = None
    flops_per_s: float | None = None
    disk_bytes_per_s: float | None = None
    latency_s: float | None = None

    def copied(self, num_bytes: int, seconds: float) -> None:
        """Note a copy from the host to the device."""
        if seconds > 0:
            self.bytes_per_s = _moved(self.bytes_per_s, num_bytes / seconds)

    def restored(self, seconds: float, copy_seconds: float) -> None:
        """Note a whole restore, and the seconds of its copies."""
        latency = max(0.0, seconds - copy_seconds)
        self.latency_s = latency if self.latency_s is None else min(self.latency_s, latency)

    def loaded(self, num_bytes: int, seconds: float) -> None:
        """Note files that were read."""
        if seconds > 0 and num_bytes:
            self.disk_bytes_per_s = _moved(self.disk_bytes_per_s, num_bytes / seconds)

    def computed(self, flops: float, seconds: float) -> None:
        """Note a step that was a prefill."""
        if seconds > 0 and flops > 0:
            self.flops_per_s = _moved(self.flops_per_s, flops / seconds)

    def seconds_to_compute(self, flops: float) -> float | None:
        """Seconds of a prefill; None before the first measurement."""
        return flops / self.flops_per_s if self.flops_per_s is not None else None

    def refusal(self, num_bytes: int, flops: float, disk_bytes: int = 0) -> str:
        """The reason why computing is quicker; empty if restoring is. ``disk_bytes`` have to be read from files
        first."""
        computing = self.seconds_to_compute(flops)
        if self.bytes_per_s is None or computing is None:
            return ""
        restoring = (LATENCY_S if self.latency_s is None else self.latency_s) + num_bytes / self.bytes_per_s
        if disk_bytes and self.disk_bytes_per_s is not None:
            restoring += disk_bytes / self.disk_bytes_per_s
        if restoring <= computing:
            return ""
        return f"restoring would take {1e3 * restoring:.3g} ms, computing again {1e3 * computing:.3g} ms"


def _moved(average: float | None, value: float) -> float:
    return value if average is None else (1 - WEIGHT) * average + WEIGHT * value
