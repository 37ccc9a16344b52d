"""The benchmarks' workloads are the ones that were written down."""

from __future__ import annotations

from random import randint, seed

from weft.bench.throughput import ThroughputWorkload


def test_throughput_workload_is_the_published_one() -> None:
    prompts, lengths = ThroughputWorkload().requests(vocab_size=151_936)
    seed(0)
    assert prompts == [[randint(0, 10000) for _ in range(randint(100, 1024))] for _ in range(256)]
    assert lengths == [randint(100, 1024) for _ in range(256)]
    assert sum(lengths) == 133_966


def test_token_ids_stay_in_a_small_vocabulary() -> None:
    prompts, _ = ThroughputWorkload(num_prompts=20).requests(vocab_size=65)
    assert max(max(prompt) for prompt in prompts) == 64
