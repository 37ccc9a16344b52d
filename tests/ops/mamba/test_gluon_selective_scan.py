"""The selective scan's Gluon kernel, emulated, against the reference. On a GPU test_selective_scan.py runs it."""

# ruff: noqa: E402 (the imports need a version of Triton)
from __future__ import annotations

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
from weft.ops.mamba import selective_scan
from weft.ops.mamba.scan_gluon import Shape, launch_selective_scan
from weft.ops.triton.launch import launches_handled

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="emulated")


@pytest.mark.parametrize("shape", [Shape(4, 1), Shape(8, 2)], ids=str)
def test_scan(shape: Shape) -> None:
    """Decodes, fresh, short and continued sequences, checkpoints, and NaN in padding."""
    batch, channels = mixed_batch(), 2 * shape.channels
    n = batch.num_tokens
    inputs = scan_inputs(n + 3, torch.float32, channels, 16)
    poisoned(batch, *inputs[:5])
    before = torch.randn(13, 16, channels)
    before[[3, 4]] = torch.nan  # sequences 2 and 3 start here: what their slots hold must not matter
    expected_state, state = before.clone(), before.clone()
    expected = selective_scan(*inputs, expected_state, batch, backend=Backend.TORCH)
    out = torch.full((n + 3, channels), torch.nan)
    with launches_handled(Emulator().handle):
        launch_selective_scan(*inputs, state, out, batch, shape)
    close(out, expected, torch.float32)
    assert (out[n:] == 0).all() and (out[:2] == 0).all(), "padding rows and rows of decodes must be zero"
    close(state[3:12], expected_state[3:12], torch.float32)
    for slot in (0, 1, 2, 12):
        assert torch.equal(state[slot], before[slot]), f"slot {slot} was touched"
