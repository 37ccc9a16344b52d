"""The double-gated short convolution: token by token, and its kernels against their references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.delta_rule.test_triton_gdn import ON_GPU, Places, close, on_device
from tests.ops.interpreter import DEVICE
from tests.ops.oracles import make_batch
from tests.whole import covering
from weft.forward_context import Batch
from weft.ops.backend import Backend
from weft.ops.convolution import (
    causal_conv1d_update,
    causal_conv1d_verify,
    short_conv,
    short_conv_decode,
    short_conv_verify,
)

TORCH, TRITON = Backend.TORCH, Backend.TRITON
DTYPES = [torch.float32, torch.bfloat16 if ON_GPU else torch.float16]


def naive(projected: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence from ``state [C, W - 1]``, one token after the other. Returns outputs and the last state."""
    outputs = []
    for row in projected:
        gate_in, gate_out, x = row.chunk(3)
        window = torch.cat([state, (gate_in * x)[:, None]], dim=1)
        y = (window * weight).sum(1) + (0.0 if bias is None else bias)
        outputs.append(gate_out * y)
        state = window[:, 1:]
    return torch.stack(outputs), state


def batch_of(backend: Backend) -> Batch:
    """Decodes, fresh, short and continued sequences; checkpoints near the start; padding of each kind."""
    batch = make_batch(
        [1, 1, 66, 1, 5, 70], [9, 3, 0, 0, 7, 5],
        num_decodes=2, checkpoints={2: {1: 7, 2: 8, 64: 9}, 5: {2: 10, 9: 11}}, pad_tokens=3, pad_seqs=2, pad_chunks=2,
    )  # fmt: skip
    return on_device(batch) if backend is TRITON else batch


def inputs(rows: int, channels: int, kernel: int, bias: bool, device: str) -> list[Tensor | None]:
    gen = torch.Generator().manual_seed(1)
    shapes = [(rows, 3 * channels), (channels, kernel), (channels,), (13, channels, kernel - 1)]
    projected, weight, offset, state = (torch.randn(*shape, generator=gen).to(device) for shape in shapes)
    return [projected, weight, offset if bias else None, state]


@pytest.mark.parametrize(("kernel", "bias"), [(2, True), (3, False), (4, True), (7, True)])
def test_chunks_and_steps_equal_token_by_token(kernel: int, bias: bool) -> None:
    batch = batch_of(TORCH)
    projected, weight, offset, state = inputs(batch.num_tokens + 3, 6, kernel, bias, "cpu")
    assert projected is not None and weight is not None and state is not None
    projected[batch.num_tokens :] = torch.nan
    before = state.clone()
    got = short_conv(projected, weight, offset, state, batch, backend=TORCH)
    slots = batch.state_slots[:2]
    short_conv_decode(projected[:2], weight, offset, state, slots, backend=TORCH, out=got[:2])
    assert (got[batch.num_tokens :] == 0).all()
    starts = batch.cu_seqlens_q.tolist()
    for i in range(6):
        slot, span = int(batch.state_slots[i]), slice(starts[i], starts[i + 1])
        continues = int(batch.seq_lens[i]) != starts[i + 1] - starts[i]
        initial = before[slot] if continues else torch.zeros_like(before[slot])
        expected, last = naive(projected[span], weight, offset, initial)
        torch.testing.assert_close(got[span], expected)
        torch.testing.assert_close(state[slot], last)
    _, at_two = naive(projected[starts[2] : starts[2] + 2], weight, offset, torch.zeros_like(before[0]))
    torch.testing.assert_close(state[8], at_two)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kernel", "bias", "channels"), [(2, True, 40), (3, False, 300), (7, True, 40)])
def test_kernels_equal_the_reference(kernel: int, bias: bool, channels: int, dtype: torch.dtype) -> None:
    batch = batch_of(TRITON)
    tensors = inputs(batch.num_tokens + 3, channels, kernel, bias, DEVICE)
    projected, weight, offset, before = (t if t is None else t.to(dtype) for t in tensors)
    assert projected is not None and weight is not None and before is not None
    results = []
    for backend in (TORCH, TRITON):
        state = before.clone()
        out = short_conv(projected, weight, offset, state, batch, backend=backend)
        results.append((out, state))
    close(results[1][0], results[0][0], dtype)
    close(results[1][1][1:], results[0][1][1:], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(
    ("kernel", "bias", "channels"), [(2, True, 40), (3, False, 300), (4, True, 256), (7, True, 40)]
)
def test_decode_kernel_equals_the_reference(
    kernel: int, bias: bool, channels: int, kept: bool, dtype: torch.dtype
) -> None:
    tensors = inputs(4, channels, kernel, bias, DEVICE)
    projected, weight, offset, before = (t if t is None else t.to(dtype) for t in tensors)
    assert projected is not None and weight is not None and before is not None
    slots = torch.tensor([3, 0, 12, 0], dtype=torch.int32, device=DEVICE)
    results = []
    for backend in (TORCH, TRITON):
        state, out = before.clone(), torch.full((4, channels), 7.0, dtype=dtype, device=DEVICE) if kept else None
        got = short_conv_decode(projected, weight, offset, state, slots, backend=backend, out=out)
        assert (got[[1, 3]] == (7.0 if kept else 0.0)).all()
        results.append((got, state))
    close(results[1][0], results[0][0], dtype)
    close(results[1][1][1:], results[0][1][1:], dtype)


@pytest.mark.parametrize(
    ("kind", "sizes", "backend", "dtype"),
    covering(
        ["silu", "plain", "double-gated"], [(2, 2, True), (3, 3, False), (10, 4, False), (4, 17, True)],
        [TORCH, TRITON], DTYPES,
    ),
    ids=str,
)  # fmt: skip
def test_verified_tokens_are_decode_steps(
    kind: str, sizes: tuple[int, int, bool], backend: Backend, dtype: torch.dtype
) -> None:
    """Bit for bit, with the state after every token; rejected tokens leave nothing in it."""
    kernel, num_tokens, bias = sizes
    places = Places(num_tokens)
    tensors = inputs(places.after.numel(), 40, kernel, bias, DEVICE)
    projected, weight, offset, _ = (t if t is None else t.to(dtype) for t in tensors)
    assert projected is not None and weight is not None
    state = torch.randn(places.count, 40, kernel - 1, device=DEVICE).to(dtype)
    projected[places.padding] = torch.nan
    places.poison(state)
    before, stepwise = state.clone(), state.clone()

    def run(x: Tensor, state: Tensor, *slots: Tensor) -> Tensor:
        if kind == "double-gated":
            operation = short_conv_verify if len(slots) == 2 else short_conv_decode
            return operation(x, weight, offset, state, *slots, backend=backend)
        convolve = causal_conv1d_verify if len(slots) == 2 else causal_conv1d_update
        return convolve(x[:, :40], weight, offset, state, *slots, silu=kind == "silu", backend=backend)

    out = run(projected, state, places.before, places.after)
    assert (out[places.padding] == 0).all()
    places.check_untouched(state, before)
    assert backend is TORCH or torch.equal(state[0], before[0])
    for i, after in enumerate(places.after.long().unbind(1)):
        step = run(projected[i::num_tokens].contiguous(), stepwise, places.before)
        assert torch.equal(out[i::num_tokens], step)
        kept = after > 0
        assert torch.equal(state[after[kept]], stepwise[places.before.long()[kept]])
