"""Logging through a thread, so that no caller waits for the disk or for a full pipe."""

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque

MAX_QUEUED = 10_000
"""Upper bound on queued lines. Further lines are dropped and counted."""

_BATCH_S = 0.05
"""Seconds for which lines are collected before one write, since a write costs more than a line."""

_RETRY_S = 0.5
_CLOSE_S = 1.0


class LogWriter:
    """Write lines to a file descriptor, in a thread. ``num_dropped``: lines dropped since the last successful write."""

    def __init__(self, fd: int, max_queued: int = MAX_QUEUED) -> None:
        self._fd = fd
        self._max_queued = max_queued
        self._lines: deque[str] = deque()
        self._lock = threading.Lock()
        self._has_lines = threading.Event()
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._is_closing = threading.Event()
        self.num_dropped = 0
        threading.Thread(target=self._run, name="log writer", daemon=True).start()

    def put(self, line: str) -> None:
        """Queue a line, or drop the line if the queue is full. Never blocks, never raises."""
        if len(self._lines) >= self._max_queued:
            with self._lock:
                self.num_dropped += 1
            return
        self._lines.append(line)
        if not self._has_lines.is_set():
            self._is_idle.clear()
            self._has_lines.set()

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Wait up to ``timeout_s`` until the queued lines are written."""
        self._is_closing.set()
        self._is_idle.wait(timeout_s)

    def _run(self) -> None:
        while True:
            self._has_lines.wait()
            self._is_closing.wait(_BATCH_S)
            self._has_lines.clear()
            self._write_out([self._lines.popleft() for _ in range(len(self._lines))])
            if not self._has_lines.is_set():
                self._is_idle.set()

    def _write_out(self, lines: list[str]) -> None:
        with self._lock:
            dropped = self.num_dropped
        notice = [f"weft: {dropped} lines of the log could not be written and were dropped"] if dropped else []
        content = "".join(f"{line}\n" for line in notice + lines).encode("utf-8", "backslashreplace")
        try:
            while content:
                content = content[os.write(self._fd, content) :]
        except OSError:  # the disk is full, or nobody reads the pipe
            with self._lock:
                self.num_dropped += len(lines)
            time.sleep(_RETRY_S)
            return
        with self._lock:
            self.num_dropped -= dropped


class LogHandler(logging.Handler):
    """Formats records and hands them to a writer."""

    def __init__(self, writer: LogWriter, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:  # an error in logging must not break the caller
            line = f"a log line of {record.name} could not be formatted: {error}"
        self.writer.put(line)


_stderr: LogWriter | None = None


def stderr_writer() -> LogWriter:
    """The one writer of this process's standard error."""
    global _stderr
    if _stderr is None:
        fd = 2
        with contextlib.suppress(OSError, ValueError, AttributeError):
            fd = sys.stderr.fileno()
        _stderr = LogWriter(fd)
    return _stderr


def configure_logging(formatter: logging.Formatter, level: int) -> LogWriter:
    """Send this process's whole log to standard error, through its writer."""
    writer = stderr_writer()
    root = logging.getLogger()
    root.handlers[:] = [LogHandler(writer, formatter)]
    root.setLevel(level)
    return writer
