"""Measure the prefix cache on the CPU: matching and filing a long prompt, and decode steps with trees of any size.

python benchmarks/prefix_cost.py --json benchmarks/results/prefix-cost-cpu.json

Figures are milliseconds of one thread:

- *match*: ``Manager.match`` of a prompt given as a list of ints, its whole length stored.
- *insert*: everything the cache does for a prompt whose second half is new: lease, pages, checkpoints, commit, confirm
  and release.
- *step*: ``Scheduler.schedule`` and ``update`` for requests that all decode, without a model.
- *full*: the mean of such steps when no page is free. The tree first evicts every page that a request grows by.
- *longest*: the longest of these steps. All requests grow in it at once, and the worth of everything may be looked up
  anew.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from weft.bench import report
from weft.cache.manager import Manager
from weft.cache.spec import CacheSpec
from weft.cache.tuning import replay_request
from weft.config.checkpoint import read_checkpoint_config
from weft.config.layer_spec import CacheDtypes
from weft.messages import ModelOutput, RowSampling
from weft.request import Request
from weft.scheduler.scheduler import Scheduler

MODEL = Path(__file__).parent / "configs" / "qwen3-next-12l"
VOCAB = 150_000
LENGTH = 32_768
NUM_NODES = (10, 10_000)
BATCH = 64
REPEATS = 30


def make_manager(num_nodes: int) -> Manager:
    """A cache whose tree has about ``num_nodes`` nodes: prompts of 24 tokens that branch from one another."""
    model = read_checkpoint_config(MODEL)
    spec = CacheSpec.from_model(model, page_size=16, dtypes=CacheDtypes("bfloat16", "bfloat16", "bfloat16"))
    manager = Manager(spec, num_pages=60_000, num_slots=30_000, enable_prefix_caching=True)
    rng = random.Random(num_nodes)
    prompts = [tokens(rng, 24)]
    while sum(1 for _ in zip(manager.tree.nodes(), range(num_nodes), strict=False)) < num_nodes:
        for _ in range(max(1, num_nodes // 20)):
            base = rng.choice(prompts)
            prompts.append(base[: rng.randrange(len(base))] + tokens(rng, 24))
            replay_request(manager, prompts[-1], len(prompts[-1]))
    return manager


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def median_ms(function: Callable[[int], Any], repeats: int = REPEATS) -> float:
    """Median over ``function(0)``, ``function(1)``, …, the first three not counted."""
    times = []
    for i in range(repeats + 3):
        start = time.perf_counter()
        function(i)
        times.append(1e3 * (time.perf_counter() - start))
    return round(median(times[3:]), 4)


def match_ms(manager: Manager) -> float:
    prompt = tokens(random.Random(1), LENGTH)
    replay_request(manager, prompt, LENGTH)
    assert manager.match(prompt).num_tokens == LENGTH - 1
    return median_ms(lambda _: manager.match(prompt))


def insert_ms(manager: Manager) -> float:
    """Insert prompts that share their first half. The page at its end is shared in part."""
    rng = random.Random(2)
    half = tokens(rng, LENGTH // 2 + 5)
    replay_request(manager, half, len(half))
    prompts = [half + tokens(rng, LENGTH - len(half)) for _ in range(13)]
    return median_ms(lambda i: replay_request(manager, prompts[i], LENGTH), repeats=10)


def steps_ms(manager: Manager, count: int) -> list[float]:
    """``count`` decode steps of ``BATCH`` requests, half of them hits."""
    scheduler = Scheduler(manager, max_num_seqs=BATCH, max_num_batched_tokens=8192)
    rng = random.Random(3)
    shared = tokens(rng, 200)
    replay_request(manager, shared, 200)
    for i in range(BATCH):
        prompt = (shared if i % 2 else []) + tokens(rng, 100)
        scheduler.add(Request(f"r{i}", array("I", prompt), RowSampling(), max_tokens=2000, arrival=i))

    def step(_: int = 0) -> int:
        orders = scheduler.schedule()
        assert orders is not None
        rows = [order.row for order in orders.requests if order.samples]
        scheduler.update(ModelOutput(orders.step, rows, [7] * len(rows)))
        return len(rows)

    def timed() -> float:
        start = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - start)

    while step() < BATCH:
        pass
    return [timed() for _ in range(count)]


def full_steps_ms(manager: Manager, count: int) -> list[float]:
    """The same on a pool in which only the tree's pages are left to grow into once the requests are admitted."""
    free = manager.pages.num_free - BATCH * 20
    pages = manager.pages.allocate(free)
    assert pages is not None
    return steps_ms(manager, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    target = report.open_json(args.json)
    rows = []
    for num_nodes in NUM_NODES:
        full = full_steps_ms(make_manager(num_nodes), 400)
        rows.append(
            {
                "tree_nodes": num_nodes,
                "match_ms": match_ms(make_manager(num_nodes)),
                "insert_ms": insert_ms(make_manager(num_nodes)),
                "step_ms": round(median(steps_ms(make_manager(num_nodes), 300)), 4),
                "full_step_ms": round(mean(full), 4),
                "longest_full_step_ms": round(max(full), 4),
            }
        )
    workload = {"prompt_tokens": LENGTH, "batch": BATCH, "model": MODEL.name}
    head = {"benchmark": "prefix-cost"} | report.provenance("cpu") | {"workload": workload}
    report.write_json(target, head | {"results": rows})
    report.table("Prefix cache, milliseconds of CPU", tuple(rows[0]), [[str(v) for v in row.values()] for row in rows])


if __name__ == "__main__":
    main()
