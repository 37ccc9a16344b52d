"""The ring: every reader gets every message, whole and in order, however slow it is."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from tests.patience import GUARD_S
from weft.executor import ring
from weft.executor.ring import NUM_SLOTS, SLOT_BYTES, Reader, Writer

ECHO = """
import sys, msgspec
from weft.executor.ring import Address, Reader
address = msgspec.json.decode(sys.argv[1], type=Address)
reader = Reader(address, int(sys.argv[2]), float(sys.argv[3]))
print("up", flush=True)
while True:
    try:
        message = reader.receive()
    except EOFError:
        print("gone", flush=True)
        break
    if not message:
        break
    print(len(message), message[:1].hex(), message[-1:].hex(), flush=True)
"""


def never() -> None:
    """Nobody has died."""


def start(writer: Writer, reader: int, spin_s: float) -> subprocess.Popen[str]:
    address = msgspec.json.encode(writer.address).decode()
    process = subprocess.Popen(
        [sys.executable, "-c", ECHO, address, str(reader), str(spin_s)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    return process


@pytest.mark.parametrize("spin_s", [0.0, 1e-3])
def test_every_reader_gets_every_message(spin_s: float) -> None:
    writer = Writer(2)
    readers = [start(writer, i, spin_s) for i in range(2)]
    lengths = [1, 2, SLOT_BYTES - 16, SLOT_BYTES - 15, 5 * SLOT_BYTES, 3 * NUM_SLOTS * SLOT_BYTES] + [
        700
    ] * 3 * NUM_SLOTS
    for i, length in enumerate(lengths):
        writer.send(bytes([i % 250]) + b"x" * (length - 2) + bytes([i % 7]) * (length > 1), never)
    writer.send(b"", never)
    want = [f"{n} {i % 250:02x} {i % 7 if n > 1 else i % 250:02x}" for i, n in enumerate(lengths)]
    for process in readers:
        out, _ = process.communicate(timeout=GUARD_S)
        assert out.splitlines() == want
    writer.close()


def test_a_full_ring_waits_and_asks_whether_waiting_is_in_vain() -> None:
    writer = Writer(1)
    reader = Reader(writer.address, 0, 0.0)

    def gone() -> None:
        raise RuntimeError("rank 1 is gone")

    for _ in range(NUM_SLOTS):
        writer.send(b"step", gone)
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        writer.send(b"one too many", gone)
    assert reader.receive() == b"step"
    writer.send(b"now", gone)
    writer.close()


def test_what_is_half_written_is_not_read() -> None:
    """A slot whose number is there and whose payload is not (memory need not become visible in order)."""
    writer = Writer(1)
    reader = Reader(writer.address, 0, 0.0)
    writer.send(b"hello", never)
    slot = reader._memory.slot(0)
    slot[18:19] = b"?"
    received: list[bytes] = []
    thread = threading.Thread(target=lambda: received.append(reader.receive()))
    thread.start()
    time.sleep(0.2)
    assert not received
    slot[18:19] = b"l"
    thread.join(GUARD_S)
    assert received == [b"hello"]
    writer.close()


def test_a_reader_that_sleeps_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "_NAP_MS", 1000 * GUARD_S)
    writer = Writer(1)
    reader = Reader(writer.address, 0, 0.0)
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(reader.receive()), daemon=True)
    thread.start()
    while not writer._memory.number(0, ring._SLEEPS):
        time.sleep(1e-3)
    time.sleep(0.05)
    writer.send(b"step", never)
    thread.join(GUARD_S / 2)
    assert got == [b"step"], "it would have slept on"
    writer.close()


def test_a_reader_sees_the_end_of_the_writer_s_process() -> None:
    code = (
        "import sys, msgspec, time; from weft.executor.ring import Writer; w = Writer(1);"
        "print(msgspec.json.encode(w.address).decode(), flush=True); sys.stdin.read()"
    )
    leader = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert leader.stdout is not None
    address = leader.stdout.readline()
    follower = subprocess.Popen([sys.executable, "-c", ECHO, address, "0", "0"], stdout=subprocess.PIPE, text=True)
    assert follower.stdout is not None and follower.stdout.readline() == "up\n"
    leader.kill()
    out, _ = follower.communicate(timeout=GUARD_S)
    assert out == "gone\n"
    leader.wait()


def test_nothing_is_left_in_the_file_system() -> None:
    before = set(os.listdir("/dev/shm"))
    writer = Writer(3)
    assert set(os.listdir("/dev/shm")) <= before
    writer.close()


def test_a_full_ring_takes_no_message_before_one_is_read() -> None:
    class Waits(Exception):
        pass

    def check() -> None:
        raise Waits

    writer = Writer(1)
    try:
        for number in range(NUM_SLOTS):
            writer.send(b"%d" % number, check)
        with pytest.raises(Waits):
            writer.send(b"one too many", check)
    finally:
        writer.close()
