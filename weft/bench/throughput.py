"""Offline throughput: generated tokens per second over a mixed queue.

One generator makes all random numbers: first the length and the tokens of each prompt, then all output lengths. A
workload is thus the same on every machine.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from weft.bench.latency import run_batch
from weft.bench.prefix_workloads import MAX_TOKEN_ID
from weft.bench.roofline import Roofline, ceilings_of
from weft.sampling_params import SamplingParams

if TYPE_CHECKING:
    from weft.engine.llm import LLM


@dataclass(frozen=True, slots=True)
class ThroughputWorkload:
    """The workload. Lengths are inclusive ranges in tokens."""

    num_prompts: int = 256
    prompt_len: tuple[int, int] = (100, 1024)
    output_len: tuple[int, int] = (100, 1024)
    temperature: float = 0.6
    warmups: int = 1
    repeats: int = 1
    seed: int = 0

    def requests(self, vocab_size: int) -> tuple[list[list[int]], list[int]]:
        """Prompts as token ids (at most ``MAX_TOKEN_ID``, and below ``vocab_size``), and output lengths."""
        rng, top = random.Random(self.seed), min(MAX_TOKEN_ID, vocab_size - 1)
        prompts = [[rng.randint(0, top) for _ in range(rng.randint(*self.prompt_len))] for _ in range(self.num_prompts)]
        return prompts, [rng.randint(*self.output_len) for _ in range(self.num_prompts)]


def measure(llm: LLM, workload: ThroughputWorkload) -> dict[str, Any]:
    """Measure the queue: medians, and every repeat."""
    prompts, lengths = workload.requests(llm.config.model_config.vocab_size)
    params = [
        SamplingParams(temperature=workload.temperature, max_tokens=n, ignore_eos=True, detokenize=False)
        for n in lengths
    ]
    for _ in range(workload.warmups):
        run_batch(llm, prompts, params)
    before = llm.stats().num_preemptions
    seconds = [run_batch(llm, prompts, params) for _ in range(workload.repeats)]
    total, best = median(seconds), _best_seconds(llm, prompts, lengths)
    return {
        "output_tokens_per_s": round(sum(lengths) / total, 1),
        "roofline_tokens_per_s": None if best is None else round(sum(lengths) / best, 1),
        "roofline_share": None if best is None else round(best / total, 3),
        "total_tokens_per_s": round((sum(lengths) + sum(map(len, prompts))) / total, 1),
        "requests_per_s": round(len(prompts) / total, 3),
        "seconds": round(total, 3),
        "num_prompt_tokens": sum(map(len, prompts)),
        "num_output_tokens": sum(lengths),
        "num_preemptions": llm.stats().num_preemptions - before,
        "repeats": {"seconds": [round(s, 3) for s in seconds]},
    }


def _best_seconds(llm: LLM, prompts: list[list[int]], lengths: list[int]) -> float | None:
    """Seconds for the queue on a device that reaches its ceilings; None if those are unknown."""
    ceilings = ceilings_of(llm.config.device)
    return None if ceilings is None else Roofline.of(llm.config).queue_s([len(p) for p in prompts], lengths, ceilings)
