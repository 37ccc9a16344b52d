"""Pieces by capture, on the emulator: same results as eager whatever ran in between."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pieces.fake_model import SIZE, Model, context_of
from tests.pieces.scribble import ScribblingPool, num_bytes, scribble_buffers
from weft.forward_context import forward_context
from weft.graph.graph import EmulatedGraphPool
from weft.graph.graph_set import CaptureOptions
from weft.pieces.capture import PieceCapture, PiecewiseModel
from weft.pieces.sources import Forward

SIZES = (1, 4, 64, 130)
NAMES = frozenset({"running_sum"})


class Pieces:
    """A model captured in pieces for ``SIZES``."""

    def __init__(self, model: Model, prepared: Forward | None = None, **options: Any) -> None:
        self.model, self.pool = model, ScribblingPool()
        context = context_of([1], model.table())  # made once: making its tensors is no part of a pass
        self.runs = PiecewiseModel(
            prepared or model,
            lambda size: context,
            self.pool,
            SIZES,
            NAMES,
            CaptureOptions(torch.device("cpu"), show_progress=False, **options),
        )
        self.source = self.runs._source

    def run(self, ids: Tensor, lengths: list[int], size: int) -> Tensor:
        return self.runs.run(context_of(lengths, self.model.table()), ids, size)


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
        scribble_buffers(pieces.source.buffers)
        kept.append(torch.full((rng.randint(1, 4000),), torch.nan))  # the allocator's other customers
        torch.testing.assert_close(pieces.run(ids, lengths, size), eager(model, ids, lengths), rtol=0, atol=1e-6)
    assert pieces.runs.counters.captures == len(SIZES) and pieces.runs.counters.replays == 300


def test_split_ops_do_not_run_during_capture_and_run_on_replay(model: Model) -> None:
    pieces = Pieces(model)
    assert [m.calls for m in model.mixers] == [0, 0, 0]
    pieces.run(torch.ones(3, dtype=torch.int64), [3], 4)
    assert [m.calls for m in model.mixers] == [1, 1, 1]
    sequence, steps = pieces.runs.sequence(64), len(model.mixers)
    assert len(sequence.steps) == 2 * steps + 1


def test_what_crosses_a_break_is_shared_by_layers_and_sizes(model: Model) -> None:
    buffers = Pieces(model).source.buffers
    # One input, one output, one result; nothing per layer or per size.
    assert num_bytes(buffers) == 3 * max(SIZES) * SIZE * 4


class AllAtOnce(Model):
    """Outputs of split ops that live at the same time."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        first, second = self.mixers[0].mix(x), self.mixers[1].mix(2 * x)
        return first - second + self.mixers[2].mix(x * 3)


def test_outputs_that_live_together_do_not_share_memory() -> None:
    model = AllAtOnce().requires_grad_(False)
    pieces, ids = Pieces(model), torch.randint(50, (63,))
    torch.testing.assert_close(pieces.run(ids, [20, 43], 64), eager(model, ids, [20, 43]), rtol=0, atol=1e-6)
    assert num_bytes(pieces.source.buffers) == (1 + 3 + 1) * max(SIZES) * SIZE * 4


def test_an_op_that_is_not_named_is_captured_and_frozen(model: Model) -> None:
    """Why split ops split: captured, this one keeps the lengths of its capture."""
    source = PieceCapture(EmulatedGraphPool(), frozenset(), 4)
    ids = torch.arange(4)
    with forward_context(context_of([4], model.table(), breaks=source)):
        source.warm_up(lambda: model(ids))
        graph, out = source.capture(lambda: model(ids))
    assert len(graph.steps) == 1
    with forward_context(context_of([2, 2], model.table())):
        graph.replay()
    torch.testing.assert_close(out, eager(model, ids, [4]))
    assert not torch.allclose(out, eager(model, ids, [2, 2]))


def test_a_failed_capture_leaves_no_recording_behind(model: Model) -> None:
    pieces = Pieces(model)

    def broken() -> Tensor:
        model(torch.zeros(4, dtype=torch.int64))
        raise ValueError("broken")

    with forward_context(context_of([4], {}, breaks=pieces.source)), pytest.raises(ValueError, match="broken"):
        pieces.source.capture(broken)
    ids = torch.tensor([1, 2, 3])
    torch.testing.assert_close(pieces.run(ids, [1, 2], 4), eager(model, ids, [1, 2]))


def test_debug_mode_names_the_tensor_that_moved(model: Model) -> None:
    held = {"table": torch.zeros(4)}
    pieces = Pieces(model, watched=lambda: {**dict(model.named_parameters()), **held})
    ids = torch.tensor([1, 2, 3])

    def refused(message: str) -> None:
        with pytest.raises(RuntimeError, match=message):
            pieces.run(ids, [3], 4)

    pieces.run(ids, [3], 4)
    for table, what in (
        (torch.zeros(4), "address"),
        (torch.zeros(3), r"shape \(4,\) is now \(3,\)"),
        (torch.zeros(4).int(), "dtype torch.float32 is now torch.int32"),
    ):
        held["table"] = table
        refused(f"table is not the tensor that .*{what}")
    held.clear()
    refused("captured graphs read table, which is gone")


def test_debug_mode_watches_parameters_and_what_crosses_a_break(model: Model) -> None:
    pieces = Pieces(model, watched=lambda: dict(model.named_parameters()))
    ids, buffers = torch.tensor([1, 2, 3]), pieces.source.buffers._buffers
    key = ("running_sum", "input", 0, (SIZE,), torch.float32)
    buffers[key], kept = buffers[key].clone(), buffers[key]
    with pytest.raises(RuntimeError, match=r"crossing buffer running_sum input 0 .* is not the tensor"):
        pieces.run(ids, [3], 4)
    buffers[key] = kept
    pieces.runs._ids, kept = pieces.runs._ids.clone(), pieces.runs._ids
    with pytest.raises(RuntimeError, match="token ids is not the tensor"):
        pieces.run(ids, [3], 4)
    pieces.runs._ids = kept
    pieces.run(ids, [3], 4)
    model.projections[1].weight.data = model.projections[1].weight.data.clone()
    with pytest.raises(RuntimeError, match=r"projections\.1\.weight is not"):
        pieces.run(ids, [3], 4)


def test_a_batch_without_pieces_is_an_error(model: Model) -> None:
    with pytest.raises(AssertionError, match="no pieces are captured for 5 tokens"):
        Pieces(model).run(torch.tensor([1, 2]), [2], 5)
