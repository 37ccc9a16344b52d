"""An engine process without a model: it repeats the user's last message (or the whole prompt), at once.

``python -m tests.server.fake_engine`` in place of ``weft.engine.process``. The request's ``priority`` picks other
behaviours, so that tests can ask for them through the API.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weft.config import resolve
from weft.engine import wire
from weft.engine.channel import EngineChannel, EngineStart
from weft.engine.process import main
from weft.engine.snapshot import PoolView, Snapshot
from weft.messages import TokenLogprobs
from weft.request import FinishReason, Request
from weft.stats import EngineStats

if TYPE_CHECKING:
    from weft.engine.rollouts import Rollouts

SLOW, NAN, BREAK, CRASH, CUT = 7, 17, 18, 13, 19
"""Priorities with an effect. ``SLOW`` waits 10 ms for each token, and ``NAN`` ends the request with "error". ``BREAK``
makes the step raise, ``CRASH`` exits the process, and ``CUT`` omits the end-of-sequence token."""

IM_START, IM_END, NEWLINE = 2040, 2041, 198
CONTEXT = int(os.environ.get("WEFT_FAKE_CONTEXT", "4096"))
CAPACITY = wire.Capacity(max_model_len=CONTEXT, max_num_seqs=8, num_pages=256, page_size=16, num_slots=8)


def reply(prompt: list[int]) -> list[int]:
    """The last user message of a chat, else the prompt."""
    starts = [i for i, token in enumerate(prompt) if token == IM_START]
    if len(starts) < 2:  # not a chat, or only its end
        return prompt
    turn = prompt[starts[-2] : starts[-1]]
    return turn[turn.index(NEWLINE) + 1 : turn.index(IM_END)]


@dataclass
class FakeCore:
    """Obeys like an engine core. ``per_step``: tokens that a request gets in one step."""

    per_step: int = 4
    requests: dict[str, Request] = field(default_factory=dict)
    num_aborts: int = 0
    num_steps: int = 0

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request

    def finish(self, request_id: str, reason: FinishReason, stop_reason: str | None = None) -> bool:
        self.num_aborts += 1
        return self.requests.pop(request_id, None) is not None

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    @property
    def rollouts(self) -> Rollouts:
        raise NotImplementedError

    def step(self) -> list[Request]:
        self.num_steps += 1
        changed = list(self.requests.values())
        if any(r.priority == CRASH for r in changed):
            os._exit(3)
        broken = [r for r in changed if r.priority == BREAK]
        if broken:
            for request in broken:
                request.priority = NAN
            raise RuntimeError("this step was told to break")
        if all(r.priority == SLOW for r in changed):
            time.sleep(0.01)
        for request in changed:
            self._advance(request)
        return changed

    def _advance(self, request: Request) -> None:
        now = time.monotonic()
        request.times.first_scheduled = request.times.first_scheduled or now
        request.times.first_token = request.times.first_token or now
        request.num_cached_tokens = request.num_cached_tokens or 0
        if request.priority == NAN:
            request.finish_reason = "error"
        text = reply(request.prompt_token_ids.tolist())
        if request.sampling.prompt_logprobs is not None and not request.prompt_logprobs:
            request.prompt_logprobs = [logprobs(t) for t in request.prompt_token_ids[1:]]
        for _ in range(1 if request.priority == SLOW else self.per_step):
            if request.finish_reason is None:
                self._append(request, text)
        if request.finish_reason is not None:
            request.times.finished = now
            del self.requests[request.request_id]

    def _append(self, request: Request, text: list[int]) -> None:
        place = len(request.output_token_ids)
        endless = request.priority in (SLOW, CUT) or not request.eos_token_ids
        token = IM_END if place >= len(text) and not endless else text[place % len(text)]
        request.append(token, None if request.sampling.logprobs is None else logprobs(token))

    def stats(self) -> EngineStats:
        num_running = len(self.requests)
        return EngineStats(
            num_running=num_running, num_free_pages=256 - num_running, num_free_slots=8, num_steps=self.num_steps,
            num_prefill_tokens=2, num_decode_tokens=3, num_padding_tokens=4, steps_by_mode={"NONE": 1},
        )  # fmt: skip

    def snapshot(self, tokens_per_node: int) -> Snapshot:
        return Snapshot(
            now=time.monotonic(),
            totals=self.stats(),
            pages=PoolView(256, 256 - len(self.requests), 0, 0),
            slots=PoolView(8, 8, 0, 0),
            num_nodes=0,
            nodes=[],
            steps=[],
            requests=[],
        )

    def cached_prefixes(self, known_version: int) -> tuple[int, wire.CachedPrefixes]:
        return 1, wire.CachedPrefixes([1, 2, 3])

    def reset_prefix_cache(self) -> bool:
        return not self.requests

    def shutdown(self) -> None:
        self.requests.clear()


def logprobs(token: int) -> TokenLogprobs:
    """The token is the second likeliest; the likeliest has the next id; one more has no probability at all."""
    return TokenLogprobs([token, token + 1, token, token + 2], [-1.0, -0.5, -1.0, float("-inf")], 2)


def start(message: EngineStart, channel: EngineChannel) -> tuple[FakeCore, wire.Capacity]:
    channel.send(wire.Configured(resolve(**message.settings)))
    channel.send(wire.Stage("fake", 0.0, "nothing to load"))
    return FakeCore(), CAPACITY


if __name__ == "__main__":
    sys.exit(main(start))
