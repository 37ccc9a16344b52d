"""Pieces by capture, on the emulator: same results as eager whatever ran in between."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.graph.fake_model import SIZE, Model, context_of
from weft.forward_context import BatchDescriptor, GraphMode, forward_context
from weft.graph.graph import EmulatedGraphPool
from weft.graph.pieces import PieceCapture
from weft.graph.wrapper import GraphWrapper

SIZES = (1, 4, 64, 130)
NAMES = frozenset({"running_sum"})


class Pieces:
    """A model captured in pieces for ``SIZES``, largest first, as an engine does it."""

    def __init__(self, model: Model, **options: object) -> None:
        self.model, self.pool = model, EmulatedGraphPool()
        self.ids = torch.zeros(max(SIZES), dtype=torch.int64)
        self.source = PieceCapture(self.pool, NAMES, max(SIZES))
        self.wrapper = GraphWrapper(model, GraphMode.PIECEWISE, self.source.capture, **options)  # type: ignore[arg-type]
        for size in reversed(SIZES):
            with forward_context(context_of([1], {}, breaks=self.source)):
                self.source.warm_up(lambda size=size: model(self.ids[:size]))  # type: ignore[misc]
                self.wrapper.capture(BatchDescriptor(size), ids=self.ids[:size])

    def run(self, ids: Tensor, lengths: list[int], size: int) -> Tensor:
        self.ids[: ids.shape[0]] = ids
        self.ids[ids.shape[0] : size] = 0
        fields = {"mode": GraphMode.PIECEWISE, "descriptor": BatchDescriptor(size)}
        with forward_context(context_of(lengths, self.model.table(), **fields)):
            return self.wrapper(ids=self.ids[:size])[: ids.shape[0]]


@pytest.fixture
def model() -> Model:
    return Model().requires_grad_(False)


def eager(model: Model, ids: Tensor, lengths: list[int]) -> Tensor:
    with forward_context(context_of(lengths, model.table())):
        return model(ids)


def random_lengths(total: int, rng: random.Random) -> list[int]:
    cuts = sorted(rng.sample(range(1, total), rng.randint(0, min(5, total - 1)))) if total > 1 else []
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


def test_sizes_in_random_order_with_memory_churn_equal_eager(model: Model) -> None:
    pieces, rng = Pieces(model), random.Random(3)
    kept = []
    for _ in range(300):
        size = rng.choice(SIZES)
        count = rng.randint(1, size)
        ids, lengths = torch.randint(50, (count,)), random_lengths(count, rng)
        pieces.pool.scribble()
        pieces.source.buffers.scribble()
        kept.append(torch.full((rng.randint(1, 4000),), torch.nan))  # the allocator's other customers
        torch.testing.assert_close(pieces.run(ids, lengths, size), eager(model, ids, lengths), rtol=0, atol=1e-6)
    assert pieces.wrapper.counters.captures == len(SIZES) and pieces.wrapper.counters.replays == 300


def test_split_ops_do_not_run_during_capture_and_run_on_replay(model: Model) -> None:
    pieces = Pieces(model)
    assert [m.calls for m in model.mixers] == [0, 0, 0]
    pieces.run(torch.ones(3, dtype=torch.int64), [3], 4)
    assert [m.calls for m in model.mixers] == [1, 1, 1]
    (first, *_), steps = pieces.wrapper._entries.values(), len(model.mixers)
    assert first.graph.num_pieces == steps + 1 and len(first.graph.steps) == 2 * steps + 1  # type: ignore[attr-defined]


def test_what_crosses_a_break_is_shared_by_layers_and_sizes(model: Model) -> None:
    buffers = Pieces(model).source.buffers
    # One input, one output, one result; nothing per layer or per size.
    assert buffers.num_bytes == 3 * max(SIZES) * SIZE * 4


class AllAtOnce(Model):
    """Outputs of split ops that live at the same time."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        first, second = self.mixers[0].mix(x), self.mixers[1].mix(2 * x)
        return first - second + self.mixers[2].mix(x * 3)


def test_outputs_that_live_together_do_not_share_memory() -> None:
    model = AllAtOnce().requires_grad_(False)
    pieces, ids = Pieces(model), torch.randint(50, (63,))
    torch.testing.assert_close(pieces.run(ids, [20, 43], 64), eager(model, ids, [20, 43]), rtol=0, atol=1e-6)
    assert pieces.source.buffers.num_bytes == (1 + 3 + 1) * max(SIZES) * SIZE * 4


def test_an_op_that_is_not_named_is_captured_and_frozen(model: Model) -> None:
    """Why split ops split: captured, this one keeps the lengths of its capture."""
    source = PieceCapture(EmulatedGraphPool(), frozenset(), 4)
    ids = torch.arange(4)
    with forward_context(context_of([4], model.table(), breaks=source)):
        source.warm_up(lambda: model(ids))
        graph, out = source.capture(lambda: model(ids))
    assert graph.num_pieces == 1
    with forward_context(context_of([2, 2], model.table())):
        graph.replay()
    torch.testing.assert_close(out, eager(model, ids, [4]))
    assert not torch.allclose(out, eager(model, ids, [2, 2]))


def test_a_failed_capture_leaves_no_recording_behind(model: Model) -> None:
    pieces = Pieces(model)

    def broken() -> Tensor:
        model(pieces.ids[:4])
        raise ValueError("broken")

    with forward_context(context_of([4], {}, breaks=pieces.source)), pytest.raises(ValueError, match="broken"):
        pieces.source.capture(broken)
    ids = torch.tensor([1, 2, 3])
    torch.testing.assert_close(pieces.run(ids, [1, 2], 4), eager(model, ids, [1, 2]))


def test_a_wrapper_of_another_mode_is_transparent_also_inside_a_full_graph(model: Model) -> None:
    plain = context_of([1, 3], model.table()), torch.tensor([5, 6, 7, 8])
    inner = Pieces(model)
    calls: list[int] = []

    def step(ids: Tensor) -> Tensor:
        calls.append(1)
        return inner.wrapper(ids=ids) * 2

    pool = EmulatedGraphPool()
    outer = GraphWrapper(lambda ids: step(ids), GraphMode.FULL, pool.capture)
    descriptor = BatchDescriptor(1, 1, uniform_decode=True)
    # One token per sequence, so that the op's host lengths are those of every such batch.
    ids = torch.tensor([5])
    fields = {"mode": GraphMode.FULL, "descriptor": descriptor}
    with forward_context(context_of([1], model.table(), **fields)):
        outer.capture(descriptor, ids=ids)
    for token in (7, 8):
        ids.fill_(token)
        with forward_context(context_of([1], model.table(), **fields)):
            full = outer(ids=ids).clone()
        with forward_context(context_of([1], model.table())):
            torch.testing.assert_close(outer(ids=ids), full)
    assert len(calls) == 1 + 2 and inner.wrapper.counters.replays == 0
    with forward_context(plain[0]):
        inner.wrapper(ids=plain[1])
    assert inner.wrapper.counters.plain_calls == 1 + 2 + 1


@pytest.mark.parametrize(
    ("replace", "message"),
    [
        (lambda ids: ids.clone(), "ids is not the tensor .*address"),
        (lambda ids: ids[:3], r"ids is not .*shape \(4,\) is now \(3,\)"),
        (lambda ids: ids.int(), "ids is not .*dtype torch.int64 is now torch.int32"),
    ],
)
def test_debug_mode_names_the_tensor_that_moved(
    model: Model, replace: Callable[[Tensor], Tensor], message: str
) -> None:
    pieces = Pieces(model, debug=True, watched=dict(model.named_parameters()))
    fields = {"mode": GraphMode.PIECEWISE, "descriptor": BatchDescriptor(4)}
    with forward_context(context_of([4], model.table(), **fields)):
        pieces.wrapper(ids=pieces.ids[:4])
        with pytest.raises(RuntimeError, match=message):
            pieces.wrapper(ids=replace(pieces.ids[:4]))
        model.projections[1].weight.data = model.projections[1].weight.data.clone()
        with pytest.raises(RuntimeError, match=r"projections\.1\.weight is not"):
            pieces.wrapper(ids=pieces.ids[:4])


def test_a_batch_without_a_graph_is_an_error(model: Model) -> None:
    with (
        forward_context(context_of([5], {}, mode=GraphMode.PIECEWISE, descriptor=BatchDescriptor(5))),
        pytest.raises(AssertionError, match="no PIECEWISE graph"),
    ):
        GraphWrapper(model, GraphMode.PIECEWISE, lambda f: (None, f()))(ids=torch.ones(5))  # type: ignore[arg-type, return-value]
