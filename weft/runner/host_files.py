"""Files of the disk tier: threads that copy between them and the tier's memory on the host.

Job: run the orders of a step's ``files``, and say how each ended. Owns: the threads. Does not know: which files there
are, or when a place may be used again.
"""

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from weft.messages import FileOrder
from weft.offload import disk

NUM_THREADS = 4
"""Threads that read files, and as many that write or remove them. A request waits for reads, nobody for writes."""

WAIT_S = 5e-3


class HostFiles:
    """Files of one engine in ``folder``. ``pages`` and ``states`` are the memory of the host tier."""

    def __init__(self, folder: Path, fingerprint: str, pages: Tensor, states: Tensor) -> None:
        self._folder, self._fingerprint = folder, fingerprint
        self._pages, self._states = pages.numpy(), states.numpy()
        self._readers = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="weft-tier-read")
        self._writers = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="weft-tier-write")
        self._finished: deque[tuple[int, int, str]] = deque()
        self._ended = threading.Event()
        self._num_waiting = 0

    def begin(self, orders: list[FileOrder]) -> None:
        """Queue the orders of a step."""
        for order in orders:
            if order.kind == "drop":
                path = disk.path_of(self._folder, self._fingerprint, order.name)
                self._writers.submit(path.unlink, missing_ok=True)
            else:
                self._num_waiting += 1
                threads = self._readers if order.kind == "load" else self._writers
                threads.submit(self._run, order)

    def _run(self, order: FileOrder) -> None:
        content = memoryview((self._states if order.is_state else self._pages)[order.place])
        reason = ""
        try:
            run = disk.write if order.kind == "save" else disk.read
            run(self._folder, self._fingerprint, order.name, content)
        except (OSError, disk.RejectedFile) as error:
            reason = str(error) or type(error).__name__
        except Exception as error:  # a thread must not end without an answer
            reason = f"{type(error).__name__}: {error}"
        self._finished.append((order.number, content.nbytes, reason))
        self._ended.set()

    def wait(self) -> None:
        """Wait a moment for the end of an order."""
        if self._num_waiting:
            self._ended.wait(WAIT_S)

    def finished(self) -> list[tuple[int, int, str]]:
        """Number, bytes and reason of the failure (empty if there is none) of each order that has ended, once."""
        self._ended.clear()
        finished = [self._finished.popleft() for _ in range(len(self._finished))]
        self._num_waiting -= len(finished)
        return finished

    def close(self) -> None:
        """Finish the orders in flight."""
        self._readers.shutdown(cancel_futures=True)
        self._writers.shutdown(cancel_futures=True)
