"""The format of log lines, text or JSON, the same in every process of a server."""

import logging
import time
from functools import lru_cache
from typing import Any

import msgspec


class LogFormatter(logging.Formatter):
    """Format records as text with ``key=value``, or as JSON objects. A record's ``fields`` (a dict) become keys.

    Args:
        as_json: whether lines are JSON objects.
        process: name of the writing process, empty for the server. Text lines with a name have no time.
    """

    def __init__(self, as_json: bool, process: str = "") -> None:
        super().__init__()
        self.as_json, self._process = as_json, process

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        fields = record.__dict__.get("fields", {})
        return self.line(record.created, record.levelname.lower(), record.name, message, fields)

    def line(self, created: float, level: str, name: str, message: str, fields: dict[str, Any]) -> str:
        """Format one line. ``created``: Unix time."""
        if self._process and not self.as_json:
            return f"{self._process}: {name}: {message}"
        stamp = self._stamp(int(created)) + f".{int(created % 1 * 1000):03d}Z"
        if self.as_json:
            head = {"time": stamp, "level": level, "logger": name, "message": message}
            if self._process:
                head["process"] = self._process
            return msgspec.json.encode(head | fields).decode()
        text = " ".join([f"{key}={value}" for key, value in fields.items()])
        return f"{stamp} {level} {name}: {message}" + (f" {text}" if text else "")

    @staticmethod
    @lru_cache(maxsize=2)
    def _stamp(second: int) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


def logs_json() -> bool:
    """Whether this process's log is JSON."""
    formatters = [handler.formatter for handler in logging.getLogger().handlers]
    return any(isinstance(formatter, LogFormatter) and formatter.as_json for formatter in formatters)
