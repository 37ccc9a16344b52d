"""The Gluon kernels of a verification by few sequences and of a decode step, emulated, against the reference. On a GPU
test_triton_gdn.py and test_kimi.py run them."""

# ruff: noqa: E402 (the imports need a version of Triton)
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.platforms.triton_version import is_known

triton = pytest.importorskip("triton")
if not is_known(triton.__version__):
    pytest.skip("the kernel is for versions of Triton that Weft knows", allow_module_level=True)

from tests.ops.delta_rule.test_triton_gdn import close
from tests.ops.gluon_emulator import Emulator
from tests.ops.interpreter import DEVICE
from weft.config.gated_delta_net import GatedDeltaNetConfig
from weft.config.kimi import KimiDeltaConfig
from weft.ops.backend import Backend
from weft.ops.delta_rule import DeltaWeights, gdn_decode, gdn_verify, kda_decode, kda_verify
from weft.ops.delta_rule import decode_gluon as gdn_decode_gluon
from weft.ops.delta_rule import verify as gdn_verify_kernels
from weft.ops.delta_rule import verify_gluon as gdn_verify_gluon
from weft.ops.triton.launch import launches_handled
from weft.ops.triton.sizes import MULTIPROCESSORS

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="emulated")


@contextmanager
def emulated(launched: list[str]) -> Iterator[None]:
    """Kernels in Gluon are emulated; adds their names."""
    emulator = Emulator()

    def handle(kernel: Any, *launch: Any) -> None:
        launched.append(kernel.fn.__name__)
        emulator.handle(kernel, *launch)

    with launches_handled(handle):
        yield


def weights_of(num_channels: int, dt_bias: Tensor) -> DeltaWeights:
    """Weights of two heads."""
    return DeltaWeights(torch.randn(num_channels, 4), torch.tensor([-3.0, 1.0]), dt_bias, torch.randn(128), 1e-6)


def test_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and the states after each token; the second sequence is padding, the last keeps nothing of its end."""
    monkeypatch.setattr(gdn_verify_gluon, "runs_gluon", lambda device: True)
    geometry = GatedDeltaNetConfig(1, 2, 128, 128, 4)
    projected = torch.randn(9, geometry.conv_dim + geometry.value_dim + 4)
    projected[3:6] = torch.nan
    weights = weights_of(geometry.conv_dim, torch.tensor([-1.0, 1.0]))
    slots = torch.tensor([[5, 6, 1], [0, 0, 0], [3, 0, 2]], dtype=torch.int32)
    working = torch.tensor([1, 0, 2], dtype=torch.int32)
    conv, state = torch.randn(8, geometry.conv_dim, 3), torch.randn(8, 2, 128, 128)
    state[[5, 6, 3]] = torch.nan  # what is only written may hold anything
    want: list[Tensor] = [conv.clone(), state.clone()]
    expected = gdn_verify(projected, weights, *want, working, slots, geometry, backend=Backend.TORCH)
    with emulated([]):
        out = gdn_verify(projected, weights, conv, state, working, slots, geometry, backend=Backend.TRITON)
    assert (out[3:6] == 0).all(), "padding rows must be zero"
    close(out / expected.std(), expected / expected.std(), torch.float32)
    close(state[1:], want[1][1:], torch.float32)
    assert torch.equal(state[[4, 7]], want[1][[4, 7]]), "untouched slots"


def test_verification_with_a_decay_per_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kimi Delta Attention, as above; heads and tokens decay at rates of their own."""
    monkeypatch.setattr(gdn_verify_gluon, "runs_gluon", lambda device: True)
    geometry, width = KimiDeltaConfig(2, 128, 4, -5.0), 256
    rows = torch.randn(9, 3 * width + 2 + 5), *torch.randn(2, 9, width)
    for x in rows:
        x[3:6] = torch.nan
    weights = weights_of(3 * width, torch.linspace(-6, 3, width))
    slots = torch.tensor([[5, 6, 1], [0, 0, 0], [3, 0, 2]], dtype=torch.int32)
    working = torch.tensor([1, 0, 2], dtype=torch.int32)
    conv, state = torch.randn(8, 3 * width, 3), torch.randn(8, 2, 128, 128)
    state[[5, 6, 3]] = torch.nan
    want = conv.clone(), state.clone()
    expected = kda_verify(*rows, weights, *want, working, slots, geometry, backend=Backend.TORCH)
    launched: list[str] = []
    with emulated(launched):
        out = kda_verify(*rows, weights, conv, state, working, slots, geometry, backend=Backend.TRITON)
    assert launched == ["_verify_states_kernel"]
    assert (out[3:6] == 0).all(), "padding rows must be zero"
    close(out / expected.std(), expected / expected.std(), torch.float32)
    close(state[1:], want[1][1:], torch.float32)
    assert torch.equal(conv[1:], want[0][1:])
    assert torch.equal(state[[4, 7]], want[1][[4, 7]]), "untouched slots"


def test_decode_step_of_states_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launches; the state after goes to a slot of its own, in place, or nowhere."""
    geometry = GatedDeltaNetConfig(1, 2, 128, 128, 4)
    projected = torch.randn(4, geometry.conv_dim + geometry.value_dim + 4).bfloat16()
    projected[1] = torch.nan
    weights = weights_of(geometry.conv_dim, torch.tensor([-1.0, 1.0]))
    working = torch.tensor([1, 0, 2, 3], dtype=torch.int32)
    slots = torch.tensor([[5], [0], [2], [0]], dtype=torch.int32)
    conv, state = torch.randn(7, geometry.conv_dim, 3).bfloat16(), torch.randn(7, 2, 128, 128).bfloat16()
    state[5] = torch.nan
    reserved = state[0].clone()
    want = conv.clone(), state.clone()
    expected = gdn_verify(projected, weights, *want, working, slots, geometry, backend=Backend.TORCH)
    monkeypatch.setattr(gdn_decode_gluon, "runs_gluon", lambda device: True)  # few rows are the other kernel's
    assert gdn_decode_gluon.takes(state, torch.bfloat16, 4)
    assert not gdn_decode_gluon.takes(state.float(), torch.bfloat16, 4)
    launched: list[str] = []
    with emulated(launched):
        out = gdn_verify(projected, weights, conv, state, working, slots, geometry, backend=Backend.TRITON)
    assert launched == ["_decode_states_kernel"]
    assert (out[1] == 0).all(), "padding rows must be zero"
    close(out / expected.std(), expected / expected.std(), torch.bfloat16)
    close(state[1:], want[1][1:], torch.bfloat16)
    assert torch.equal(state[[1, 3, 4, 6]], want[1][[1, 3, 4, 6]]), "untouched slots"
    assert torch.equal(state[0], reserved), "nothing is kept of rows without a slot"
    want = conv.clone(), state.clone()
    expected = gdn_decode(projected, weights, *want, working, geometry, backend=Backend.TORCH)
    with emulated(launched):
        out = gdn_decode(projected, weights, conv, state, working, geometry, backend=Backend.TRITON)
    assert len(launched) == 2
    close(out / expected.std(), expected / expected.std(), torch.bfloat16)
    close(state[1:], want[1][1:], torch.bfloat16)


def test_decode_step_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same states in place, and zeros for the row that is padding; a given ``out`` is for the decode kernel."""
    geometry = GatedDeltaNetConfig(1, 2, 128, 128, 4)
    projected = torch.randn(3, geometry.conv_dim + geometry.value_dim + 4)
    projected[1] = torch.nan
    weights = weights_of(geometry.conv_dim, torch.tensor([-1.0, 1.0]))
    slots = torch.tensor([4, 0, 2], dtype=torch.int32)
    conv, state = torch.randn(6, geometry.conv_dim, 3), torch.randn(6, 2, 128, 128)
    want = conv.clone(), state.clone()
    expected = gdn_decode(projected, weights, *want, slots, geometry, backend=Backend.TORCH)
    monkeypatch.setattr(gdn_verify_gluon, "runs_gluon", lambda device: True)
    launched: list[str] = []
    with emulated(launched):
        out = gdn_decode(projected, weights, conv, state, slots, geometry, backend=Backend.TRITON)
    assert launched == ["_verify_states_kernel"]
    assert (out[1] == 0).all(), "padding rows must be zero"
    close(out / expected.std(), expected / expected.std(), torch.float32)
    close(state[1:], want[1][1:], torch.float32)
    assert torch.equal(conv[1:], want[0][1:])
    given = out.new_full(out.shape, 7.0)
    with emulated(launched):
        gdn_decode(projected, weights, conv, state, slots, geometry, backend=Backend.TRITON, out=given)
    assert (given[1] == 7).all() and len(launched) == 1


@pytest.mark.parametrize("few", [False, True])
def test_decode_step_with_a_decay_per_channel(monkeypatch: pytest.MonkeyPatch, few: bool) -> None:
    """Kimi Delta Attention by both kernels; the second row is padding. A given ``out`` is for the decode kernel."""
    geometry, width, dtype = KimiDeltaConfig(2, 128, 4), 256, torch.float32 if few else torch.bfloat16
    projected = torch.randn(3, 3 * width + 2 + 5).to(dtype)
    f, gate = torch.randn(2, 3, width).to(dtype)
    for x in (projected, f, gate):
        x[1] = torch.nan
    weights = weights_of(3 * width, torch.linspace(-6, 3, width))
    slots = torch.tensor([4, 0, 2], dtype=torch.int32)
    conv, state = torch.randn(6, 3 * width, 3).to(dtype), torch.randn(6, 2, 128, 128).to(dtype)
    want = conv.clone(), state.clone()
    inputs, reserved = (projected, f, gate, weights), state[0].clone()
    expected = kda_decode(*inputs, *want, slots, geometry, backend=Backend.TORCH)
    monkeypatch.setattr(gdn_verify_gluon if few else gdn_decode_gluon, "runs_gluon", lambda device: True)
    launched: list[str] = []
    with emulated(launched):
        out = kda_decode(*inputs, conv, state, slots, geometry, backend=Backend.TRITON)
    assert launched == ["_verify_states_kernel" if few else "_decode_states_kernel"]
    assert (out[1] == 0).all(), "padding rows must be zero"
    close(out / expected.std(), expected / expected.std(), dtype)
    close(state[1:], want[1][1:], dtype)
    assert torch.equal(conv[1:], want[0][1:]) and torch.equal(state[0], reserved)
    given = out.new_full(out.shape, 7.0)
    with emulated(launched):
        kda_decode(*inputs, conv, state, slots, geometry, backend=Backend.TRITON, out=given)
    assert (given[1] == 7).all() and len(launched) == 1


def test_only_few_sequences_of_such_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gdn_verify_gluon, "runs_gluon", lambda device: True)
    few, state = MULTIPROCESSORS // 2, torch.empty(3, 2, 128, 128)
    assert gdn_verify_gluon.takes(state, few)
    assert not gdn_verify_gluon.takes(state, few + 1)
    assert gdn_verify_gluon.takes(state.bfloat16(), 2 * few)
    assert not gdn_verify_gluon.takes(torch.empty(3, 2, 128, 64), few)


def test_which_launch_takes_states_through_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 32 heads in bfloat16, one token of up to 4 rows runs in the kernel for few sequences. More rows run in the
    kernel of decode steps, except 9 to 16 rows, which fill the device once."""
    for gluon in (gdn_decode_gluon, gdn_verify_gluon):
        monkeypatch.setattr(gluon, "runs_gluon", lambda device: True)
    half, full = (torch.empty(1, 32, 128, 128, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    few, many = gdn_verify_gluon.launch_verify_states, gdn_decode_gluon.launch_decode_states
    wanted = [(half, 4, 1, few), (half, 5, 1, many), (half, 8, 1, many), (half, 9, 1, None), (half, 16, 1, None),
              (half, 17, 1, many), (half, 300, 1, many), (half, 8, 3, few), (half, 9, 3, None),
              (full, 2, 1, few), (full, 3, 1, None)]  # fmt: skip
    for state, num_seqs, num_tokens, want in wanted:
        assert gdn_verify_kernels.launch_of_states(state, torch.bfloat16, num_seqs, num_tokens) is want
