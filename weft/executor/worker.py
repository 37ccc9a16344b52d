"""A rank other than 0: ``python -m weft.executor.worker``, started by ``MultiProcessExecutor``.

Job: load libraries, read which rank to be, join the group, build the rank's runner, then run every step from the ring.
Owns: the life of this process. Does not know: requests, or results (rank 0 reads its own copy).

The process ends when asked to (an empty message), when the process of rank 0 is gone, or with an error, which it
reports first. It ignores the signals that a terminal sends to the whole group, since rank 0 gets them too.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from weft.config import EngineConfig
from weft.config.transport import decode_other, encode_other
from weft.errors import CapacityError, ConfigError, UnavailableError, WeftError
from weft.executor.ring import Address, Reader
from weft.messages import SchedulerOutput
from weft.processes.collector import collector_off
from weft.processes.heartbeat import BEAT_S
from weft.processes.lifeline import leave_signals_to_parent
from weft.processes.log_format import LogFormatter
from weft.processes.preload import import_torch

if TYPE_CHECKING:
    from torch.distributed import Store

    from weft.executor.rank import Rank

logger = logging.getLogger(__name__)

FAILED_STATUS = 70
"""Exit status of a rank that has reported its failure."""

STOP = b""
"""The message that ends a rank."""

COMMAND = b"\xc1"
"""The first byte of a message that is a command (``runner/rollouts.py``). No step begins with it in MessagePack."""


class WorkerStart(msgspec.Struct, frozen=True):
    """The start message of a rank.

    Attributes:
        size: number of ranks.
        config: the settings, resolved by rank 0.
        ring: the ring of steps. Rank N is reader ``N - 1``.
        num_threads: number of torch's threads on the CPU, the same on all ranks so that they compute the same bits.
        spin_s: seconds of polling before the rank sleeps.
        verbose: log decisions.
    """

    size: int
    config: EngineConfig
    ring: Address
    num_threads: int
    spin_s: float
    verbose: bool = False
    log_json: bool = False


class Report(msgspec.Struct, frozen=True):
    """A report of a rank, a line of JSON.

    Attributes:
        kind: ``stage``, ``ready`` or ``failed``.
        text: name of the stage, or reason of the failure.
        seconds: time of the stage.
        user_error: whether the settings or the checkpoint caused the failure.
    """

    kind: str
    text: str = ""
    seconds: float = 0.0
    user_error: bool = False


encode_start = msgspec.msgpack.Encoder(enc_hook=encode_other).encode
decode_start = msgspec.msgpack.Decoder(tuple[WorkerStart, int, str, int], dec_hook=decode_other).decode
"""The standard input of a rank: the start message, the rank, the file through which ranks find each other, the
descriptor for reports."""
encode_step = msgspec.msgpack.Encoder(enc_hook=encode_other).encode
decode_step = msgspec.msgpack.Decoder(SchedulerOutput, dec_hook=decode_other).decode
decode_report = msgspec.json.Decoder(Report).decode


def run_rank(start: WorkerStart, rank: int, store: Callable[[], Store], send: Callable[[Report], None]) -> None:
    """Build the rank and run steps, until asked to stop.

    Args:
        store: returns the store through which ranks find each other; called after torch is imported.

    Raises:
        EOFError: rank 0 is gone.
    """
    reader = Reader(start.ring, rank - 1, start.spin_s)
    _keep_beating(reader)
    send(Report("stage", "libraries", _load_libraries()))
    import torch

    from weft.executor.rank import Rank

    torch.set_num_threads(start.num_threads)
    with Rank(start.config, rank, start.size, store()) as worker:
        for name, seconds in worker.runner.startup.seconds.items():
            send(Report("stage", name, seconds))
        send(Report("ready"))
        while (message := reader.receive()) != STOP:
            if message.startswith(COMMAND):
                _run_command(worker, message[len(COMMAND) :])
            else:
                worker.runner.launch(decode_step(message))


def _run_command(worker: Rank, message: bytes) -> None:
    """Run a command. An error on which all ranks agree does not end the rank."""
    from weft.runner.rollouts import Command

    command = msgspec.msgpack.decode(message, type=Command)
    try:
        worker.control.run(command)
    except (ConfigError, UnavailableError, CapacityError) as error:
        logger.warning("rank %d: %s", worker.runner.tp.rank, error)


@functools.cache
def _load_libraries() -> float:
    """Import torch and the model code. Returns the seconds of the first call."""
    began = time.monotonic()
    import_torch()
    with collector_off():
        import weft.executor.rank  # noqa: F401
    return time.monotonic() - began


def _keep_beating(reader: Reader) -> None:
    """Send a heartbeat from a thread."""

    def beat() -> None:
        while True:
            reader.beat()
            time.sleep(BEAT_S)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


def main() -> int:
    """Run one rank. Returns its exit status."""
    leave_signals_to_parent()
    _load_libraries()
    given = sys.stdin.buffer.read()
    if not given:
        return 1  # rank 0 is gone before it needed this rank
    start, rank, path, descriptor = decode_start(given)
    level = logging.INFO if start.verbose else logging.WARNING
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter(start.log_json, f"rank {rank}"))
    logging.basicConfig(level=level, handlers=[handler])
    reports = os.fdopen(descriptor, "wb", buffering=0)

    def send(report: Report) -> None:
        reports.write(msgspec.json.encode(report) + b"\n")

    def store() -> Store:
        from torch.distributed import FileStore

        return FileStore(path, start.size)

    try:
        run_rank(start, rank, store, send)
    except EOFError:
        return _leave_nothing(path)
    except Exception as error:
        text = str(error) if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"
        try:
            send(Report("failed", text, user_error=isinstance(error, ConfigError)))
        except BrokenPipeError:  # rank 0 is gone in the middle of a step, which is the error
            return _leave_nothing(path)
        if not isinstance(error, WeftError):
            logger.exception("rank %d ends", rank)
        return FAILED_STATUS
    return 0


def _leave_nothing(store: str) -> int:
    """Remove the folder of the store, since rank 0 is gone and cannot."""
    shutil.rmtree(Path(store).parent, ignore_errors=True)
    return 1


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # a device that waits for a dead rank would keep the interpreter from ending
