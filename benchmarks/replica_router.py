"""The router of replicas: what a choice costs, and what it saves.

Usage: ``python -m benchmarks.replica_router [--repeats 15] [--json FILE]``. No model, no processes.

1. Processor time of one request at the router: choosing, and noting its end. Each of 4 replicas tells 2,000 prefixes.
   Prompts have several lengths, and are new or half cached somewhere. The prompts of ``weft bench prefix`` are measured
   too, in order.
2. Prompt tokens reused by the conversations of ``weft bench prefix`` (16 of 8 turns, one request at a time,
   conversation after conversation) on caches without a model. Compared are one cache, four caches through the router,
   and four caches in round robin. Sixteen conversations in turn on four replicas meet their own replica again by
   accident. Round robin is therefore also measured with requests of other conversations in between.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from statistics import mean, median
from typing import Any

from weft.bench import report
from weft.bench.prefix_workloads import make_workload
from weft.cache.manager import Manager
from weft.cache.spec import CacheSpec
from weft.cache.tuning import ReplayCounts, replay_request
from weft.config import resolve
from weft.engine.prefix_hashes import chunks_of_hashes, passing, reusable_prefixes
from weft.engine.router import Router
from weft.platforms.cpu import cpu_name

MODEL = Path(__file__).parent / "configs" / "qwen3-next-12l"
NUM_REPLICAS = 4
NUM_REPORTED = 2000
LENGTHS = (100, 1000, 4000, 16_000)


def overhead(length: int, share: float, repeats: int) -> dict[str, Any]:
    """Microseconds of processor time per request of ``length`` prompt tokens, a ``share`` of which is cached."""
    rng = random.Random(length)
    router = Router(NUM_REPLICAS, max_num_seqs=256)
    prompts = [[rng.randrange(150_000) for _ in range(length)] for _ in range(32)]
    for index in range(NUM_REPLICAS):
        router.up(index)
        known = [value for p in prompts[index::NUM_REPLICAS] for value in reported_of(p[: int(share * length)])]
        router.refresh(index, known + [rng.getrandbits(64) for _ in range(NUM_REPORTED - len(known))])
    return {"prompt_len": length, "cached_share": share} | timed(router, prompts, repeats)


def reported_of(tokens: list[int]) -> list[int]:
    """Return the hashes of one prompt that a tree with recurrent states reports."""
    chunks = [hashes for hashes in chunks_of_hashes(tokens) if hashes]
    return [passing(hashes[-1]) for hashes in chunks[:-1]] + [hashes[-1] for hashes in chunks[-1:]]


def overhead_w5(repeats: int) -> dict[str, Any]:
    """Time the 128 prompts of ``weft bench prefix`` in order; each conversation returns to its replica."""
    rng = random.Random(3)
    router = Router(NUM_REPLICAS, max_num_seqs=256)
    prompts: list[list[int]] = []
    outputs: list[list[int]] = []
    for turn in make_workload("chat", 1000):
        prompts.append(turn.prompt(prompts, outputs))
        outputs.append([rng.randrange(1000) for _ in range(turn.output_len)])
    for index in range(NUM_REPLICAS):
        router.up(index)
        router.refresh(index, [rng.getrandbits(64) for _ in range(NUM_REPORTED)])
    lengths = [len(prompt) for prompt in prompts]
    shown = {"prompts": len(prompts), "least_len": min(lengths), "mean_len": mean(lengths), "most_len": max(lengths)}
    return shown | timed(router, prompts, repeats)


def timed(router: Router, prompts: list[list[int]], repeats: int) -> dict[str, Any]:
    times = []
    for _ in range(repeats):
        for replica in router.replicas:
            replica.sent.clear()
        began = time.process_time()
        for prompt in prompts:
            router.ended(router.choose(prompt))
        times.append((time.process_time() - began) / len(prompts) * 1e6)
    figures = {"us_per_request": round(median(times), 1), "us_least": round(min(times), 1)}
    return figures | {"repeats": [round(t, 1) for t in times]}


def reused(choose: Callable[[list[int]], int], managers: list[Manager], tell: Callable[[int], None]) -> int:
    """Prompt tokens reused over that workload's conversations."""
    counts, rng = ReplayCounts(), random.Random(3)
    prompts: list[list[int]] = []
    outputs: list[list[int]] = []
    for turn in make_workload("chat", 1000):
        tokens = turn.prompt(prompts, outputs)
        prompts.append(tokens)
        outputs.append([rng.randrange(1000) for _ in range(turn.output_len)])
        index = choose(tokens)
        replay_request(managers[index], tokens + outputs[-1], len(tokens), counts=counts)
        tell(index)
    return counts.num_reused_tokens


def conversations() -> dict[str, Any]:
    """Reused tokens by policy, and their share of what one cache reuses."""
    spec = CacheSpec.of(resolve(model=str(MODEL), load_format="dummy", skip_tokenizer_init=True, device="cpu"))

    def managers(number: int) -> list[Manager]:
        return [Manager(spec, num_pages=12_000, num_slots=800, enable_prefix_caching=True) for _ in range(number)]

    caches, router = managers(NUM_REPLICAS), Router(NUM_REPLICAS, max_num_seqs=16)
    for index in range(NUM_REPLICAS):
        router.up(index)

    def told(index: int) -> None:
        router.ended(index)
        router.refresh(index, reusable_prefixes(caches[index].tree, needs_state=True))

    numbers, rng = count(), random.Random(5)

    def passed_by(tokens: list[int]) -> int:
        return (next(numbers) + sum(1 for _ in range(rng.randrange(4)) if next(numbers) >= 0)) % NUM_REPLICAS

    found = {
        "one_cache": reused(lambda tokens: 0, managers(1), lambda index: None),
        "router": reused(router.choose, caches, told),
        "round_robin_in_step": reused(_in_turn(), managers(NUM_REPLICAS), lambda index: None),
        "round_robin_with_others": reused(passed_by, managers(NUM_REPLICAS), lambda index: None),
    }
    return {name: {"reused_tokens": n, "share": round(n / found["one_cache"], 3)} for name, n in found.items()}


def _in_turn() -> Callable[[list[int]], int]:
    numbers: Iterator[int] = count()
    return lambda tokens: next(numbers) % NUM_REPLICAS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    target = report.open_json(args.json)
    figures = (
        {"processor": cpu_name()}
        | report.origin()
        | {
            "num_replicas": NUM_REPLICAS,
            "num_told_prefixes": NUM_REPORTED,
            "router_overhead": [overhead(n, share, args.repeats) for share in (0.0, 0.5) for n in LENGTHS],
            "router_overhead_w5": overhead_w5(args.repeats),
            "w5_conversations": conversations(),
        }
    )
    print(json.dumps(figures, indent=1))
    report.write_json(target, figures)


if __name__ == "__main__":
    main()
