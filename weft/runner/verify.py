"""Graphs against eager steps: the same decode batch both ways, for every captured size.

Job: bring sequences into decoding, run one step of them twice from the same states, compare logits and tokens.
Owns: the batches. Does not know: how graphs are made, what the model computes.

A batch of size n has n - 1 real rows (one, if n is 1), so that padding takes part. The eager run is padded too: the
shapes are the same, and so are the kernels; what differs is only that one was captured.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from weft.errors import CapacityError
from weft.messages import NewRequest, RowSampling, ScheduledRequest, SchedulerOutput
from weft.runner.model_runner import ModelRunner

MAX_PROMPT_TOKENS = 130

RELATIVE_TOLERANCE = 1e-5
"""Largest difference of logits that counts as equal, relative to the largest logit; the kernels are the same."""


@dataclass(frozen=True, slots=True)
class SizeCheck:
    """What one captured size gave.

    Attributes:
        size, num_rows: captured size; real rows in it.
        max_abs_diff: largest difference of two logits.
        max_abs_logit: largest logit, to judge the difference by.
        num_different_tokens: rows whose sampled token differs.
    """

    size: int
    num_rows: int
    max_abs_diff: float
    max_abs_logit: float
    num_different_tokens: int

    @property
    def agrees(self) -> bool:
        """False also if a logit is NaN."""
        return self.num_different_tokens == 0 and self.max_abs_diff <= RELATIVE_TOLERANCE * self.max_abs_logit


def verify_graphs(runner: ModelRunner, seed: int = 0) -> Iterator[SizeCheck]:
    """Check every captured size, smallest first. The runner must be idle; its caches are overwritten.

    Raises:
        CapacityError: the cache is too small for as many sequences as the largest graph takes.
    """
    graphs = runner.graphs.decode
    assert graphs is not None, "there are no graphs to verify"
    rng = random.Random(seed)
    for size in graphs.sizes:
        sequences = _start(runner, max(1, size - 1), rng)
        eager, replayed = runner.decode_both_ways(_decode(sequences))
        difference = (eager[0].float() - replayed[0].float()).abs().max().item()
        tokens = (eager[1] != replayed[1]).sum().item()
        yield SizeCheck(size, len(sequences), difference, eager[0].float().abs().max().item(), int(tokens))


@dataclass(frozen=True, slots=True)
class _Sequence:
    row: int
    slot: int
    length: int
    pages: list[int]


def _start(runner: ModelRunner, count: int, rng: random.Random) -> list[_Sequence]:
    """Prefill ``count`` sequences of random prompts; half of them sample, which checks the random numbers too."""
    plan, spec = runner.plan, runner.spec
    room = min(MAX_PROMPT_TOKENS, plan.max_model_len - 1, runner.config.max_num_batched_tokens)
    pages = min(spec.pages_for(room + 1), (plan.num_pages - 1) // count)
    longest = min(room, pages * spec.page_size - 1)
    if longest < 1:
        raise CapacityError(
            f"{plan.num_pages} KV pages of {spec.page_size} tokens are too few for {count} sequences of two tokens; "
            "raise num_kv_pages, or capture smaller sizes (cuda_graph_max_bs)"
        )
    sequences = []
    for row in range(count):
        slot = row + 1 if spec.has_states else 0
        own = list(range(1 + row * pages, 1 + (row + 1) * pages))
        sequence = _Sequence(row, slot, rng.randint(1, longest), own)
        _prefill(runner, sequence, rng)
        sequences.append(sequence)
    return sequences


def _prefill(runner: ModelRunner, sequence: _Sequence, rng: random.Random) -> None:
    prompt = [rng.randrange(runner.config.model_config.vocab_size) for _ in range(sequence.length)]
    sampling = RowSampling(temperature=float(sequence.row % 2), top_p=0.9, seed=sequence.row)
    new = NewRequest(sequence.row, prompt, len(prompt), sampling)
    request = ScheduledRequest(sequence.row, 0, len(prompt), sequence.pages, sequence.slot, True)
    runner.run(SchedulerOutput(0, [request], [new]))


def _decode(sequences: list[_Sequence]) -> SchedulerOutput:
    return SchedulerOutput(1, [ScheduledRequest(s.row, s.length, 1, [], s.slot, True) for s in sequences])
