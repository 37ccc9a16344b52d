"""A trace of coding agents, made from published statistics, in the format that ``weft bench trace`` replays.

Job: draw sessions whose contexts grow turn by turn. Owns: the distributions. Does not know: servers.

TraceLab (Zhu et al., arXiv 2606.30560) is a public record of 4,265 sessions of two coding agents. Its means are 84
steps in a session, 523 output tokens in a step, and 95.8% of all input tokens read from a cache. Sessions are shorter
here by default. Contexts end at ``max_context``, where an agent begins anew with a summary.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class AgentTrace:
    """Parameters from which a trace is drawn.

    Attributes:
        turns: mean number of requests in a session (geometric).
        shared_tokens: tokens of the system prompt and the tools, which all sessions share.
        first_tokens: median of the tokens that a session adds before its first request (log-normal).
        turn_tokens: median of the tokens that a tool's result or a user adds in a turn (log-normal).
        output_tokens: median of the tokens of an answer (log-normal).
        max_context: tokens at which a context is cut back to the shared part and a summary.
        tool_s: median seconds of a tool call between two requests (log-normal).
        human_share, human_s: share of turns that wait for a person, and the median of these waits in seconds.
        arrival_s: mean seconds between the starts of two sessions.
        block_size: tokens of a block.
    """

    sessions: int = 16
    turns: int = 30
    shared_tokens: int = 18_000
    first_tokens: int = 4_000
    turn_tokens: int = 1_200
    output_tokens: int = 300
    max_context: int = 150_000
    tool_s: float = 4.0
    human_share: float = 0.08
    human_s: float = 60.0
    arrival_s: float = 5.0
    block_size: int = 512
    seed: int = 0


def write_trace(path: str | Path, trace: AgentTrace) -> int:
    """Write the trace as JSON lines. Returns the number of requests."""
    lines = [json.dumps(line) for line in requests_of(trace)]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


def requests_of(trace: AgentTrace) -> Iterator[dict[str, Any]]:
    """The lines of the trace, session by session."""
    rng = random.Random(trace.seed)
    ids = iter(range(1, 1 << 40))
    shared = [next(ids) for _ in range(trace.shared_tokens // trace.block_size)]
    start_s = 0.0
    for session in range(trace.sessions):
        context, blocks = trace.shared_tokens + _around(rng, trace.first_tokens), list(shared)
        for turn in range(1 + int(rng.expovariate(1.0 / max(1, trace.turns - 1)))):
            output = _around(rng, trace.output_tokens)
            blocks += [next(ids) for _ in range(-(-context // trace.block_size) - len(blocks))]
            line: dict[str, Any] = {
                "session_id": f"agent-{session}", "input_length": context, "output_length": output,
                "hash_ids": list(blocks),
            }  # fmt: skip
            if turn == 0:
                line["timestamp"] = round(start_s * 1e3)
            else:
                waits_for_person = rng.random() < trace.human_share
                line["delay"] = round(1e3 * _spread(rng, trace.human_s if waits_for_person else trace.tool_s))
            yield line
            context += output + _around(rng, trace.turn_tokens)
            if context > trace.max_context:
                context, blocks = trace.shared_tokens + 2 * _around(rng, trace.first_tokens), list(shared)
        start_s += rng.expovariate(1.0 / trace.arrival_s)


def _spread(rng: random.Random, median: float) -> float:
    """A log-normal number. Its 90th percentile is three and a half times the median."""
    return median * rng.lognormvariate(0.0, 1.0)


def _around(rng: random.Random, median: int) -> int:
    return max(1, round(_spread(rng, median)))
