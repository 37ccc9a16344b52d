"""Whether a process lives and makes progress, by processor time and thread states in ``/proc``."""

from __future__ import annotations

import os
import time
from pathlib import Path


class Movement:
    """When a process was last seen to move. ``at``: of ``time.monotonic()``; 0.0: not yet."""

    def __init__(self) -> None:
        self.at, self._used = 0.0, -1.0

    def look(self, pid: int, *, is_quiet: bool) -> None:
        """See whether it used a processor since the last look; or waits for one, which takes a look at every thread and
        is asked only if it ``is_quiet`` otherwise."""
        try:
            before, self._used = self._used, processor_s(pid)
            if self._used != before or (is_quiet and waits_for_processor(pid)):
                self.at = time.monotonic()
        except OSError:  # it has ended, which is for others to notice
            return


def processor_s(pid: int) -> float:
    """Seconds of processor time that a process has used, all threads. Raises OSError if there is no such process."""
    fields = _stat(Path(f"/proc/{pid}/stat"))
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_alive(pid: int) -> bool:
    """False of a process that has ended, also if nobody has asked for its status yet."""
    try:
        return _stat(Path(f"/proc/{pid}/stat"))[0] not in ("Z", "X")
    except OSError:
        return False


def waits_for_processor(pid: int) -> bool:
    """True if a thread of the process could run, had it a processor."""
    return any(_stat(task / "stat")[0] == "R" for task in Path(f"/proc/{pid}/task").iterdir())


def _stat(path: Path) -> list[str]:
    """The fields of proc(5)'s ``stat`` from the third, the state, on; a name with spaces stands before them."""
    return path.read_text().rpartition(")")[2].split()
