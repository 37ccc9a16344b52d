"""A ring buffer in shared memory, one writer and several readers, that carries scheduler outputs to the ranks.

Job: broadcast messages in order with little delay. Owns: the memory, its layout, and the pipes that wake readers. Does
not know: the meaning of messages, or who the processes are.

The memory is an anonymous file of the writer, which readers open as ``/proc/<pid>/fd/<number>``. It vanishes with its
processes, however they end. It holds one line of numbers per reader, then a ring of slots::

    reader 0: slots taken | time of its last beat | 1 while it sleeps | its process id
    reader 1: …
    slot: sequence number | length, and whether the message goes on in the next slot | checksum | payload

A slot is free once every reader has read it. Python has no memory fences, so a reader trusts a slot only if the
checksum over number, length and payload is right. A reader polls for ``spin_s`` and then sleeps on a pipe; the writer
writes a byte to the pipes of sleeping readers. If a reader falls asleep just while the writer looks, its sleep ends by
itself after ``_NAP_MS``.
"""

import mmap
import os
import select
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

NUM_SLOTS, SLOT_BYTES = 64, 64 * 1024
"""Number and size of slots: 4 MiB, enough for many decode steps. The tokens of a long prompt need several slots."""

_LINE_BYTES = 64
_TAKEN, _BEAT, _SLEEPS, _PID = 0, 1, 2, 3
_SLOT = struct.Struct("@QII")
_PAYLOAD = SLOT_BYTES - _SLOT.size
_GOES_ON = 1 << 31
_NAP_MS = 100
_WAIT_S = 20e-6


class Address(msgspec.Struct, frozen=True):
    """The address of a ring for readers: the writer's process, and descriptors of the memory and of one pipe per
    reader."""

    pid: int
    memory: int
    pipes: list[int]

    def open(self, descriptor: int, flags: int) -> int:
        return os.open(f"/proc/{self.pid}/fd/{descriptor}", flags)


class _Memory:
    """The mapped memory, with named positions."""

    def __init__(self, descriptor: int, num_readers: int) -> None:
        self._first_slot = num_readers * _LINE_BYTES
        self.size = self._first_slot + NUM_SLOTS * SLOT_BYTES
        if os.fstat(descriptor).st_size < self.size:
            os.ftruncate(descriptor, self.size)
        self._map = mmap.mmap(descriptor, self.size)
        self.bytes = memoryview(self._map)
        lines = self.bytes[: self._first_slot]
        self._numbers, self._moments = lines.cast("Q"), lines.cast("d")

    def number(self, reader: int, field: int) -> int:
        return self._numbers[reader * (_LINE_BYTES // 8) + field]

    def set_number(self, reader: int, field: int, value: int) -> None:
        self._numbers[reader * (_LINE_BYTES // 8) + field] = value

    def beat(self, reader: int) -> float:
        return self._moments[reader * (_LINE_BYTES // 8) + _BEAT]

    def set_beat(self, reader: int, moment: float) -> None:
        self._moments[reader * (_LINE_BYTES // 8) + _BEAT] = moment

    def slot(self, sequence: int) -> memoryview:
        start = self._first_slot + sequence % NUM_SLOTS * SLOT_BYTES
        return self.bytes[start : start + SLOT_BYTES]

    def close(self) -> None:
        for view in (self._numbers, self._moments, self.bytes):
            view.release()
        with suppress(BufferError):  # a view is in use; the memory goes with the process
            self._map.close()


class Writer:
    """The sending end."""

    def __init__(self, num_readers: int) -> None:
        self._descriptor = os.memfd_create("weft-ring")
        self._memory = _Memory(self._descriptor, num_readers)
        self._pipes = [os.pipe() for _ in range(num_readers)]
        for _, write_end in self._pipes:
            os.set_blocking(write_end, False)
        self._sequence = 0

    @property
    def address(self) -> Address:
        return Address(os.getpid(), self._descriptor, [read_end for read_end, _ in self._pipes])

    def send(self, message: bytes, check: Callable[[], None]) -> None:
        """Queue ``message`` for every reader. Waits while the ring is full.

        Args:
            check: called while waiting. It raises if waiting is in vain.
        """
        parts = [message[i : i + _PAYLOAD] for i in range(0, len(message), _PAYLOAD)] or [b""]
        for number, part in enumerate(parts):
            self._put(part, goes_on=number + 1 < len(parts), check=check)
        for reader, (_, write_end) in enumerate(self._pipes):
            if self._memory.number(reader, _SLEEPS):
                with suppress(BlockingIOError):  # the pipe is full of wake-ups already
                    os.write(write_end, b"\0")

    def _put(self, part: bytes, *, goes_on: bool, check: Callable[[], None]) -> None:
        while self._sequence - self._least_taken() >= NUM_SLOTS:
            check()
            time.sleep(_WAIT_S)
        slot = self._memory.slot(self._sequence)
        self._sequence += 1
        length = len(part) | (_GOES_ON if goes_on else 0)
        slot[_SLOT.size : _SLOT.size + len(part)] = part
        _SLOT.pack_into(slot, 0, self._sequence, length, _checksum(self._sequence, length, part))

    def _least_taken(self) -> int:
        return min(self._memory.number(reader, _TAKEN) for reader in range(len(self._pipes)))

    def beats(self) -> Sequence[tuple[int, float]]:
        """Process id and time of the last heartbeat of each reader; 0 and 0.0 before its first."""
        return [(self._memory.number(r, _PID), self._memory.beat(r)) for r in range(len(self._pipes))]

    def close(self) -> None:
        self._memory.close()
        for descriptor in (self._descriptor, *(end for pipe in self._pipes for end in pipe)):
            os.close(descriptor)


class Reader:
    """A receiving end.

    Args:
        spin_s: seconds to poll before sleeping.
    """

    def __init__(self, address: Address, index: int, spin_s: float) -> None:
        self._index, self._spin_s = index, spin_s
        descriptor = address.open(address.memory, os.O_RDWR)
        self._memory = _Memory(descriptor, len(address.pipes))
        os.close(descriptor)
        self._pipe = address.open(address.pipes[index], os.O_RDONLY | os.O_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._pipe, select.POLLIN)
        self._sequence = 0
        self.beat()

    def beat(self) -> None:
        """Write this process's heartbeat."""
        self._memory.set_number(self._index, _PID, os.getpid())
        self._memory.set_beat(self._index, time.monotonic())

    def receive(self) -> bytes:
        """Receive the next message.

        Raises:
            EOFError: the writer's process is gone.
        """
        parts: list[bytes] = []
        goes_on = True
        while goes_on:
            part, goes_on = self._take()
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _take(self) -> tuple[bytes, bool]:
        slot = self._memory.slot(self._sequence)
        found = self._look(slot)
        deadline = time.monotonic() + self._spin_s
        while found is None:
            if time.monotonic() > deadline:
                found = self._sleep(slot)
            else:
                found = self._look(slot)
        self._sequence += 1
        self._memory.set_number(self._index, _TAKEN, self._sequence)
        return found

    def _look(self, slot: memoryview) -> tuple[bytes, bool] | None:
        sequence, length, checksum = _SLOT.unpack_from(slot)
        if sequence != self._sequence + 1:
            return None
        count = length & ~_GOES_ON
        if count > _PAYLOAD:
            return None
        part = bytes(slot[_SLOT.size : _SLOT.size + count])
        return (part, bool(length & _GOES_ON)) if checksum == _checksum(sequence, length, part) else None

    def _sleep(self, slot: memoryview) -> tuple[bytes, bool] | None:
        self._memory.set_number(self._index, _SLEEPS, 1)
        found = self._look(slot)
        if found is None and self._poll.poll(_NAP_MS):
            self._drain()
            found = self._look(slot)
        self._memory.set_number(self._index, _SLEEPS, 0)
        return found

    def _drain(self) -> None:
        try:
            if not os.read(self._pipe, 4096):
                raise EOFError("the process that leads the ranks has gone")
        except BlockingIOError:
            return


def _checksum(sequence: int, length: int, part: bytes) -> int:
    return zlib.crc32(part, zlib.crc32(_SLOT.pack(sequence, length, 0)))
