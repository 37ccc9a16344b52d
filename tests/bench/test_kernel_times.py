"""Profiles count a kernel without its wait for others."""

from __future__ import annotations

from benchmarks.decode_profile import by_kernel


def test_a_kernel_that_waits_adds_what_is_left_of_it() -> None:
    """In two replays: ``norm`` starts early and waits for ``scan``, ``copy`` runs inside of it, ``last`` after them."""
    launched = [(100.0, 140.0, "norm"), (0.0, 90.0, "scan"), (50.0, 140.0, "norm"), (60.0, 80.0, "copy")]
    launched += [(150.0, 160.0, "last"), (200.0, 290.0, "scan"), (250.0, 340.0, "norm")]
    rows = {row.pop("kernel"): row for row in by_kernel(launched, 2)}
    assert rows == {
        "scan": {"us": 90.0, "launches": 1.0, "adds": 90.0},
        "norm": {"us": 110.0, "launches": 1.5, "adds": 50.0},
        "last": {"us": 5.0, "launches": 0.5, "adds": 5.0},
        "copy": {"us": 10.0, "launches": 0.5, "adds": 0.0},
    }
    assert list(rows) == ["scan", "norm", "last", "copy"], "most added first"
