"""Drafters for tests: right, wrong, and anything between. Tokens must never depend on them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from weft import LLM
from weft.request import Request
from weft.scheduler.draft_planner import DeviceDrafts, Proposer

VOCAB = 200


def install(llm: LLM, proposer: Proposer, max_drafts: int | None = None) -> None:
    """Have an engine that speculates draft by ``proposer`` from now on, at most ``max_drafts`` tokens."""
    drafts = llm._core.scheduler.drafts
    assert drafts is not None, "the engine does not speculate"
    drafts.proposer = proposer
    drafts.on_device = isinstance(proposer, DeviceDrafts)
    if max_drafts is not None:
        drafts.max_drafts = max_drafts


@dataclass
class FromOutputs:
    """Drafts what a run without drafts has generated, but for the places where ``is_wrong(i, rng)``, i = 0, 1, …

    ``outputs``: tokens by prompt and seed; a request that is not in it gets none.
    """

    outputs: Mapping[tuple[tuple[int, ...], int], list[int]]
    is_wrong: Callable[[int, random.Random], bool] = lambda place, rng: False
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def propose(self, request: Request, count: int) -> list[int]:
        known = self.outputs.get((tuple(request.prompt_token_ids), request.sampling.seed), [])
        done = len(request.output_token_ids)
        drafts = known[done : done + count]
        return [(d + 1) % VOCAB if self.is_wrong(i, self.rng) else d for i, d in enumerate(drafts)]


@dataclass
class Random:
    """Any number of any tokens."""

    rng: random.Random

    def propose(self, request: Request, count: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(0, count))]


@dataclass
class ByModel:
    """Drafts the greedy tokens of ``next_token``, with a mistake now and then."""

    next_token: Callable[[list[int]], int]
    rng: random.Random
    mistakes: float = 0.2

    def propose(self, request: Request, count: int) -> list[int]:
        tokens = request.known_token_ids.tolist()
        for _ in range(self.rng.randint(0, count)):
            tokens.append(self.rng.randrange(VOCAB) if self.rng.random() < self.mistakes else self.next_token(tokens))
        return tokens[len(request.known_token_ids) :]
