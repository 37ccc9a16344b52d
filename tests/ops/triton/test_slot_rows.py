"""Programs that share the rows of a mixed batch: every row with a slot is computed once, whatever the others are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.ops.interpreter import DEVICE
from tests.ops.linear_attention.test_linear_attention import geometry_of, weights_of
from tests.ops.mamba.test_selective_scan import CHANNELS, SIZE, scan_inputs
from weft.ops.backend import Backend
from weft.ops.linear_attention import lightning_attention_step
from weft.ops.mamba import mamba2_decode, selective_scan_step
from weft.ops.triton import slot_rows

TRITON = Backend.TRITON
Step = Callable[..., Tensor]


def mamba2(rows: int) -> tuple[Step, list[Tensor]]:
    g = geometry_of((1, 3, 8, 8), 4)
    weights, projected = weights_of(g, True, torch.float32), torch.randn(rows, sum(g.part_sizes), device=DEVICE)
    shapes = (rows + 1, g.conv_dim, 3), (rows + 1, 3, 8, 8)
    states = [torch.randn(shape, device=DEVICE) for shape in shapes]

    def step(slots: Tensor, *states: Tensor, out: Tensor | None = None) -> Tensor:
        return mamba2_decode(projected, weights, *states, slots, g, backend=TRITON, out=out)

    return step, states


def lightning(rows: int) -> tuple[Step, list[Tensor]]:
    q, k, v = torch.randn(3, rows, 3, 8, device=DEVICE)

    def step(slots: Tensor, state: Tensor, out: Tensor | None = None) -> Tensor:
        rates = -torch.linspace(0.01, 2, 3, device=DEVICE)
        return lightning_attention_step(q, k, v, rates, state, slots, backend=TRITON, out=out)

    return step, [torch.randn(rows + 1, 3, 8, 8, device=DEVICE)]


def scan(rows: int) -> tuple[Step, list[Tensor]]:
    inputs = scan_inputs(rows, torch.float32)

    def step(slots: Tensor, state: Tensor, out: Tensor | None = None) -> Tensor:
        return selective_scan_step(*inputs, state, slots, backend=TRITON, out=out)

    return step, [torch.randn(rows + 1, SIZE, CHANNELS, device=DEVICE)]


KINDS = [mamba2, lightning, scan]
MODULES = "linear_attention.decode", "mamba.scan"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("slots", "programs"),
    [
        ([0] * 7, 2),
        ([3, 5, 0, 0, 0, 0, 0], 2),
        ([4, 0, 0, 7, 0, 1, 0], 2),
        ([0, 0, 0, 0, 0, 0, 2], 3),
        ([1, 2, 3, 4, 5, 6, 7], 1),
        ([1, 0, 3], 8),
    ],
    ids=str,
)
def test_rows_with_a_slot_are_computed(
    kind: Callable[[int], tuple[Step, list[Tensor]]],
    slots: list[int],
    programs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Results equal those of programs for each row. Rows of padding and other states stay as they are."""
    step, states = kind(len(slots))
    at, own = torch.tensor(slots, dtype=torch.int32, device=DEVICE), [state.clone() for state in states]
    want = step(at, *own)
    out = torch.full_like(want, 7.0)

    def shared(num_rows: int, *_: int, **__: int) -> tuple[int, int]:
        return min(num_rows, programs), num_rows

    for module in MODULES:
        monkeypatch.setattr(f"weft.ops.{module}.row_programs", shared)
    step(at, *states, out=out)
    assert torch.equal(out, torch.where((at != 0).view(-1, *[1] * (out.dim() - 1)), want, 7.0))
    for got, expected in zip(states, own, strict=True):
        assert torch.equal(got[1:], expected[1:])


def test_programs_fill_a_device_and_no_more() -> None:
    def programs(num_rows: int, per_row: int) -> int:
        count, rows = slot_rows.row_programs(num_rows, per_row, keep=True)
        assert rows == num_rows
        return count

    assert programs(256, 128) == 66  # Granite-4-small: 8,448 programs instead of 32,768
    assert programs(256, 8) == 256
    assert programs(2, 8192) == 2
    assert programs(130, 8448) == 3, "64 rows are the most that a program looks at"
    assert programs(1, 1) == 1


def test_rows_have_programs_of_their_own_where_padding_is_cleared() -> None:
    assert slot_rows.row_programs(256, 128, keep=False) == (256, None)
