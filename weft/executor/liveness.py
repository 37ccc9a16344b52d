"""Whether a process lives and makes progress, by processor time and thread states in ``/proc``."""

from __future__ import annotations

import os
from pathlib import Path


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
