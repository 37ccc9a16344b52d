"""The walk through chunks for Hopper, emulated, against the reference. On such a GPU test_triton_gdn.py and
test_kimi.py run it."""

# ruff: noqa: E402 (the imports need a version of Triton)
from __future__ import annotations

import pytest
import torch

from weft.platforms.triton_version import is_known

triton = pytest.importorskip("triton")
if not is_known(triton.__version__):
    pytest.skip("the kernel is for versions of Triton that Weft knows", allow_module_level=True)

import triton.language as tl

from tests.ops.delta_rule.test_triton_gdn import close, mixed_batch, poisoned, rule_inputs
from tests.ops.gluon_emulator import Emulator
from tests.ops.interpreter import DEVICE
from weft.config.chunks import CHUNK_SIZE
from weft.ops.backend import Backend
from weft.ops.delta_rule import chunk_gated_delta_rule
from weft.ops.delta_rule import gdn_prefill as gated_delta_rule
from weft.ops.delta_rule import kda_prefill as kda
from weft.ops.delta_rule import scan_hopper as delta_scan_hopper
from weft.ops.delta_rule.scan_hopper import launch_delta_scan
from weft.ops.delta_rule.unit_lower_inverse import unit_lower_inverse
from weft.ops.delta_rule.vectors import PreparedChunks
from weft.ops.triton.launch import jit, launches_handled

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="emulated")


@jit
def _inverse_kernel(below, found, SIZE: tl.constexpr):
    square = tl.program_id(0) * SIZE * SIZE + tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(found + square, unit_lower_inverse(tl.load(below + square), SIZE, "ieee"))


@pytest.mark.parametrize(("per_channel", "consumers"), [(False, 1), (False, 2), (True, 1)])
def test_chunked_rule(per_channel: bool, consumers: int) -> None:
    """Decodes, fresh, short and continued sequences, checkpoints, and NaN in padding."""
    batch = mixed_batch()
    n, chunks = batch.num_tokens, batch.chunk_table
    heads = (2, 2, 128, 128) if per_channel else (1, 2, 128, 128)
    q, k, v, g, beta = rule_inputs(n + 3, heads, torch.bfloat16)
    if per_channel:
        g = g[:, :, None] * torch.rand(n + 3, 2, 128)
    poisoned(batch, q, k, v, g, beta)
    before = torch.randn(13, 2, 128, 128)
    before[[3, 4]] = torch.nan  # sequences 2 and 3 start here: what their slots hold must not matter
    expected_state, state = before.clone(), before.clone()
    wide = (x.float() for x in (q, k, v))
    expected = chunk_gated_delta_rule(*wide, g, beta, expected_state, batch, backend=Backend.TORCH)
    halves = [x.half() for x in (q, k)]  # the interpreter's products are wrong for bfloat16
    if per_channel:
        prepared = kda.prepare_channels(*halves, g, beta, chunks)
    else:
        prepared = gated_delta_rule._prepare(*halves, g, beta, chunks)
    solve, attention, vectors, keys = prepared
    prepared = PreparedChunks(
        solve.bfloat16(), attention.bfloat16(), vectors.view(*vectors.shape[:2], -1, CHUNK_SIZE),
        None if keys is None else keys.bfloat16(),
    )  # fmt: skip
    out = torch.full((n + 3, 2, 128), torch.nan).bfloat16()
    with launches_handled(Emulator().handle):
        launch_delta_scan(q, k, v, out, state, prepared, batch, consumers=consumers)
    close(out[2:], expected[2:], torch.bfloat16)
    assert (out[n:] == 0).all(), "padding rows must be zero"
    assert (out[:2] == 0).all(), "rows of decodes"
    close(state[3:12], expected_state[3:12], torch.bfloat16)
    for slot in (0, 1, 2, 12):
        assert torch.equal(state[slot], before[slot]), f"slot {slot} was touched"


def test_what_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of bfloat16 that the copy engine can address, on Hopper; all else goes to the kernel without Gluon."""
    monkeypatch.setattr(delta_scan_hopper, "runs_gluon", lambda device: True)
    rows = torch.zeros(4, 2 * 128 + 8, dtype=torch.bfloat16)
    good, odd = rows[:, :256].view(4, 2, 128), torch.zeros(4, 2 * 128 + 4, dtype=torch.bfloat16)
    takes = delta_scan_hopper.takes
    assert takes(good, good, good)
    for bad in (odd[:, :256].view(4, 2, 128), rows[:, 4:260].view(4, 2, 128), good.float(), good[..., :64]):
        assert not takes(bad, good, good) and not takes(good, bad, good) and not takes(good, good, bad)
    monkeypatch.setattr(delta_scan_hopper, "runs_gluon", lambda device: False)
    assert not takes(good, good, good)


@pytest.mark.parametrize("size", [16, 64])
def test_inverse_of_hard_systems(size: int) -> None:
    """Equal keys at full strength, and random ones, against float64."""
    below = torch.stack([torch.full((size, size), 0.99), torch.randn(size, size) * 0.3]).tril(-1)
    found = torch.empty_like(below)
    _inverse_kernel[(2,)](below, found, SIZE=size)
    want = torch.linalg.inv(torch.eye(size).double() + below.double())
    assert ((found - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2))).max() < 1e-5
