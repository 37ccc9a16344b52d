"""One hour of server metrics: token rates, latencies, responses.

Job: add up events in intervals of 1 s (two minutes of them) and of 10 s (an hour), and give them with percentiles.
Owns: the intervals. Does not know: who reports an event, how it is drawn.

Percentiles come from histograms whose buckets grow by 7%, so percentiles are exact to 4%. Histograms are added, so the
percentile of an hour is a percentile of all tokens of the hour. An event costs under a microsecond. There is no timer:
the first event or reader after the end of an interval closes it.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from weft.stats import EngineStats

FINE_S, RECENT_S = 1, 120
"""Length of an interval of the recent past, and how far that goes back."""

COARSE_S, HOUR_S = 10, 3600
"""The same of the hour."""

PERCENTILES = (50, 90, 99)

_GROWTH = math.log(1.07)
_SMALLEST_S = 1e-5


class LatencyHistogram(Counter[int]):
    """Seconds, by buckets of equal ratio."""

    def observe(self, seconds: float, count: int = 1) -> None:
        self[math.ceil(math.log(max(seconds, _SMALLEST_S) / _SMALLEST_S) / _GROWTH)] += count

    def percentile(self, percent: float) -> float:
        """The middle of the bucket in which this percentile lies, in seconds."""
        rank, seen = self.total() * percent / 100, 0
        for bucket in sorted(self):
            seen += self[bucket]
            if seen >= rank:
                break
        return _SMALLEST_S * math.exp((bucket - 0.5) * _GROWTH)

    def percentiles(self) -> list[float] | None:
        """p50, p90 and p99; None if nothing was observed."""
        if not self:
            return None
        return [float(f"{self.percentile(percent):.3g}") for percent in PERCENTILES]


@dataclass(slots=True)
class Interval:
    """Sums from ``start`` on. Gauges (``num_running``, ``num_waiting``) are the largest seen.

    ``num_verifications``: how often a request's drafts were verified.

    ``responses``: calls answered ``ok``, ``refused`` (4xx), ``overloaded`` (429), ``failed`` (5xx); requests ``broken``
    in the engine, whose call fails, or whose stream ends with an error.
    """

    start: int
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_verifications: int = 0
    num_accepted_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    responses: Counter[str] = field(default_factory=Counter)
    first_token: LatencyHistogram = field(default_factory=LatencyHistogram)
    inter_token: LatencyHistogram = field(default_factory=LatencyHistogram)

    def add(self, other: Interval) -> None:
        self.num_prefill_tokens += other.num_prefill_tokens
        self.num_decode_tokens += other.num_decode_tokens
        self.num_verifications += other.num_verifications
        self.num_accepted_tokens += other.num_accepted_tokens
        self.num_running = max(self.num_running, other.num_running)
        self.num_waiting = max(self.num_waiting, other.num_waiting)
        self.responses.update(other.responses)
        self.first_token.update(other.first_token)
        self.inter_token.update(other.inter_token)

    def add_calls(self, other: CallInterval) -> None:
        """Another process's calls in the same interval; what the engine did, every process knows."""
        self.responses.update(other.responses)
        self.first_token.update(other.first_token)
        self.inter_token.update(other.inter_token)

    def point(self, length_s: int) -> dict[str, Any]:
        """Return the interval as JSON: tokens per second, completions, percentiles in seconds.

        ``accepted_length`` is the number of tokens per verification step, or None without such steps.
        """
        accepted = self.num_accepted_tokens / self.num_verifications if self.num_verifications else None
        return {
            "start": self.start,
            "prefill": round(self.num_prefill_tokens / length_s, 2),
            "decode": round(self.num_decode_tokens / length_s, 2),
            "accepted_length": None if accepted is None else round(1 + accepted, 3),
            "running": self.num_running,
            "waiting": self.num_waiting,
            "responses": dict(self.responses),
            "first_token": self.first_token.percentiles(),
            "inter_token": self.inter_token.percentiles(),
        }


class CallInterval(msgspec.Struct, array_like=True):
    """The report of one process about an interval; see ``Interval``."""

    start: int
    responses: dict[str, int]
    first_token: dict[int, int]
    inter_token: dict[int, int]


class Track:
    """Intervals of one length, as far back as ``span_s``. Only those in which something happened are kept."""

    def __init__(self, length_s: int, span_s: int) -> None:
        self.length_s, self.span_s = length_s, span_s
        self._closed: deque[tuple[Interval, dict[str, Any]]] = deque()

    def close(self, interval: Interval) -> None:
        self._forget(interval.start)
        self._closed.append((interval, interval.point(self.length_s)))

    def _forget(self, now: float) -> None:
        while self._closed and self._closed[0][0].start < now - self.span_s:
            self._closed.popleft()

    def report(self) -> bytes:
        """The calls of the intervals that something happened in."""
        intervals = [interval for interval, _ in self._closed]
        return msgspec.msgpack.encode(
            [CallInterval(i.start, i.responses, i.first_token, i.inter_token) for i in intervals]
        )

    def with_calls(self, reports: list[bytes]) -> Track:
        """The same intervals, with the calls that all processes report, this one's among them."""
        merged: dict[int, Interval] = {}
        for interval, _ in self._closed:
            mine = merged[interval.start] = Interval(interval.start)
            mine.add(interval)
            mine.responses, mine.first_token, mine.inter_token = Counter(), LatencyHistogram(), LatencyHistogram()
        for report in reports:
            for calls in msgspec.msgpack.decode(report, type=list[CallInterval]):
                merged.setdefault(calls.start, Interval(calls.start)).add_calls(calls)
        track = Track(self.length_s, self.span_s)
        for start in sorted(merged):
            track.close(merged[start])
        return track

    def view(self, now: float) -> dict[str, Any]:
        """The intervals of the last ``span_s``, and their sum."""
        self._forget(now)
        total = Interval(0)
        for interval, _ in self._closed:
            total.add(interval)
        return {
            "interval_s": self.length_s,
            "span_s": self.span_s,
            "points": [point for _, point in self._closed],
            "responses": dict(total.responses),
            "first_token": total.first_token.percentiles(),
            "inter_token": total.inter_token.percentiles(),
            "num_first_tokens": total.first_token.total(),
            "num_inter_tokens": total.inter_token.total(),
        }


class History:
    """The last hour of one server process.

    Args:
        clock: gives seconds; ``time.monotonic``, like the engine's moments.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._stats: EngineStats | None = EngineStats()
        self._recent, self._hour = Track(FINE_S, RECENT_S), Track(COARSE_S, HOUR_S)
        self._fine = self._coarse = Interval(0)

    def join(self) -> None:
        """The engine may have run before: what it did until its next report was not done since then."""
        self._stats = None

    def engine_reported(self, stats: EngineStats) -> None:
        """After a step. Counters of a restarted engine begin again from zero."""
        interval = self._current()
        before, self._stats = self._stats or stats, stats
        if stats.num_steps < before.num_steps:
            before = EngineStats()
        interval.num_prefill_tokens += stats.num_prefill_tokens - before.num_prefill_tokens
        interval.num_decode_tokens += stats.num_decode_tokens - before.num_decode_tokens
        accepted = stats.spec_decode_num_accepted_tokens - before.spec_decode_num_accepted_tokens
        interval.num_verifications += stats.spec_decode_num_drafts - before.spec_decode_num_drafts
        interval.num_accepted_tokens += accepted
        interval.num_running = max(interval.num_running, stats.num_running)
        interval.num_waiting = max(interval.num_waiting, stats.num_waiting)

    def first_token(self, seconds: float) -> None:
        """A request got its first token, so long after its arrival."""
        self._current().first_token.observe(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        """``count`` requests got a further token, so long after their token before."""
        self._current().inter_token.observe(seconds, count)

    def iteration(self, num_tokens: int) -> None:
        """Not kept: rates come from the engine's own counters."""

    def responded(self, status: int) -> None:
        """A completion was answered or refused."""
        kind = "failed" if status >= 500 else "overloaded" if status == 429 else "refused" if status >= 400 else "ok"
        self._current().responses[kind] += 1

    def broke(self) -> None:
        """The engine ended a request with an error."""
        self._current().responses["broken"] += 1

    def view(self, name: str, reports: list[bytes]) -> dict[str, Any]:
        """The last hour (``hour``), or the last two minutes (``recent``), without the interval that runs. Moments are
        those of the clock; nothing happened in intervals that are not listed, and nothing was measured before
        ``began``. ``reports``: of all API processes, as ``report`` gives them."""
        return {"began": self._began} | self._track(name).with_calls(reports).view(self._clock())

    def report(self, name: str) -> bytes:
        """The calls of this process."""
        return self._track(name).report()

    def _track(self, name: str) -> Track:
        self._current()
        return self._hour if name == "hour" else self._recent

    def _current(self) -> Interval:
        """The interval that runs; those that ended meanwhile are closed."""
        now = int(self._clock())
        if self._fine.start == now:
            return self._fine
        if self._fine.start:
            self._recent.close(self._fine)
            self._coarse.add(self._fine)
        if self._coarse.start != now - now % COARSE_S:
            if self._coarse.start:
                self._hour.close(self._coarse)
            self._coarse = Interval(now - now % COARSE_S)
        self._fine = Interval(now)
        return self._fine
