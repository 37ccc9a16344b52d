"""Graphs against eager steps: the same batch both ways, for every captured size.

A batch of size n has n - 1 real rows (one, if n is 1), so that padding takes part. The eager run is padded too: the
shapes are the same, and so are the kernels; what differs is only that one was captured. In pieces attention is not
captured and runs on the real rows, with kernels for their number, so there results agree to rounding only.
"""

import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from weft.bench.step_timing import StepMaker
from weft.errors import CapacityError
from weft.forward_context import forward_context
from weft.graph.batch_descriptor import BatchDescriptor
from weft.messages import NewRequest, RowSampling, ScheduledRequest, SchedulerOutput
from weft.runner.buffers import to_device
from weft.runner.model_runner import ModelRunner
from weft.runner.sampling.step_sampler import FullStepOutput

MAX_PROMPT_TOKENS = 130

RELATIVE_TOLERANCE = 1e-5
"""Largest difference that counts as equal, relative to the largest value; the kernels are the same."""

ROUNDING = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""The same for pieces, by the model's dtype."""

Kind = Literal["decode", "verification", "forward", "sampling", "pieces", "encoder"]

Outcome = tuple[Tensor, Tensor | None]
"""``[N, V]`` logits or ``[T, hidden_size]`` hidden states, and the sampled tokens if there are any."""


@dataclass(frozen=True, slots=True)
class SizeCheck:
    """The result of checking one captured size.

    Attributes:
        kind: kind of graph: a decode step, a verification, a forward pass, sampling, a forward pass in pieces, or the
            vision tower.
        size, num_rows: captured size; real rows in it.
        max_abs_diff: largest difference of two values (logits, or hidden states of a forward pass).
        max_abs_value: largest value, to judge the difference by.
        num_different_tokens: rows whose sampled token differs.
        tolerance: largest difference that counts as equal, relative to the largest value.
    """

    kind: Kind
    size: int
    num_rows: int
    max_abs_diff: float
    max_abs_value: float
    num_different_tokens: int
    tolerance: float = RELATIVE_TOLERANCE

    @property
    def agrees(self) -> bool:
        """False also if a value is NaN."""
        return self.num_different_tokens == 0 and self.max_abs_diff <= self.tolerance * self.max_abs_value


def verify_graphs(runner: ModelRunner, seed: int = 0) -> Iterator[SizeCheck]:
    """Check every captured size of every kind, smallest first. The runner must be idle; its caches are overwritten.

    Raises:
        CapacityError: the cache is too small for as many sequences as the largest graph takes.
    """
    checks, rng = _Checks(runner), random.Random(seed)
    graphs = runner.graphs
    for size in graphs.decode.sizes if graphs.decode is not None else ():
        yield checks.whole("decode", _decode(_start(runner, max(1, size - 1), rng)), size)
    for size in graphs.verification.sizes if graphs.verification is not None else ():
        step = _verification(runner, max(1, size - 1), runner.steps.functions.verification_shape(size).query_len, rng)
        yield checks.whole("verification", step, size)
    for size in graphs.forward.sizes if graphs.forward is not None else ():
        yield checks.forward(size)
    for size in graphs.samples.sizes if graphs.samples is not None else ():
        yield checks.sampling(size)
    for size in graphs.pieces.sizes if graphs.pieces is not None else ():
        yield checks.pieces(size)
    encoder = runner.media.graphs.graphs if runner.media is not None else None
    for size in encoder.sizes if encoder is not None else ():
        yield checks.encoder(size)


class _Checks:
    """Runs a batch eagerly and by replay, for each kind of graph."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self._steps = runner, runner.steps

    @torch.inference_mode()
    def whole(self, kind: Kind, step: SchedulerOutput, size: int) -> SizeCheck:
        """A step in which every sequence decodes, or verifies equally many drafts."""
        steps, functions = self._steps, self._steps.functions
        layout = steps.builder.rules.layout(step)
        shape = layout.shape
        graphs, function, padded = steps.graphs.decode, functions.decode, functions.decode_shape(size)
        if kind == "verification":
            graphs, function, padded = steps.graphs.verification, functions.verify, functions.verification_shape(size)
            assert shape.query_len == padded.query_len
        assert graphs is not None
        steps.builder.build(layout, padded)
        replay = partial(graphs.replay, size, shape.num_seqs)
        outcomes = self._both(step, lambda: _of(function(size)), lambda: _of(replay()), graphs.results(size).logits)
        return _check(kind, size, shape.num_tokens, *outcomes)

    @torch.inference_mode()
    def forward(self, size: int) -> SizeCheck:
        steps, graphs = self._steps, self._steps.graphs.forward
        assert graphs is not None
        step, shape = self._fill(size)
        rows = torch.arange(shape.num_tokens)
        if steps.builder.selects_rows(steps.functions.mixed_shape(size)):  # what else it leaves is arbitrary
            rows = torch.tensor([r.num_tokens for r in step.requests]).cumsum(0) - 1
        rows = rows.to(self._runner.device)
        eager, replayed = self._both(
            step,
            lambda: (steps.functions.forward(size)[rows], None),
            lambda: (graphs.replay(size, shape.num_tokens)[rows], None),
            graphs.results(size),
        )
        return _check("forward", size, shape.num_tokens, eager, replayed)

    @torch.inference_mode()
    def sampling(self, size: int) -> SizeCheck:
        """Padding samples, greedily, from random hidden states."""
        steps, graphs = self._steps, self._steps.graphs.samples
        assert graphs is not None
        steps.functions.builder.send_padding(steps.functions.mixed_shape(size))
        steps.functions.hidden.normal_(generator=torch.Generator(self._runner.device).manual_seed(size))
        nothing = SchedulerOutput(0, [])
        eager, replayed = self._both(
            nothing,
            lambda: _of(steps.functions.sample(size)),
            lambda: _of(graphs.replay(size, size)),
            graphs.results(size).logits,
        )
        return _check("sampling", size, size, eager, replayed)

    @torch.inference_mode()
    def pieces(self, size: int) -> SizeCheck:
        steps, pieces = self._steps, self._steps.graphs.pieces
        assert pieces is not None
        step, shape = self._fill(size)
        padded = steps.builder.materialise(steps.functions.mixed_shape(size))

        def eager() -> Outcome:
            with forward_context(steps.context(padded.batch)):
                return pieces.model(input_ids=padded.input_ids), None

        def replay() -> Outcome:
            inputs = steps.builder.materialise(shape)
            return pieces.run(steps.context(inputs.batch), inputs.input_ids, size), None

        tolerance = ROUNDING[next(self._runner.model.parameters()).dtype]
        outcomes = self._both(step, eager, replay, pieces.results(size))
        return _check("pieces", size, shape.num_tokens, *outcomes, tolerance)

    @torch.inference_mode()
    def encoder(self, size: int) -> SizeCheck:
        """Check with an image of random patches, one row of tokens smaller than ``size`` if it has two rows."""
        assert self._runner.media is not None
        media = self._runner.media
        rows = size // media.merge**2
        grid = (1, media.merge * max(1, rows - 1), media.merge)
        generator = torch.Generator(self._runner.device).manual_seed(size)
        patches = media.blank([grid]).normal_(generator=generator)
        media.graphs.fill(patches, [grid], size)
        eager, graphs = media.graphs.encode(size).clone(), media.graphs.graphs
        assert graphs is not None
        graphs.results(size).fill_(torch.nan)
        replayed = media.graphs.replay(patches, [grid], size)
        return _check("encoder", size, len(patches) // media.merge**2, (eager, None), (replayed, None))

    def _fill(self, size: int) -> tuple[SchedulerOutput, BatchDescriptor]:
        """Prompts of one token less than ``size`` together (of one, if it is 1), in the step buffers."""
        step = StepMaker(self._runner, context=1, seed=size).prefill(max(1, size - 1))
        self._steps.prepare(step)
        layout = self._steps.builder.rules.layout(step)
        self._steps.builder.build(layout, self._steps.functions.mixed_shape(size))
        return step, layout.shape

    def _both(
        self, step: SchedulerOutput, eager: Callable[[], Outcome], replay: Callable[[], Outcome], results: Tensor
    ) -> tuple[Outcome, Outcome]:
        """Run both from the same states and last tokens, and return copies of the outcomes.

        ``results``, which holds the replay's results, is filled with NaN before the replay.
        """
        runner, drafting = self._runner, self._steps.drafts
        row_state = drafting.state if drafting is not None else (self._steps.rows.last_token,)
        used = [slot for r in step.requests for slot in (r.state_slot, *(slot for _, slot in r.checkpoints))]
        slots = to_device(torch.tensor(used, dtype=torch.int64), runner.device)
        states = [runner.caches[name][t.name] for name, spec in runner.spec.layers.items() for t in spec.states]
        before = [t.index_select(0, slots) for t in states]
        left = [tensor.clone() for tensor in row_state]
        first = _copied(eager())
        for tensor, values in zip(states, before, strict=True):
            tensor.index_copy_(0, slots, values)
        for tensor, values in zip(row_state, left, strict=True):
            tensor.copy_(values)
        results.fill_(torch.nan)
        return first, _copied(replay())


def _of(sampled: FullStepOutput) -> Outcome:
    return sampled.logits, sampled.result.token_ids


def _copied(outcome: Outcome) -> Outcome:
    values, tokens = outcome
    return values.clone(), tokens.clone() if tokens is not None else None


def _check(
    kind: Kind, size: int, count: int, eager: Outcome, replayed: Outcome, tolerance: float = RELATIVE_TOLERANCE
) -> SizeCheck:
    (ours, our_tokens), (theirs, their_tokens) = replayed, eager
    difference = (theirs[:count].float() - ours[:count].float()).abs().max().item()
    tokens = 0
    if our_tokens is not None and their_tokens is not None:
        tokens = int((our_tokens[:count] != their_tokens[:count]).sum())
    return SizeCheck(kind, size, count, difference, theirs[:count].float().abs().max().item(), tokens, tolerance)


@dataclass(frozen=True, slots=True)
class _Sequence:
    row: int
    slot: int
    length: int
    pages: list[int]


def _start(runner: ModelRunner, count: int, rng: random.Random, query_len: int = 1) -> list[_Sequence]:
    """Prefill ``count`` sequences of random prompts.

    Half of the sequences sample, which checks the random numbers too. Each has room for ``query_len`` more tokens, and
    ``query_len`` slots, the last of which is its working slot.
    """
    plan, spec = runner.plan, runner.spec
    room = min(MAX_PROMPT_TOKENS, plan.max_model_len - query_len, runner.config.max_num_batched_tokens)
    pages = min(spec.pages_for(room + query_len), (plan.num_pages - 1) // count)
    longest = min(room, pages * spec.page_size - query_len)
    if longest < 1:
        raise CapacityError(
            f"{plan.num_pages} KV pages of {spec.page_size} tokens are too few for {count} sequences of two tokens; "
            "raise num_kv_pages, or capture smaller sizes (cuda_graph_max_bs)"
        )
    sequences = []
    for row in range(count):
        slot = (row + 1) * query_len if spec.has_states else 0
        own = list(range(1 + row * pages, 1 + (row + 1) * pages))
        sequence = _Sequence(row, slot, rng.randint(1, longest), own)
        _prefill(runner, sequence, rng)
        sequences.append(sequence)
    return sequences


def _prefill(runner: ModelRunner, sequence: _Sequence, rng: random.Random) -> None:
    prompt = [rng.randrange(runner.config.model_config.vocab_size) for _ in range(sequence.length)]
    sampling = RowSampling(temperature=float(sequence.row % 2), top_p=0.9, seed=sequence.row)
    new = NewRequest(sequence.row, array("I", prompt), len(prompt), sampling)
    request = ScheduledRequest(sequence.row, 0, len(prompt), sequence.pages, sequence.slot, True)
    runner.run(SchedulerOutput(0, [request], [new]))


def _decode(sequences: list[_Sequence]) -> SchedulerOutput:
    return SchedulerOutput(1, [ScheduledRequest(s.row, s.length, 1, [], s.slot, True) for s in sequences])


def _verification(runner: ModelRunner, count: int, query_len: int, rng: random.Random) -> SchedulerOutput:
    """Make a step of ``count`` sequences that verify random drafts.

    Where drafts stay on the device, every second sequence follows a step that rejected one of its drafts.
    """
    vocab, drafting, num_drafts = runner.config.model_config.vocab_size, runner.steps.drafts, query_len - 1
    assert drafting is not None
    requests = []
    for s in _start(runner, count, rng, query_len):
        drafts = [rng.randrange(vocab) for _ in range(num_drafts)]
        follows = bool(drafting.rules.on_device and s.row % 2 and s.length > 1)
        if follows:
            drafting.state.drafts[s.row, :num_drafts] = to_device(torch.tensor(drafts), runner.device)
            drafting.state.num_rejected[s.row] = 1
        slots = range(s.slot - num_drafts, s.slot) if s.slot else ()
        states = [(s.length + 1 + i, slot) for i, slot in enumerate(slots)]
        requests.append(
            ScheduledRequest(
                s.row, s.length, query_len, [], s.slot, True, states, draft_token_ids=drafts, follows=follows
            )
        )
    return SchedulerOutput(1, requests)
