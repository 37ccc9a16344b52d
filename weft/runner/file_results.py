"""Results of file orders, of all ranks.

Job: say which orders have ended on every rank. Owns: a pipe, into which the file threads of all ranks write, and which
rank 0 reads. Does not know: files, or what an order was for.

Every rank has a share of each page and state in a file of its own. An order has ended when all ranks have run it. It
has failed if one of them failed.
"""

import fcntl
import os
import select
import struct
import threading
from contextlib import suppress

from weft.parallel.tensor_parallel import TensorParallel

_HEAD = struct.Struct("<qqH")
_MAX_REASON_BYTES = 1000
"""Upper bound on the text of a failure. A pipe writes up to 4,096 bytes at once, without bytes of others in between."""

_PIPE_BYTES = 2**20
"""Size of the pipe, for the results of 20,000 orders. File threads wait while it is full."""

_WAIT_MS, _RETRY_S = 5, 1e-2

Result = tuple[int, int, str]
"""Number of an order, bytes of one rank, and the reason of the failure; empty if there is none."""


class FileResults:
    """The results of the engine's orders. Every rank makes one at the same time, and rank 0 reads."""

    def __init__(self, tp: TensorParallel) -> None:
        self._tp = tp
        read_end, write_end = os.pipe() if tp.rank == 0 else (-1, -1)
        if tp.size > 1:
            address = [tp.least(value if tp.rank == 0 else 2**62) for value in (os.getpid(), write_end)]
            if tp.rank:
                write_end = os.open(f"/proc/{address[0]}/fd/{address[1]}", os.O_WRONLY)
            tp.least(0)  # rank 0 keeps its end open until all have opened it
        os.set_blocking(write_end, False)
        if tp.rank == 0:
            os.set_blocking(read_end, False)
            with suppress(OSError):  # the user has many pipes already
                fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._read_end, self._write_end = read_end, write_end
        self._readable = select.poll()  # ``select.select`` fails from descriptor 1,024 on
        if tp.rank == 0:
            self._readable.register(read_end, select.POLLIN)
        self._num_waiting = 0
        self._stopped = threading.Event()
        self._begun: dict[int, tuple[int, Result]] = {}  # ranks that have run an order, and the result so far

    def put(self, number: int, num_bytes: int, reason: str) -> None:
        """Note the end of an order on this rank."""
        if reason and self._tp.size > 1:
            reason = f"on rank {self._tp.rank} {reason}"
        text = reason.encode()[:_MAX_REASON_BYTES]
        message = _HEAD.pack(number, num_bytes, len(text)) + text
        with suppress(BrokenPipeError):  # rank 0 is gone
            while not self._sent(message) and not self._stopped.wait(_RETRY_S):
                continue

    def _sent(self, message: bytes) -> bool:
        """Write a message to the pipe. Returns False if it is full."""
        try:
            os.write(self._write_end, message)
        except BlockingIOError:
            return False
        return True

    def expect(self, count: int) -> None:
        """Note that ``count`` more orders will end."""
        self._num_waiting += count

    def wait(self) -> None:
        """Wait a moment for a result, if one is missing."""
        if self._num_waiting:
            self._readable.poll(_WAIT_MS)

    def take(self) -> list[Result]:
        """The results of the orders that have ended on all ranks, each once."""
        ended = []
        for number, num_bytes, reason in self._read():
            count, (_, _, before) = self._begun.pop(number, (0, (number, num_bytes, "")))
            result = number, num_bytes, before or reason
            if count + 1 == self._tp.size:
                ended.append(result)
            else:
                self._begun[number] = count + 1, result
        self._num_waiting -= len(ended)
        return ended

    def _read(self) -> list[Result]:
        """The messages in the pipe, which are whole: one call wrote each."""
        data = b""
        with suppress(BlockingIOError):
            while part := os.read(self._read_end, _PIPE_BYTES):
                data += part
        found, at = [], 0
        while at < len(data):
            number, num_bytes, length = _HEAD.unpack_from(data, at)
            begin, at = at + _HEAD.size, at + _HEAD.size + length
            found.append((number, num_bytes, data[begin:at].decode(errors="replace")))
        return found

    def stop(self) -> None:
        """Let threads go on that wait for room in the pipe. Their results are lost."""
        self._stopped.set()

    def close(self) -> None:
        """Close the pipe, which no thread of this rank uses any more."""
        for end in (self._read_end, self._write_end):
            if end >= 0:
                os.close(end)
