"""The child's side of supervision: a child process ends with its parent, and only when its parent says so."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the *thread* that started it ends; exit if ``parent_pid`` is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def leave_signals_to_parent() -> None:
    """Ignore SIGINT and SIGTERM. The parent receives them as well, and tells this process when to end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
