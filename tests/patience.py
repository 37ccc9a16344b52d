"""Limits of time that also hold on a busy machine.

Job: ``stretched`` makes a limit that is right on an idle machine as much longer as this machine is busy. A limit that
only guards against waiting for ever needs no stretching (``GUARD_S``). The cost of code is measured in processor time.
"""

from __future__ import annotations

import os
from pathlib import Path

GUARD_S = 120.0
"""No test that passes waits so long for anything."""


def stretched(seconds: float) -> float:
    """``seconds`` times twice the number of runnable threads per core, of the last minute or now; never less."""
    runnable = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
    return seconds * max(1.0, 2 * max(os.getloadavg()[0], runnable) / (os.cpu_count() or 1))
