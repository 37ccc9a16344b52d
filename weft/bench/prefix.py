"""Prefix reuse: the share of prompt tokens that is reused, and the time to the first token.

Job: run a prefix workload on an engine, or replay it on caches alone. Owns: the methods below. Does not know: flags,
files.

``measure`` runs the requests one at a time, in order, greedily, end-of-sequence ignored. The engine's cache starts
empty; one unrelated request warms the engine up. ``replay`` runs the same requests through cache managers without a
model (made-up outputs), for every checkpoint policy and eviction. Cache sizes are shares of the size that an unbounded
cache reaches. *Reusable* is the reuse of an unbounded cache with a state at every position.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, get_args

from weft.bench.prefix_workloads import Turn, make_workload
from weft.cache.manager import Manager
from weft.cache.policy import FlopAware
from weft.cache.spec import CacheSpec
from weft.cache.state_plan import CheckpointPolicy
from weft.cache.tuning import AlphaTuner, ReplayCounts, replay_request
from weft.sampling_params import SamplingParams

if TYPE_CHECKING:
    from weft.engine.llm import LLM

POLICIES: tuple[CheckpointPolicy, ...] = get_args(CheckpointPolicy)
EVICTIONS = ("lru", "flops")


@dataclass(frozen=True, slots=True)
class PrefixWorkload:
    """The workload, a name of ``prefix_workloads.WORKLOADS``."""

    name: str = "chat"
    seed: int = 0


def measure(llm: LLM, workload: PrefixWorkload) -> dict[str, Any]:
    """Measure one run: tokens, and times in milliseconds (medians) and seconds."""
    turns = make_workload(workload.name, llm.config.model_config.vocab_size, workload.seed)
    _generate(llm, [0, 1, 2, 3], 4, ())
    prompts: list[list[int]] = []
    outputs: list[list[int]] = []
    ttft_ms, cached = [], 0
    start = time.perf_counter()
    for turn in turns:
        prompt = turn.prompt(prompts, outputs)
        output = _generate(llm, prompt, turn.output_len, _boundaries(turn, prompt))
        assert output.metrics.time_to_first_token is not None
        ttft_ms.append(1e3 * output.metrics.time_to_first_token)
        cached += output.num_cached_tokens
        prompts.append(prompt)
        outputs.append(list(output.outputs[0].token_ids))
    seconds = time.perf_counter() - start
    total = sum(map(len, prompts))
    spec = llm._core.manager.spec
    reusable = _reusable(spec, prompts, outputs, turns).num_reused_tokens
    return {
        "requests": len(turns),
        "prompt_tokens": total,
        "reusable_tokens": reusable,
        "cached_tokens": cached,
        "cached_share": round(cached / total, 4),
        "cached_of_reusable": round(cached / reusable, 4) if reusable else None,
        "computed_tokens": total - cached,
        "ttft_ms": round(median(ttft_ms), 3),
        "total_s": round(seconds, 3),
    }


def _generate(llm: LLM, prompt: list[int], output_len: int, boundaries: Sequence[int]) -> Any:
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": prompt, "checkpoint_positions": boundaries}], params, use_tqdm=False)
    return output


def _boundaries(turn: Turn, prompt: list[int]) -> list[int]:
    return [len(prompt)] if turn.marks_boundary else []


def replay(
    spec: CacheSpec,
    workload: PrefixWorkload,
    vocab_size: int,
    shares: Sequence[float],
    policies: Sequence[CheckpointPolicy] = POLICIES,
) -> list[dict[str, Any]]:
    """The share of reusable tokens that each setting reuses, in an unbounded cache, and with ``shares`` of its size."""
    turns = make_workload(workload.name, vocab_size, workload.seed)
    prompts, outputs = _made_up(turns, vocab_size, workload.seed)
    longest = max(spec.pages_for(len(p) + len(o)) for p, o in zip(prompts, outputs, strict=True))
    reusable = _reusable(spec, prompts, outputs, turns).num_reused_tokens
    rows = []
    for policy in policies:
        unbounded = _manager(spec, _pages(spec, prompts, outputs), 6 * len(turns) + 2, policy, "lru")
        best = _replay(unbounded, prompts, outputs, turns)
        rows.append(_row(policy, "-", 1.0, best, reusable, best))
        held = unbounded.pages.capacity - unbounded.pages.num_free, unbounded.slots.capacity - unbounded.slots.num_free
        for share in shares:
            # One request must fit beside what is cached for others.
            pages, slots = int(held[0] * share) + longest + 2, max(4, int(held[1] * share))
            for eviction in EVICTIONS:
                counts = _replay(_manager(spec, pages, slots, policy, eviction), prompts, outputs, turns)
                rows.append(_row(policy, eviction, share, counts, reusable, best))
    return rows


def _row(
    policy: str, eviction: str, share: float, counts: ReplayCounts, reusable: int, best: ReplayCounts
) -> dict[str, Any]:
    return {
        "policy": policy,
        "eviction": eviction,
        "cache": round(share, 3),
        "reused_of_reusable": round(counts.num_reused_tokens / max(1, reusable), 4),
        "flops_saved_of_unbounded": round(counts.flops_saved / best.flops_saved, 4) if best.flops_saved else None,
    }


def _made_up(turns: list[Turn], vocab_size: int, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    rng = random.Random(seed + 1)
    prompts: list[list[int]] = []
    outputs: list[list[int]] = []
    for turn in turns:
        prompts.append(turn.prompt(prompts, outputs))
        outputs.append([rng.randrange(vocab_size) for _ in range(turn.output_len)])
    return prompts, outputs


def _reusable(spec: CacheSpec, prompts: list[list[int]], outputs: list[list[int]], turns: list[Turn]) -> ReplayCounts:
    """The reuse of an oracle. Without recurrent layers every stored position can be reused."""
    plain = replace(spec, layers={name: replace(layer, states=()) for name, layer in spec.layers.items()})
    return _replay(_manager(plain, _pages(spec, prompts, outputs), 1, "exact", "lru"), prompts, outputs, turns)


def _pages(spec: CacheSpec, prompts: list[list[int]], outputs: list[list[int]]) -> int:
    """Number of pages that hold everything."""
    return sum(spec.pages_for(len(p) + len(o)) + 1 for p, o in zip(prompts, outputs, strict=True)) + 2


def _manager(spec: CacheSpec, pages: int, slots: int, policy: CheckpointPolicy, eviction: str) -> Manager:
    manager = Manager(
        spec,
        num_pages=pages,
        num_slots=slots,
        enable_prefix_caching=True,
        checkpoint_policy=policy,
        eviction=eviction,
    )
    if isinstance(manager.evictor.policy, FlopAware):
        manager.observer = AlphaTuner(manager)
    return manager


def _replay(manager: Manager, prompts: list[list[int]], outputs: list[list[int]], turns: list[Turn]) -> ReplayCounts:
    counts = ReplayCounts()
    for prompt, output, turn in zip(prompts, outputs, turns, strict=True):
        # The token sampled last is never fed.
        replay_request(manager, prompt + output[:-1], len(prompt), boundaries=_boundaries(turn, prompt), counts=counts)
    return counts
