"""Random requests with drafts through scheduler and cache, in numbers that whole engines cannot run.

    python -m tests.speculation.traffic [--requests 10000] [--first 0] [--json FILE]

Job: run engines without a model. Each engine has random limits, pools hardly larger than one context, and a drafter
that is right, wrong or anything between. The traffic has prompts that branch off each other, aborts, preemptions and a
late device. Free pages and slots hold rubbish, and invariants are checked after every step. Every request gives the
tokens of plain decoding, and at the end every page and slot is free. Owns: the settings and the traffic. The model is
made of hashes (``tests/fake_runner.py``): its next token depends on every page and on the state's slot.
``tests/fuzz_engine.py`` does the same, slower, with whole engines.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fake_runner import VOCAB, oracle
from tests.scheduler.test_scheduler import PAGE, Rig, make_request
from weft.bench import report
from weft.request import Request
from weft.scheduler.draft_planner import DeviceDrafts, DraftPlanner


@dataclass
class Drafter:
    """Right with probability ``right`` each, all after a wrong one anything; sometimes fewer than wanted."""

    rng: random.Random
    right: float

    def propose(self, request: Request, count: int) -> list[int]:
        tokens = oracle(request.known_token_ids.tolist(), self.rng.choice([count, self.rng.randint(0, count)]))
        wrong = next((i for i in range(len(tokens)) if self.rng.random() >= self.right), len(tokens))
        return tokens[:wrong] + [self.rng.randrange(VOCAB) for _ in tokens[wrong:]]

    def head(self, tokens: list[int], count: int) -> list[int]:
        """The same as the model's own head makes them, always ``count``."""
        drafts = oracle(tokens, count)
        return [d if self.rng.random() < self.right else self.rng.randrange(VOCAB) for d in drafts]


@dataclass
class Episode:
    """One engine and its traffic, all from one seed."""

    seed: int
    sent: dict[str, Request] = field(default_factory=dict)
    num_aborted: int = 0
    num_tokens: int = 0
    num_cached: int = 0
    stats: Any = None

    def run(self) -> None:
        self.rng = rng = random.Random(self.seed)
        hybrid, seqs, self.context = rng.random() < 0.8, rng.randint(1, 5), rng.choice([24, 60])
        self.most = rng.randint(1, 5)
        pages = 1 + -(-self.context // PAGE) + rng.choice([0, 1, 5, 40])
        slots = seqs + 1 + rng.choice([0, 1, self.most, seqs * self.most, 30]) if hybrid else 1
        self.rig = rig = Rig(
            pages=pages,
            seqs=seqs,
            budget=max(seqs, rng.choice([4, 12, 64])),
            policy=rng.choice(["fcfs", "priority", "lpm"]),
            hybrid=hybrid,
            slots=slots,
            caches=True,
            checkpoint_policy=rng.choice(["exact", "exact", "aligned", "finish_only"]),
        )
        limits = rng.choice([(), ((1, self.most), (3, max(1, self.most - 2)))])
        drafter, on_device = Drafter(rng, rng.choice([0.0, 0.5, 0.9, 1.0])), rng.random() < 0.5
        rig.scheduler.drafts = DraftPlanner(
            DeviceDrafts() if on_device else drafter,
            rig.manager,
            self.most,
            lambda n: next((k for limit, k in limits if n <= limit), 0) if limits else self.most,
            self.context,
            rng.choice([0, self.most - 1]),
            on_device,
            may_be_none=on_device and rng.random() < 0.5,
        )
        if rig.scheduler.drafts.may_be_none:
            rate = rng.choice([0.1, 0.5, 0.9])
            rig.runner.finds = lambda: rng.random() < rate
        if on_device:
            rig.runner.drafter = lambda tokens: drafter.head(tokens, self.most)
        self._traffic(depth=rng.randint(0, 1))
        self.stats = rig.scheduler.stats()
        rig.manager.reset()
        assert rig.manager.pages.num_free == pages - 1, "a page is lost"
        assert rig.manager.slots.num_free == slots - 1, "a slot is lost"

    def _traffic(self, depth: int) -> None:
        rng, rig, total = self.rng, self.rig, self.rng.randint(10, 40)
        corpus = [[rng.randrange(VOCAB) for _ in range(self.context)]]
        for _ in range(20_000):
            if len(self.sent) < total and rng.random() < 0.4:
                request = self._request(rng.choice(corpus))
                self.sent[request.request_id] = request
                rig.scheduler.add(request)
            elif not rig.scheduler.has_work:
                if len(self.sent) == total:
                    break
                continue
            if rng.random() < 0.01 and rig.scheduler.requests:
                aborted = rng.choice(rig.scheduler.requests)
                self.num_aborted += rig.scheduler.finish(aborted.request_id, "abort")
            rig.step(depth)
            corpus = (corpus + [r.known_token_ids.tolist() for r in self.sent.values()][-3:])[-8:]
        assert not rig.scheduler.has_work, "no end"
        for request in self.sent.values():
            self._check(request)

    def _request(self, base: list[int]) -> Request:
        rng = self.rng
        prompt = base[: rng.randint(0, len(base))] + [rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 7]))]
        prompt = prompt[: self.context - 1] or [5]
        stop = frozenset(rng.sample(range(VOCAB), rng.choice([0, 40])))
        room = self.context - len(prompt)
        name = f"r{len(self.sent)}"
        return make_request(name, prompt, rng.randint(1, room), len(self.sent), stop, rng.randint(0, 2))

    def _check(self, request: Request) -> None:
        want = oracle(request.prompt_token_ids.tolist(), request.max_tokens, request.eos_token_ids)
        got = request.output_token_ids
        assert got == want[: len(got)], f"{request.request_id}: {got} is not {want}"
        if request.finish_reason != "abort":
            assert len(got) == len(want) and request.finish_reason == (
                "stop" if want[-1] in request.eos_token_ids else "length"
            ), request.request_id
        self.num_tokens += len(got)
        self.num_cached += request.num_cached_tokens or 0


def figures(done: list[Episode], failed: list[int]) -> dict[str, Any]:
    """Sum up the traffic and its results over all engines."""
    ended = [episode for episode in done if episode.stats is not None]
    return {
        "engines": len(done),
        "requests": sum(len(e.sent) for e in done),
        "aborted": sum(e.num_aborted for e in done),
        "tokens": sum(e.num_tokens for e in done),
        "cached_prompt_tokens": sum(e.num_cached for e in done),
        "preemptions": sum(e.stats.num_preemptions for e in ended),
        "verified_drafts": sum(e.stats.spec_decode_num_draft_tokens for e in ended),
        "followed": sum(e.rig.runner.num_followed for e in ended),
        "accepted_drafts": sum(e.stats.spec_decode_num_accepted_tokens for e in ended),
        "failed_seeds": failed,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="random requests with drafts through scheduler and cache")
    parser.add_argument("--requests", type=int, default=10_000, help="start no engine after so many requests")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no engine after that time")
    parser.add_argument("--first", type=int, default=0, help="seed of the first engine")
    parser.add_argument("--json", type=Path, help="write what came and what became of it there")
    args = parser.parse_args(arguments)
    done: list[Episode] = []
    failed: list[int] = []
    started = time.monotonic()
    while sum(len(e.sent) for e in done) < args.requests and time.monotonic() - started < args.seconds:
        episode = Episode(args.first + len(done))
        try:
            episode.run()
        except Exception as error:
            failed.append(episode.seed)
            print(f"seed {episode.seed} failed: {type(error).__name__}: {error}", flush=True)
        done.append(episode)
    found = figures(done, failed)
    print(", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in found.items()))
    if args.json is not None:
        report.write_json(args.json, report.provenance("cpu") | {"benchmark": "draft-traffic"} | found)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
