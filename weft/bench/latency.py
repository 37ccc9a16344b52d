"""Decode latency: milliseconds per step at a given batch size; with drafts, per new token.

Method: every prompt has ``prompt_len`` random tokens; greedy, end-of-sequence ignored. The time of a step is (median
time for ``output_len`` new tokens - median time for 1) / (output_len - 1), so that prefill cancels out. One more run
goes step by step and gives the median interval between two consecutive steps in which the whole batch decoded.

If drafts are verified (``speculative_config``), a step yields several tokens. The first figure is then the time per new
token of a sequence, and the interval is that of a step. The floor is that of a step with as many drafts.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from weft.bench.roofline import Ceilings, Roofline, ceilings_of, floor_columns
from weft.errors import ConfigError
from weft.sampling_params import SamplingParams

if TYPE_CHECKING:
    from weft.engine.llm import LLM
    from weft.stats import EngineStats


@dataclass(frozen=True, slots=True)
class LatencyWorkload:
    """The workload. ``temperature`` 0 is greedy."""

    batch_sizes: tuple[int, ...] = (1, 8, 32, 128)
    prompt_len: int = 1024
    output_len: int = 128
    temperature: float = 0.0
    repeats: int = 5
    seed: int = 0


def measure(llm: LLM, workload: LatencyWorkload) -> list[dict[str, Any]]:
    """Measure each batch size, in milliseconds: medians, and every repeat.

    Raises:
        ConfigError: the engine cannot run a whole batch at a time.
    """
    _check_room(llm, workload)
    ceilings = ceilings_of(llm.config.device)
    return [measure_batch(llm, workload, batch_size, ceilings) for batch_size in workload.batch_sizes]


def _check_room(llm: LLM, workload: LatencyWorkload) -> None:
    plan, largest, length = llm._core.plan, max(workload.batch_sizes), workload.prompt_len + workload.output_len
    pages, page_size = plan.num_pages - 1, llm.config.page_size
    first, each = -(-workload.prompt_len // page_size), -(-(length - 1) // page_size)  # the last token is not stored
    # A request is admitted if a page is left over for each running one.
    room = min(plan.max_num_seqs, pages // each, (pages + 1) // (first + 1))
    if largest > room:
        raise ConfigError(
            f"--batch-sizes {largest}: this engine runs at most {room} sequences of {length} tokens at a time; give "
            "less, or raise max_num_seqs or the memory of the caches"
        )


def measure_batch(llm: LLM, workload: LatencyWorkload, batch_size: int, ceilings: Ceilings | None) -> dict[str, Any]:
    """Measure one batch size. The floor is that of the sequences' mean length while they decode."""
    rng = random.Random(workload.seed)
    top = llm.config.model_config.vocab_size - 1
    prompts = [[rng.randint(0, top) for _ in range(workload.prompt_len)] for _ in range(batch_size)]
    for output_len in (1, workload.output_len):  # warm-up
        run_batch(llm, prompts, _params(workload, output_len, 0, batch_size))
    before = llm.stats()
    short, long = (
        [run_batch(llm, prompts, _params(workload, n, i, batch_size)) for i in range(workload.repeats)]
        for n in (1, workload.output_len)
    )
    step_s = (median(long) - median(short)) / (workload.output_len - 1)
    intervals = step_intervals(llm, prompts, _params(workload, workload.output_len, workload.repeats, batch_size))
    drafts = draft_figures(before, llm.stats())
    work = Roofline.of(llm.config).decode(
        batch_size, workload.prompt_len + workload.output_len / 2, round(drafts.get("drafts_per_step", 0))
    )
    return {
        "batch_size": batch_size,
        "step_ms": _ms(step_s),
        **floor_columns(work, step_s * drafts.get("tokens_per_step", 1), ceilings),
        **drafts,
        "interval_ms": _ms(median(intervals)) if intervals else None,
        "tokens_per_s": round(batch_size / step_s, 1),
        "one_token_ms": _ms(median(short)),
        "repeats": {"one_token_ms": [_ms(s) for s in short], "all_tokens_ms": [_ms(s) for s in long]},
    }


def draft_figures(before: EngineStats, after: EngineStats) -> dict[str, float]:
    """Figures of a sequence that verifies drafts: drafts and new tokens per step, and the share of accepted drafts.
    Empty if nothing was verified between the two moments."""
    verified = after.spec_decode_num_drafts - before.spec_decode_num_drafts
    if not verified:
        return {}
    drafted = after.spec_decode_num_draft_tokens - before.spec_decode_num_draft_tokens
    accepted = after.spec_decode_num_accepted_tokens - before.spec_decode_num_accepted_tokens
    return {
        "drafts_per_step": round(drafted / verified, 3),
        "tokens_per_step": round(1 + accepted / verified, 3),
        "acceptance_rate": round(accepted / drafted, 3),
    }


def _params(workload: LatencyWorkload, output_len: int, repeat: int, batch_size: int) -> list[SamplingParams]:
    """Sampling parameters, each with a seed of its own, which decides a synthetic acceptance."""
    first = workload.seed + repeat * batch_size
    return [
        SamplingParams(
            temperature=workload.temperature, max_tokens=output_len, ignore_eos=True, detokenize=False, seed=s
        )
        for s in range(first, first + batch_size)
    ]


def run_batch(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> float:
    """Seconds for ``prompts`` together."""
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    for output, asked in zip(outputs, params, strict=True):
        assert len(output.outputs[0].token_ids) == asked.max_tokens, "a request ended early; its time means nothing"
    return seconds


def step_intervals(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[float]:
    """Seconds between consecutive steps in which every one of ``prompts`` got a token."""
    for prompt, asked in zip(prompts, params, strict=True):
        llm.add_request(prompt, asked)
    intervals: list[float] = []
    previous: float | None = None
    while not llm.is_finished():
        whole_batch = len(llm.step()) == len(prompts)
        now = time.perf_counter()
        if previous is not None and whole_batch:
            intervals.append(now - previous)
        previous = now if whole_batch else None
    return intervals


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
