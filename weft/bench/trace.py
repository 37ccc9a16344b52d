"""Replay a trace of requests whose prompts share blocks, as those of agents do: hit rates, TTFT, ITL, tokens/s.

Job: read a trace, make its prompts, send them to a server of the OpenAI protocol, and compare what the server reused
with what an unbounded cache would. Owns: the format. Does not know: Weft's cache; tiers are read from the metrics.

A line of a trace is one request, in the format of Mooncake (Qin et al., FAST 2025) with the fields that AIPerf adds:

    {"timestamp": 1200, "input_length": 1090, "output_length": 64, "hash_ids": [7, 8, 9]}
    {"session_id": "a", "delay": 900, "input_length": 1500, "output_length": 64, "hash_ids": [7, 8, 11]}

``hash_ids`` name the blocks of the whole prompt. Equal ids stand for equal tokens; the last block may be cut. Agents
append to their prompts, but a cut block has another hash than the whole one. So if a session's next prompt begins with
the same whole blocks, its next block is taken for the cut one too.

``timestamp`` and ``delay`` are in milliseconds. Requests of one ``session_id`` follow each other: a request is
sent ``delay`` after the previous answer's last token. Without ``delay`` the difference of their timestamps counts.
"""

import asyncio
import itertools
import json
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import msgspec
import numpy as np

from weft.bench.http_client import HttpClient, Target
from weft.bench.serve import Outcome, ask, summary
from weft.errors import ConfigError

EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
"""The server's counter of prompt tokens that came from tiers below the device."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace. Times are in seconds; ``think_s`` is None where timestamps say when a request comes."""

    start_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    session: str
    think_s: float | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """How a trace is replayed.

    Attributes:
        block_size: tokens of a block.
        vocab_size: prompts have token ids below this number.
        rate: factor on the speed of arrivals and think times.
        sessions: upper bound on sessions at a time; None: no limit.
    """

    block_size: int = 512
    vocab_size: int = 1000
    rate: float = 1.0
    sessions: int | None = None


def read_trace(path: str | Path, scale: float = 1.0) -> list[TraceRequest]:
    """Read a trace, in the order of arrival. ``scale`` multiplies input and output lengths.

    Raises:
        ConfigError: if the file cannot be read, or a line lacks a field or holds a wrong value. It names the line.
    """
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace {path}: {error}") from error
    found: list[TraceRequest] = []
    starts: dict[str, float] = {}
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                found.append(_request(json.loads(line), number, scale, starts))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"trace {path}, line {number}: {type(error).__name__}: {error}; give input_length and output_length "
                "of 1 or more and hash_ids, and a timestamp or a session_id"
            ) from error
    if not found:
        raise ConfigError(f"trace {path}: it holds no request")
    first = min(request.start_s for request in found)
    return sorted((replace(r, start_s=r.start_s - first) for r in found), key=lambda request: request.start_s)


def _request(line: dict[str, Any], number: int, scale: float, starts: dict[str, float]) -> TraceRequest:
    """The request of a line. ``starts`` has the last start of each session, which counts for lines without one."""
    if "timestamp" not in line and "session_id" not in line:
        raise KeyError("timestamp")
    lengths = [int(line[name]) for name in ("input_length", "output_length")]
    if min(lengths) < 1:
        raise ValueError(f"lengths {lengths}")
    delay, session = line.get("delay"), str(line.get("session_id", f"line {number}"))
    starts[session] = float(line["timestamp"]) / 1e3 if "timestamp" in line else starts.get(session, 0.0)
    return TraceRequest(
        start_s=starts[session],
        input_length=max(1, round(lengths[0] * scale)),
        output_length=max(1, round(lengths[1] * scale)),
        hash_ids=tuple(int(each) for each in line["hash_ids"]),
        session=session,
        think_s=None if delay is None else float(delay) / 1e3,
    )


def sessions_of(requests: Iterable[TraceRequest]) -> list[list[TraceRequest]]:
    """Requests by session, sessions in the order of their first request."""
    found: dict[str, list[TraceRequest]] = {}
    for request in requests:
        found.setdefault(request.session, []).append(request)
    return list(found.values())


def with_appended_blocks(requests: Sequence[TraceRequest], block_size: int) -> list[TraceRequest]:
    """Give a cut last block the id of its block in the session's next prompt, if that prompt appends to this one."""
    followers = {
        id(earlier): later for session in sessions_of(requests) for earlier, later in itertools.pairwise(session)
    }
    found = []
    for request in requests:
        full, follower = request.input_length // block_size, followers.get(id(request))
        if follower is not None and follower.hash_ids[:full] == request.hash_ids[:full]:
            request = replace(request, hash_ids=follower.hash_ids[: full + 1])
        found.append(request)
    return found


def reusable_tokens(requests: Iterable[TraceRequest], block_size: int) -> int:
    """Prompt tokens that an unbounded cache would hold. One token of each prompt is always computed."""
    cached: dict[int, int] = {}  # by chain of blocks: tokens from the prompt's beginning
    total = 0
    for request in requests:
        chain, matched, is_known = 0, 0, True
        for place, block in enumerate(request.hash_ids, 1):
            chain, end = hash((chain, block)), min(place * block_size, request.input_length)
            if is_known:
                matched = min(cached.get(chain, matched), end)
                is_known = matched == place * block_size
            cached[chain] = max(cached.get(chain, 0), end)
        total += min(matched, request.input_length - 1)
    return total


def prompt_of(request: TraceRequest, number: int, replay: Replay) -> list[int]:
    """Token ids of the prompt. Tokens beyond the blocks differ from those of every other request."""
    size, length = replay.block_size, request.input_length
    parts = [_block(each, replay) for each in request.hash_ids[: -(-length // size)]]
    missing = length - size * len(parts)
    if missing > 0:
        parts.append(np.random.default_rng((1, number)).integers(0, replay.vocab_size, missing))
    return np.concatenate(parts)[:length].tolist()


def _block(hash_id: int, replay: Replay) -> np.ndarray:
    return np.random.default_rng((0, hash_id)).integers(0, replay.vocab_size, replay.block_size)


@dataclass(slots=True)
class Answer:
    """The outcome of one request, and when it was sent, in seconds after the start."""

    request: TraceRequest
    sent_s: float
    outcome: Outcome


def measure(target: Target, model: str | None, requests: Sequence[TraceRequest], replay: Replay) -> dict[str, Any]:
    """Replay the trace. Returns the figures of ``summary``, hit rates, and a row for each request in order of sending.

    ``hit_rate`` is the share of prompt tokens that the server reused, from whatever tier. ``theoretical_hit_rate`` is
    that of an unbounded cache. ``external_hit_rate`` is the part from tiers below the device. It is None if the server
    does not count it.
    """
    requests = with_appended_blocks(requests, replay.block_size)
    before = _external_hits(target)
    began = time.perf_counter()
    answers = asyncio.run(_replay(target, model, requests, replay))
    seconds = time.perf_counter() - began
    after = _external_hits(target)
    prompt_tokens = sum(answer.outcome.prompt_tokens for answer in answers)
    good = [answer.request for answer in answers if answer.outcome.error is None]
    asked = sum(request.input_length for request in good)
    rate = sum(answer.outcome.cached_tokens for answer in answers) / max(1, prompt_tokens)
    best = reusable_tokens(good, replay.block_size) / max(1, asked)
    below = None if before is None or after is None else round((after - before) / max(1, prompt_tokens), 4)
    return summary([answer.outcome for answer in answers], seconds, {}) | {
        "hit_rate": round(rate, 4),
        "theoretical_hit_rate": round(best, 4),
        "external_hit_rate": below,
        "rows": [
            [round(a.sent_s, 3), round(a.outcome.ttft_s * 1e3, 2), a.outcome.prompt_tokens, a.outcome.cached_tokens]
            for a in answers
        ],
    }


async def _replay(target: Target, model: str | None, requests: Sequence[TraceRequest], replay: Replay) -> list[Answer]:
    client = HttpClient(target)
    room = asyncio.Semaphore(replay.sessions or 1_000_000)
    numbers = {id(request): number for number, request in enumerate(requests)}
    began = time.perf_counter()
    answers: list[Answer] = []

    async def run(session: list[TraceRequest]) -> None:
        wait_s = session[0].start_s / replay.rate - (time.perf_counter() - began)
        await asyncio.sleep(max(0.0, wait_s))
        async with room:
            for before, request in zip([None, *session], session, strict=False):
                if before is not None:
                    think_s = request.start_s - before.start_s if request.think_s is None else request.think_s
                    await asyncio.sleep(max(0.0, think_s) / replay.rate)
                prompt = prompt_of(request, numbers[id(request)], replay)
                answers.append(answer := Answer(request, time.perf_counter() - began, Outcome()))
                body = _body(model, prompt, request.output_length)
                # A chunk counts even if its text is empty, since a character may span several tokens.
                await ask(client, "/completions", body, answer.outcome, lambda _: True)

    await asyncio.gather(*(run(session) for session in sessions_of(requests)))
    client.close()
    return answers


def _body(model: str | None, prompt: list[int], output_length: int) -> bytes:
    body: dict[str, Any] = {
        "prompt": prompt, "max_tokens": output_length, "ignore_eos": True, "temperature": 0.0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    return msgspec.json.encode(body if model is None else body | {"model": model})


def _external_hits(target: Target) -> float | None:
    """Tokens that came from tiers below the device so far; None if the server has no such counter."""
    scheme = "https" if target.secure else "http"
    try:
        with urlopen(f"{scheme}://{target.host}:{target.port}/metrics", timeout=10) as answer:
            text = answer.read().decode("utf-8", "replace")
    except (OSError, URLError, ValueError):
        return None
    found = re.findall(rf"^{re.escape(EXTERNAL_HITS)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, found)) if found else None
