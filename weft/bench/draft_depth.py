"""The number of drafts that pays: milliseconds per new token by batch size and number of drafts.

Job: run the same batches on one engine for each number of drafts. Owns: the method below. Does not know: files, or the
use of the figures.

Method: chats of the bundled evaluation set, greedy, end-of-sequence ignored, so that acceptance is as on worked
answers. With a synthetic acceptance rate, random tokens. A batch is submitted together. The figure is the median time
for ``NEW_TOKENS`` tokens per sequence less that for one token, as in ``weft bench latency``.
"""

import dataclasses
import random
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from weft.bench.evaluation import read_problems
from weft.config.draft_profile import DraftTiming
from weft.config.fields import EngineConfig
from weft.config.speculation import SpeculativeConfig
from weft.engine.llm import LLM
from weft.sampling_params import SamplingParams

NEW_TOKENS, PROMPT_TOKENS, MIN_REPEATS = 64, 256, 3

MOST_DRAFTS = {"mtp": 4, "ngram": 6}
"""Numbers of drafts up to which ``auto`` is measured."""

LARGEST_BATCH = 64


Batch = Callable[[int], object]
"""Runs a batch for the given number of new tokens."""


def batch_sizes(max_num_seqs: int) -> list[int]:
    """The measured batch sizes, powers of two."""
    limit = min(max_num_seqs, LARGEST_BATCH)
    return [2**i for i in range(limit.bit_length())]


@dataclasses.dataclass(frozen=True, slots=True)
class Effort:
    """The effort of a measurement: rounds per batch size and number of drafts, and the seconds after which
    ``MIN_REPEATS`` rounds suffice."""

    repeats: int
    max_s: float


def measure_depths(
    settings: Mapping[str, Any], config: EngineConfig, most: int, effort: Effort, say: Callable[[str], None]
) -> list[DraftTiming]:
    """Measure every batch size, with no drafts up to ``most``.

    Args:
        settings: the user's settings. ``config``: the settings resolved from them.
        say: called with a line about each engine.
    """
    speculation = config.speculative_config
    assert speculation is not None
    found: dict[int, list[float]] = {size: [] for size in batch_sizes(config.max_num_seqs)}
    for count in range(most + 1):
        say(f"drafts: {count} of at most {most}")
        keys = _keys(speculation, count)
        with LLM(**{**settings, "speculative_config": keys, "enable_prefix_caching": False}) as llm:
            for size, times in found.items():
                batch = (
                    _random_batch(llm, size) if speculation.synthetic_acceptance_rate is not None else _chats(llm, size)
                )
                times.append(round(token_ms(batch, effort), 4))
    return [DraftTiming(size, times) for size, times in found.items()]


def _keys(config: SpeculativeConfig, count: int) -> dict[str, Any] | None:
    if not count:
        return None
    names = ["method", "synthetic_acceptance_rate"]
    names += ["prompt_lookup_min", "prompt_lookup_max"] if config.method == "ngram" else []
    return {name: getattr(config, name) for name in names} | {"num_speculative_tokens": count}


def token_ms(run: Batch, effort: Effort) -> float:
    """Milliseconds per new token of each sequence of a batch."""
    run(NEW_TOKENS)  # warm-up
    long: list[float] = []
    short: list[float] = []
    started = time.perf_counter()
    while len(long) < effort.repeats:
        if len(long) >= MIN_REPEATS and time.perf_counter() - started > effort.max_s:
            break
        long.append(_seconds(run, NEW_TOKENS))
        short.append(_seconds(run, 1))
    return max(median(long) - median(short), 1e-6) * 1e3 / (NEW_TOKENS - 1)


def _seconds(run: Batch, max_tokens: int) -> float:
    start = time.perf_counter()
    run(max_tokens)
    return time.perf_counter() - start


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def _chats(llm: LLM, batch_size: int) -> Batch:
    problems = read_problems(limit=batch_size)
    return lambda count: llm.chat([problem.messages for problem in problems], _params(count), use_tqdm=False)


def _random_batch(llm: LLM, batch_size: int) -> Batch:
    rng, top = random.Random(batch_size), llm.config.model_config.vocab_size - 1
    length = min(PROMPT_TOKENS, llm.config.max_model_len - NEW_TOKENS)
    prompts = [[rng.randint(0, top) for _ in range(length)] for _ in range(batch_size)]
    return lambda count: llm.generate(prompts, _params(count), use_tqdm=False)
