"""One log line per call.

What a call was and how it ended, as text or as JSON; prompts and answers are never logged.
"""

import logging
import time

from weft.engine.response_stream import ResponseStream
from weft.processes.log_format import LogFormatter
from weft.processes.log_writer import LogHandler, LogWriter, configure_logging
from weft.server.client import Client

logger = logging.getLogger("weft.requests")


class RequestLog:
    """Writes the lines, past the logging package, which takes longer than all else about them."""

    def __init__(self) -> None:
        self._handler = next((h for h in logging.getLogger().handlers if isinstance(h, LogHandler)), None)

    def ended(self, call_id: str, stream: ResponseStream, client: Client) -> None:
        if self._handler is None or not logger.isEnabledFor(logging.INFO):
            return
        requests = stream.requests
        firsts = requests if len(stream.outputs) == len(requests) else [o.requests[0] for o in stream.outputs]
        first = requests[0]
        times = first.times
        fields = {
            "request_id": call_id,
            "trace_id": client.trace_id,
            "prompt_tokens": sum([request.num_prompt_tokens for request in firsts]),
            "cached_tokens": sum([request.num_cached_tokens or 0 for request in firsts]),
            "completion_tokens": sum([len(request.output_token_ids) for request in requests]),
            "finish_reasons": sorted({r.finish_reason or "abort" for r in requests}),
            "queue_s": _since(times.arrival, times.first_scheduled),
            "ttft_s": _since(times.arrival, times.first_token),
            "e2e_s": round(time.monotonic() - times.arrival, 4),
            "cache": str(first.cache_report) if first.cache_report is not None else None,
        }
        known = {name: value for name, value in fields.items() if value is not None}
        formatter = self._handler.formatter
        assert isinstance(formatter, LogFormatter)
        self._handler.writer.put(formatter.line(time.time(), "info", logger.name, "call ended", known))


def _since(start: float, moment: float | None) -> float | None:
    return None if moment is None else round(moment - start, 4)


def configure(as_json: bool, verbose: bool) -> LogWriter:
    """Send the log to stderr; one line per call at level INFO."""
    logger.setLevel(logging.INFO)
    return configure_logging(LogFormatter(as_json), logging.INFO if verbose else logging.WARNING)
