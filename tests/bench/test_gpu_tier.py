"""The report of the GPU tier counts what pytest says, and does not call an unfinished group a success."""

from __future__ import annotations

from tests.gpu.run import GROUPS, ROOT, outcome

LOG = "..F.\nFAILED tests/gpu/test_engine.py::test_a - boom\n1 failed, 3 passed, 2 skipped, 5 warnings in 2.1s\n"


def test_counts_and_failures() -> None:
    found = outcome(LOG, 1)
    assert (found["passed"], found["failed"], found["skipped"], found["status"]) == (3, 1, 2, 1)
    assert found["failures"] == ["tests/gpu/test_engine.py::test_a"] and found["finished"]


def test_a_group_out_of_time_is_not_finished() -> None:
    assert not outcome("....", None)["finished"]


def test_groups_hold_every_file_of_the_tier() -> None:
    named = {each for files in GROUPS.values() for each in files}
    assert {f"tests/gpu/{path.name}" for path in (ROOT / "tests" / "gpu").glob("test_*.py")} <= named
