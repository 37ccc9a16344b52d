"""Milliseconds of whole steps, of any size and in any graph mode.

Method: a step is timed from an idle device, from the scheduler output to the sampled tokens. A GPU is timed by device
events, so that gaps between launches count, a CPU by the clock. Candidates take turns, each round in random order; the
figure is the median. Prompts are random tokens, sampling is greedy, which costs a step without graphs the least.
Sequences have pages of their own as far as the cache is large enough. The pages hold arbitrary, finite values.
"""

import dataclasses
import random
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, median

import msgspec
import torch
from tqdm import tqdm

from weft.config.graph_modes import GraphMode
from weft.config.graph_profile import GraphProfile, Timing
from weft.graph.dispatcher import Dispatcher
from weft.messages import NewRequest, RowSampling, ScheduledRequest, SchedulerOutput
from weft.pieces.mode_table import TIE, ModeTable, points_to_measure
from weft.runner.model_runner import ModelRunner

Change = Callable[[Dispatcher], Dispatcher]
"""How a candidate differs: from the runner's dispatcher to its own."""

GREEDY = RowSampling(temperature=0.0)

NUM_WARMUPS = 2

MIN_REPEATS = 5
"""Rounds that every comparison gets, however long its steps take."""

MIXED_DECODES = 16
"""Decodes in a mixed batch, at most."""


class StepMaker:
    """Steps of given sizes, for an idle runner. Decodes need a context, which is computed when they are first made;
    making prompts may take rows away from decodes made before.

    Args:
        context: tokens that a decoding sequence has.
    """

    def __init__(self, runner: ModelRunner, context: int, seed: int = 0) -> None:
        self._runner, self._rng = runner, random.Random(seed)
        limits = runner.config.max_num_batched_tokens, runner.plan.max_model_len - 2
        self._context = max(1, min(context, *limits))
        self._num_ready = 0  # rows from 0 on that hold a context
        self._next_page = 0

    def prefill(self, num_tokens: int) -> SchedulerOutput:
        """Prompts of ``num_tokens`` together, as few as the context length allows; of fewer if all rows hold less."""
        return self._prompts(num_tokens, first_row=0)

    def decode(self, num_seqs: int) -> SchedulerOutput:
        """A token each of ``num_seqs`` sequences."""
        while self._num_ready < num_seqs:
            count = max(1, min(num_seqs - self._num_ready, self._room // self._context))
            ready = self._num_ready + count
            self._runner.run(self._prompts(count * self._context, self._num_ready, self._context))
            self._num_ready = ready
        return SchedulerOutput(0, [self._request(row, self._context, 1, []) for row in range(num_seqs)])

    def mixed(self, num_tokens: int) -> SchedulerOutput:
        """Decodes, and prompts that fill up to ``num_tokens``, which is 2 or more."""
        num_decodes = min(MIXED_DECODES, num_tokens - 1, self._runner.plan.max_num_seqs - 1)
        decodes, prompts = self.decode(num_decodes), self._prompts(num_tokens - num_decodes, num_decodes)
        return SchedulerOutput(0, decodes.requests + prompts.requests, prompts.new_requests)

    @property
    def _room(self) -> int:
        return self._runner.config.max_num_batched_tokens

    def _prompts(self, num_tokens: int, first_row: int, longest: int | None = None) -> SchedulerOutput:
        """Prompts in the rows from ``first_row`` on, none longer than ``longest``."""
        longest = longest or self._runner.plan.max_model_len - 1
        num_tokens = min(num_tokens, longest * (self._runner.plan.max_num_seqs - first_row))
        lengths = [longest] * (num_tokens // longest) + [num_tokens % longest] * (num_tokens % longest > 0)
        self._num_ready = min(self._num_ready, first_row)
        vocabulary = self._runner.config.model_config.vocab_size
        requests, new = [], []
        for row, length in enumerate(lengths, start=first_row):
            pages = self._pages(self._runner.spec.pages_for(length + 1))
            requests.append(self._request(row, 0, length, pages))
            prompt = array("I", [self._rng.randrange(vocabulary) for _ in range(length)])
            new.append(NewRequest(row, prompt, length, GREEDY))
        return SchedulerOutput(0, requests, new)

    def _request(self, row: int, start: int, num_tokens: int, pages: list[int]) -> ScheduledRequest:
        slots = self._runner.plan.num_slots - 1
        slot = 1 + row % slots if self._runner.spec.has_states else 0
        return ScheduledRequest(row, start, num_tokens, pages, slot, True)

    def _pages(self, count: int) -> list[int]:
        usable = self._runner.plan.num_pages - 1
        first, self._next_page = self._next_page, self._next_page + count
        return [1 + page % usable for page in range(first, first + count)]


def time_step(runner: ModelRunner, step: SchedulerOutput) -> tuple[float, str]:
    """Milliseconds of one step from an idle device, and the mode it ran in."""
    if runner.device.type != "cuda":
        start = time.perf_counter()
        pending = runner.launch(step)
        return (time.perf_counter() - start) * 1e3, pending.mode
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(runner.device)
    begin.record()
    pending = runner.launch(step)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end), pending.mode


def compare(
    runner: ModelRunner, step: SchedulerOutput, candidates: Mapping[str, Change], repeats: int, max_s: float
) -> dict[str, list[float]]:
    """Milliseconds of one step under several dispatchers, in interleaved rounds.

    Args:
        step: a step that can run again and again.
        repeats: rounds; fewer, but ``MIN_REPEATS``, where they would take more than ``max_s`` seconds.
    """
    found: dict[str, list[float]] = {name: [] for name in candidates}
    names, shuffled = list(candidates), random.Random(0)
    for name in names * NUM_WARMUPS:
        _time_as(runner, step, candidates[name])
    started = time.perf_counter()
    for done in range(repeats):
        if done >= MIN_REPEATS and time.perf_counter() - started > max_s:
            break
        shuffled.shuffle(names)  # in a fixed order, each candidate would run after the same other one
        for name in names:
            found[name].append(_time_as(runner, step, candidates[name])[0])
    return found


def _time_as(runner: ModelRunner, step: SchedulerOutput, change: Change) -> tuple[float, str]:
    with runner.graphs.dispatching(change):
        return time_step(runner, step)


def forced(mode: GraphMode, num_tokens: int) -> Change:
    """The candidate that runs every batch of at most ``num_tokens`` tokens in ``mode``, if a captured size holds it."""
    table = ModeTable.always(mode, num_tokens)
    return lambda dispatcher: dataclasses.replace(dispatcher, table=table)


@dataclasses.dataclass(frozen=True, slots=True)
class Effort:
    """The effort of a measurement: rounds per batch, their limit in seconds, and tokens of context of a decode."""

    repeats: int = 15
    max_s: float = 0.5
    context: int = 1024


def measure_modes(
    runner: ModelRunner, profile: GraphProfile, effort: Effort, *, show_progress: bool = True
) -> GraphProfile:
    """Measure a profile: every possible mode at both ends of every captured size, and between (``points_to_measure``).

    Args:
        runner: idle, with graphs of every mode; its caches are overwritten.
        profile: without figures.
    """
    maker = StepMaker(runner, effort.context)
    dispatcher = runner.graphs.dispatcher
    decode = points_to_measure(dispatcher.decode_sizes)
    tokens = points_to_measure(sorted({*dispatcher.token_sizes, *dispatcher.full_token_sizes}))
    # Decodes first and from the largest on, because they keep their contexts until prompts take their rows.
    work: list[tuple[str, Callable[[int], SchedulerOutput], int]]
    work = [("decode", maker.decode, n) for n in reversed(decode)]
    if runner.plan.max_num_seqs > 1:
        work += [("mixed", maker.mixed, n) for n in sorted({max(2, n) for n in tokens if tokens[-1] > 1})]
    work += [("prefill", maker.prefill, n) for n in tokens]
    found: dict[str, list[Timing]] = {"decode": [], "mixed": [], "prefill": []}
    with tqdm(work, desc="Measuring", disable=not show_progress, dynamic_ncols=True) as bar:
        for kind, make, num_tokens in bar:
            bar.set_postfix_str(f"{kind} of {num_tokens}", refresh=False)
            found[kind].append(_measure(runner, make(num_tokens), num_tokens, effort))
    found["decode"].reverse()
    return msgspec.structs.replace(profile, **found)


def measure_pieces(runner: ModelRunner, effort: Effort) -> list[Timing]:
    """Prompts alone in pieces, of the same sizes."""
    maker, timings = StepMaker(runner, effort.context), []
    for num_tokens in points_to_measure(runner.graphs.dispatcher.token_sizes):
        pieces = {str(GraphMode.PIECEWISE): forced(GraphMode.PIECEWISE, num_tokens)}
        times = compare(runner, maker.prefill(num_tokens), pieces, effort.repeats, effort.max_s)
        timings.append(Timing(num_tokens, {mode: round(median(ms), 4) for mode, ms in times.items()}))
    return timings


def fastest_split(splits: Mapping[str, Sequence[Timing]]) -> str:
    """The list of split ops whose pieces take the least time in all, every size counting alike; the first one unless
    another is faster by more than a tie (``pieces/mode_table.py``)."""
    first, *others = splits
    ratios = {first: 1.0}
    for name in others:
        pairs = zip(splits[name], splits[first], strict=True)
        ratios[name] = mean(sum(ours.ms.values()) / sum(theirs.ms.values()) for ours, theirs in pairs)
    best = min(ratios, key=ratios.__getitem__)
    return best if ratios[best] * TIE < 1 else first


def _measure(runner: ModelRunner, step: SchedulerOutput, num_tokens: int, effort: Effort) -> Timing:
    candidates = {str(mode): forced(mode, num_tokens) for mode in GraphMode}
    possible = {name: change for name, change in candidates.items() if _time_as(runner, step, change)[1] == name}
    times = compare(runner, step, possible, effort.repeats, effort.max_s)
    return Timing(num_tokens, {name: round(median(ms), 4) for name, ms in times.items()})
