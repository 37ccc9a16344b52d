"""Load on a server that speaks the OpenAI protocol: TTFT, TPOT, ITL, E2E, goodput.

Job: make conversations, send them at a rate or at a concurrency, and time every chunk. Owns: the workloads and the
figures. Does not know: Weft's server; any server of the protocol will do.

    TTFT  time to the first token       TPOT  (end - first token) / (tokens - 1)
    ITL   time between two chunks       E2E   time to the last token
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from weft.bench.http_client import HttpClient, HttpError, Target
from weft.errors import ConfigError

WORDS = "one two three red green blue small large house tree river stone light water bread paper north south".split()
KINDS = ("fixed", "random", "multi-turn", "trace")
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class ServeWorkload:
    """The workload.

    Attributes:
        kind: ``fixed``: every prompt has ``input_words[1]`` words. ``random``: a number between the two.
            ``multi-turn``: ``turns`` questions per conversation, each sent after the previous answer. ``trace``: lines
            of ``trace``.
        request_rate: conversations per second (Poisson); None: as fast as ``concurrency`` allows.
        concurrency: conversations at a time; None: no limit.
        input_words: minimum and maximum of words per prompt.
        max_tokens: upper bound on tokens to generate per request.
        ignore_eos: generate ``max_tokens`` tokens always.
        extra_body: further fields of every request.
        slo_ms: limits on figures (``ttft``, ``tpot``, ``e2e``) of a good request, in milliseconds.
    """

    kind: str = "random"
    num_requests: int = 100
    request_rate: float | None = None
    concurrency: int | None = 16
    input_words: tuple[int, int] = (20, 200)
    max_tokens: int = 64
    turns: int = 4
    trace: str | None = None
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int = 0
    slo_ms: dict[str, float] = field(default_factory=dict)
    extra_body: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Conversation:
    """A conversation that begins ``start_s`` seconds after the load. Questions are sent one after the other."""

    start_s: float
    questions: list[str]
    max_tokens: int


@dataclass(slots=True)
class Outcome:
    """The result of one request, in seconds from its beginning."""

    ttft_s: float = 0.0
    e2e_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    error: str | None = None

    @property
    def tpot_s(self) -> float:
        return (self.e2e_s - self.ttft_s) / max(1, self.output_tokens - 1)


def conversations(workload: ServeWorkload) -> list[Conversation]:
    """Make the whole load, the same for the same seed. Raises ConfigError for a trace that cannot be read."""
    if workload.kind == "trace":
        return _read_trace(workload)
    rng = random.Random(workload.seed)
    low, high = workload.input_words
    turns = workload.turns if workload.kind == "multi-turn" else 1
    result, start = [], 0.0
    for _ in range(workload.num_requests):
        lengths = [high if workload.kind == "fixed" else rng.randint(low, high) for _ in range(turns)]
        questions = [" ".join(rng.choices(WORDS, k=length)) for length in lengths]
        result.append(Conversation(start, questions, workload.max_tokens))
        if workload.request_rate is not None:
            start += rng.expovariate(workload.request_rate)
    return result


def _read_trace(workload: ServeWorkload) -> list[Conversation]:
    """Read JSON lines with ``timestamp`` (seconds), ``prompt`` and optionally ``max_tokens``."""
    try:
        lines = [
            json.loads(line) for line in Path(workload.trace or "").read_text("utf-8").splitlines() if line.strip()
        ]
        first = min((float(line["timestamp"]) for line in lines), default=0.0)
        return [
            Conversation(
                float(e["timestamp"]) - first, [str(e["prompt"])], int(e.get("max_tokens", workload.max_tokens))
            )
            for e in lines
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--trace {workload.trace}: {type(error).__name__}: {error}; each line needs timestamp and prompt"
        ) from error


def measure(target: Target, model: str | None, workload: ServeWorkload) -> dict[str, Any]:
    """Run the load. Returns the figures; see ``summary``."""
    return asyncio.run(_measure(target, model, workload))


async def _measure(target: Target, model: str | None, workload: ServeWorkload) -> dict[str, Any]:
    client = HttpClient(target)
    room = asyncio.Semaphore(workload.concurrency or 1_000_000)
    began = time.perf_counter()

    async def converse(conversation: Conversation) -> list[Outcome]:
        await asyncio.sleep(max(0.0, conversation.start_s - (time.perf_counter() - began)))
        messages: list[dict[str, str]] = []
        outcomes = []
        async with room:
            for question in conversation.questions:
                messages.append({"role": "user", "content": question})
                body = _body(model, messages, conversation.max_tokens, workload)
                outcomes.append(outcome := await ask(client, "/chat/completions", body, Outcome(), _has_tokens))
                messages.append({"role": "assistant", "content": outcome.text})
        return outcomes

    finished = await asyncio.gather(*(converse(c) for c in conversations(workload)))
    seconds = time.perf_counter() - began
    client.close()
    return summary([outcome for outcomes in finished for outcome in outcomes], seconds, workload.slo_ms)


def _body(model: str | None, messages: list[dict[str, str]], max_tokens: int, workload: ServeWorkload) -> bytes:
    body: dict[str, Any] = {
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": workload.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if model is not None:
        body["model"] = model
    if workload.ignore_eos:
        body["ignore_eos"] = True
    return msgspec.json.encode(body | workload.extra_body)


async def ask(
    client: HttpClient, path: str, body: bytes, outcome: Outcome, counts: Callable[[dict[str, Any]], bool]
) -> Outcome:
    """Send one request, and note its times in ``outcome``. ``counts``: whether a choice of a chunk has tokens."""
    last, texts, began = 0.0, [], time.perf_counter()
    try:
        async for data in client.events(path, body):
            now = time.perf_counter() - began
            event = msgspec.json.decode(data)
            if "error" in event:
                outcome.error = str(event["error"])[:200]
            elif event["choices"] and counts(choice := event["choices"][0]):
                if last:
                    outcome.gaps_s.append(now - last)
                else:
                    outcome.ttft_s = now
                last = now
                texts.append(choice.get("delta", {}).get("content") or "")
            if usage := event.get("usage"):
                outcome.prompt_tokens, outcome.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    except (HttpError, OSError, EOFError, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.e2e_s, outcome.text = last, "".join(texts)
    if not outcome.output_tokens and last:  # a server that sends no usage; most servers send a chunk per token
        outcome.output_tokens = 1 + len(outcome.gaps_s)
    return outcome


def _has_tokens(choice: dict[str, Any]) -> bool:
    """Whether the chunk carries generated content. Some servers begin with a chunk that has the role alone, before the
    first token is computed, and end with an empty one."""
    return any(choice["delta"].get(name) for name in ("content", "reasoning", "reasoning_content", "tool_calls"))


def summary(outcomes: Sequence[Outcome], seconds: float, slo_ms: dict[str, float]) -> dict[str, Any]:
    """Counts, rates per second, and percentiles in milliseconds over the requests that succeeded."""
    good = [o for o in outcomes if o.error is None and o.output_tokens]
    errors = [o.error or "no tokens" for o in outcomes if o.error is not None or not o.output_tokens]
    kept = [o for o in good if _keeps(o, slo_ms)]
    latencies = {
        "ttft_ms": [o.ttft_s for o in good],
        "tpot_ms": [o.tpot_s for o in good if o.output_tokens > 1],
        "itl_ms": [gap for o in good for gap in o.gaps_s],
        "e2e_ms": [o.e2e_s for o in good],
    }
    return {
        "seconds": round(seconds, 6),
        "requests": len(outcomes),
        "failed": len(errors),
        "errors": sorted(set(errors))[:5],
        "requests_per_s": round(len(good) / seconds, 3),
        "prompt_tokens_per_s": round(sum(o.prompt_tokens for o in good) / seconds, 1),
        "output_tokens_per_s": round(sum(o.output_tokens for o in good) / seconds, 1),
        "goodput_per_s": round(len(kept) / seconds, 3) if slo_ms else None,
    } | {name: _percentiles(values) for name, values in latencies.items()}


def _keeps(outcome: Outcome, slo_ms: dict[str, float]) -> bool:
    figures = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s, "e2e": outcome.e2e_s}
    return all(figures[name] * 1000 <= limit for name, limit in slo_ms.items())


def _percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles (nearest rank) in milliseconds; None for no values."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    ranks = {f"p{p}": ordered[max(0, -(-len(ordered) * p // 100) - 1)] for p in PERCENTILES}
    figures = {"mean": sum(ordered) / len(ordered)} | ranks | {"max": ordered[-1]}
    return {name: round(value * 1000, 3) for name, value in figures.items()}
