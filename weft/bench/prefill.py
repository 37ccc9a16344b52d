"""Prefill: milliseconds from the call to the first token of one prompt.

Method: one request at a time, ``max_tokens`` 1, greedy. The time from the call to the returned token includes the
host's share. The figure is the median of ``repeats`` after ``warmups``. Every prompt has new random tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from weft.bench.latency import run_batch
from weft.bench.roofline import Ceilings, Roofline, ceilings_of, floor_columns
from weft.sampling_params import SamplingParams

if TYPE_CHECKING:
    from weft.engine.llm import LLM


@dataclass(frozen=True, slots=True)
class PrefillWorkload:
    """The workload. Lengths are prompt tokens."""

    prompt_lens: tuple[int, ...] = (16, 64, 128, 256, 512, 1024, 2048, 8192)
    repeats: int = 15
    warmups: int = 3
    seed: int = 0


def measure(llm: LLM, workload: PrefillWorkload) -> list[dict[str, Any]]:
    """Measure each prompt length, in milliseconds: medians, and every repeat."""
    ceilings = ceilings_of(llm.config.device)
    return [_measure_length(llm, workload, length, ceilings) for length in workload.prompt_lens]


def _measure_length(llm: LLM, workload: PrefillWorkload, length: int, ceilings: Ceilings | None) -> dict[str, Any]:
    rng = random.Random(workload.seed + length)
    top = llm.config.model_config.vocab_size - 1
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    seconds = [
        run_batch(llm, [[rng.randint(0, top) for _ in range(length)]], [params])
        for _ in range(workload.warmups + workload.repeats)
    ][workload.warmups :]
    middle = median(seconds)
    return {
        "prompt_len": length,
        "first_token_ms": round(middle * 1e3, 3),
        **floor_columns(Roofline.of(llm.config).prefill(length), middle, ceilings),
        "tokens_per_s": round(length / middle, 1),
        "repeats": {"first_token_ms": [round(s * 1e3, 3) for s in seconds]},
    }
