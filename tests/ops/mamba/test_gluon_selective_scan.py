"""The selective scan's Gluon kernel, emulated, against the reference. On a GPU test_selective_scan.py runs it."""

# ruff: noqa: E402 (the imports need a version of Triton)
from __future__ import annotations

from itertools import product

import pytest
import torch

from weft.platforms.triton_version import is_known

triton = pytest.importorskip("triton")
if not is_known(triton.__version__):
    pytest.skip("the kernel is for versions of Triton that Weft knows", allow_module_level=True)

from tests.ops.delta_rule.test_triton_gdn import close, mixed_batch, poisoned
from tests.ops.gluon_emulator import Emulator
from tests.ops.interpreter import DEVICE
from tests.ops.mamba.test_selective_scan import scan_inputs
from weft.ops.backend import Backend
from weft.ops.mamba import ScanWeights, scan_gluon, selective_scan
from weft.ops.mamba.scan_gluon import Shape, choose_shape, launch_selective_scan
from weft.ops.triton.launch import launches_handled

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="emulated")


@pytest.mark.parametrize(
    ("heads", "shape"),
    [(1, Shape(4, 1)), (1, Shape(8, 2)), (2, Shape(2, 4, 32)), (1, Shape(4, 1, 32)), (4, Shape(2, 2))],
    ids=str,
)
def test_scan(heads: int, shape: Shape) -> None:
    """Decodes, fresh, short and continued sequences, checkpoints, and NaN in padding. A head has two programs."""
    batch, channels = mixed_batch(), 2 * heads * shape.channels
    n = batch.num_tokens
    x, z, dt, b, c, weights = scan_inputs(n + 3, torch.float32, channels, 16)
    if heads > 1:
        b, c = (torch.randn(n + 3, heads, 16) for _ in range(2))
    poisoned(batch, x, z, dt, b, c)
    before = torch.randn(13, 16, channels)
    before[[3, 4]] = torch.nan  # sequences 2 and 3 start here: what their slots hold must not matter
    expected_state, state = before.clone(), before.clone()
    expected = selective_scan(x, z, dt, b, c, weights, expected_state, batch, backend=Backend.TORCH)
    out = torch.full((n + 3, channels), torch.nan)
    with launches_handled(Emulator().handle):
        launch_selective_scan(x, z, dt, b, c, weights, state, out, batch, shape)
    close(out, expected, torch.float32)
    assert (out[n:] == 0).all() and (out[:2] == 0).all(), "padding rows and rows of decodes must be zero"
    close(state[3:12], expected_state[3:12], torch.float32)
    for slot in (0, 1, 2, 12):
        assert torch.equal(state[slot], before[slot]), f"slot {slot} was touched"


@pytest.mark.parametrize(
    ("channels", "heads", "taken"),
    [((8192, 16), 0, True), ((8192, 8), 0, False), ((8208, 16), 0, False), ((3712, 16), 1, True), ((7424, 16), 2, True),
     ((7424, 8), 2, False), ((7424, 16), 4, True), ((7424, 16), 16, False), ((96, 16), 2, False)],
)  # fmt: skip
def test_takes_heads_of_whole_blocks(
    monkeypatch: pytest.MonkeyPatch, channels: tuple[int, int], heads: int, taken: bool
) -> None:
    """Sizes are channels and states; no heads means B of two dimensions."""
    monkeypatch.setattr(scan_gluon, "runs_gluon", lambda device: True)
    b = torch.empty(1, heads, channels[1]) if heads else torch.empty(1, channels[1])
    assert scan_gluon.takes(torch.empty(1, channels[0]), b) == taken


def test_every_choice_divides_what_is_taken() -> None:
    for num_seqs, channels in product((1, 2, 4, 16, 200), (32, 1024, 2048, 3712, 7424, 8192, 16384)):
        assert 32 % choose_shape(num_seqs, channels).channels == 0


@pytest.mark.parametrize(
    ("num_seqs", "channels", "shape"),
    [(1, 2048, (2, 4, 32)), (2, 2048, (2, 4, 32)), (1, 8192, (4, 4, 32)), (4, 4096, (4, 4, 16)), (4, 7424, (8, 2, 16))],
)
def test_fewer_channels_have_more_threads(num_seqs: int, channels: int, shape: tuple[int, ...]) -> None:
    assert choose_shape(num_seqs, channels) == shape


def test_no_block_spans_two_heads() -> None:
    x, b, none = torch.zeros(1, 96), torch.zeros(1, 2, 16), torch.zeros(0)
    with pytest.raises(AssertionError, match="one head"):
        launch_selective_scan(x, x, x, b, b, ScanWeights(none, none, none), none, x, mixed_batch(), Shape(4, 4))
