"""Files of the disk tier: threads that copy between them and the tier's memory on the host.

Job: run the orders of a step's ``files`` on this rank. Owns: the threads. Does not know: which files there are, or when
a place may be used again.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from weft.messages import FileOrder
from weft.offload import disk
from weft.runner.file_results import FileResults

NUM_READERS, NUM_WRITERS = 8, 4
"""Numbers of threads: for reading files, and for writing or removing files. A request waits for reads, nobody for
writes."""

BATCH = 16
"""Files that a thread reads or writes for one task. Handing over a task takes as long as reading a file."""


class HostFiles:
    """Files of one rank in ``folder``.

    Args:
        share: name of the rank's files (``disk.share_of``).
        pages, states: the memory of the host tier.
        results: gets the end of every order but of those that remove files.
    """

    def __init__(self, folder: Path, share: str, pages: Tensor, states: Tensor, results: FileResults) -> None:
        self._folder, self._share, self.results = folder, share, results
        self._pages, self._states = pages.numpy(), states.numpy()
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="weft-tier-read")
        self._writers = ThreadPoolExecutor(NUM_WRITERS, thread_name_prefix="weft-tier-write")

    def begin(self, orders: list[FileOrder], earlier: Sequence[torch.cuda.Event]) -> None:
        """Queue the orders of a step, to run after the copies ``earlier``, which may use the same places."""
        loads = [order for order in orders if order.kind == "load"]
        others = [order for order in orders if order.kind != "load"]
        self.results.expect(sum(order.kind != "drop" for order in orders))
        for threads, given in ((self._readers, loads), (self._writers, others)):
            for begin in range(0, len(given), BATCH):
                threads.submit(self._run_all, given[begin : begin + BATCH], earlier)

    def _run_all(self, orders: list[FileOrder], earlier: Sequence[torch.cuda.Event]) -> None:
        for order in orders:
            if order.kind == "drop":
                with suppress(OSError):  # the other orders must not wait for a file that cannot be removed
                    disk.path_of(self._folder, self._share, order.name).unlink(missing_ok=True)
            else:
                self._run(order, earlier)

    def _run(self, order: FileOrder, earlier: Sequence[torch.cuda.Event]) -> None:
        content = memoryview((self._states if order.is_state else self._pages)[order.place])
        reason = ""
        try:
            for event in earlier:
                event.synchronize()
            run = disk.write if order.kind == "save" else disk.read
            run(self._folder, self._share, order.name, content)
        except (OSError, disk.RejectedFile) as error:
            reason = str(error) or type(error).__name__
        except Exception as error:  # a thread must not end without an answer
            reason = f"{type(error).__name__}: {error}"
        self.results.put(order.number, content.nbytes, reason)

    def close(self) -> None:
        """Finish the orders in flight."""
        self.results.stop()
        self._readers.shutdown(cancel_futures=True)
        self._writers.shutdown(cancel_futures=True)
        self.results.close()
