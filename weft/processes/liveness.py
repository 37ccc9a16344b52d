"""Liveness and progress of a process, from processor time and thread states in ``/proc``."""

import os
import time
from pathlib import Path


class Movement:
    """The time at which a process was last seen to move. ``at``: of ``time.monotonic()``; 0.0 before the first
    movement."""

    def __init__(self) -> None:
        self.at, self._used = 0.0, -1.0

    def look(self, pid: int, *, is_quiet: bool) -> None:
        """Check whether the process used a processor since the last look. If it ``is_quiet`` otherwise, also check
        whether a thread waits for a processor, which reads the state of every thread."""
        try:
            before, self._used = self._used, processor_s(pid)
            if self._used != before or (is_quiet and waits_for_processor(pid)):
                self.at = time.monotonic()
        except OSError:  # the process has ended, which others report
            return


def processor_s(pid: int) -> float:
    """Seconds of processor time of all threads of a process. Raises OSError if there is no such process."""
    fields = _stat(Path(f"/proc/{pid}/stat"))
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_alive(pid: int) -> bool:
    """Whether the process runs. A zombie does not."""
    try:
        return _stat(Path(f"/proc/{pid}/stat"))[0] not in ("Z", "X")
    except OSError:
        return False


def waits_for_processor(pid: int) -> bool:
    """Whether a thread of the process is runnable."""
    return any(_stat(task / "stat")[0] == "R" for task in Path(f"/proc/{pid}/task").iterdir())


def _stat(path: Path) -> list[str]:
    """The fields of proc(5)'s ``stat`` from the third, the state, on. The process name before them may contain
    spaces."""
    return path.read_text().rpartition(")")[2].split()
