"""One log line per call.

Job: what a call was and how it ended, as text or as JSON. Owns: the fields of the line. Does not know: prompts or
answers: neither is ever logged.
"""

from __future__ import annotations

import logging
import time

import msgspec

from weft.engine.async_engine import ResponseStream
from weft.engine.logwriter import LogWriter, configure_logging
from weft.server.caller import Caller

logger = logging.getLogger("weft.requests")


class RequestLog:
    """Writes the lines."""

    def ended(self, call_id: str, stream: ResponseStream, caller: Caller) -> None:
        if not logger.isEnabledFor(logging.INFO):
            return
        requests = stream.requests
        first = requests[0]
        times = first.times
        fields = {
            "request_id": call_id,
            "trace_id": caller.trace_id,
            "prompt_tokens": sum(output.requests[0].num_prompt_tokens for output in stream.outputs),
            "cached_tokens": sum(output.requests[0].num_cached_tokens or 0 for output in stream.outputs),
            "completion_tokens": sum(len(r.output_token_ids) for r in requests),
            "finish_reasons": sorted({r.finish_reason or "abort" for r in requests}),
            "queue_s": _since(times.arrival, times.first_scheduled),
            "ttft_s": _since(times.arrival, times.first_token),
            "e2e_s": round(time.monotonic() - times.arrival, 4),
            "cache": str(first.cache_report) if first.cache_report is not None else None,
        }
        logger.info("call ended", extra={"fields": {k: v for k, v in fields.items() if v is not None}})


def _since(start: float, moment: float | None) -> float | None:
    return None if moment is None else round(moment - start, 4)


class Formatter(logging.Formatter):
    """Lines as ``key=value`` text or as JSON objects."""

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        fields = record.__dict__.get("fields", {})
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        head = {"time": stamp, "level": record.levelname.lower(), "logger": record.name, "message": message}
        if self._as_json:
            return msgspec.json.encode(head | fields).decode()
        text = " ".join(f"{key}={value}" for key, value in fields.items())
        return f"{stamp} {record.levelname.lower()} {record.name}: {message}" + (f" {text}" if text else "")


def configure(as_json: bool, verbose: bool) -> LogWriter:
    """Send the log to stderr; one line per call at level INFO."""
    logger.setLevel(logging.INFO)
    return configure_logging(Formatter(as_json), logging.INFO if verbose else logging.WARNING)
