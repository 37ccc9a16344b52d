"""Mamba's selective scan: the reference token by token, the kernels against the reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.delta_rule.test_triton_gdn import DTYPES, ON_GPU, close, mixed_batch, on_device, poisoned
from tests.ops.interpreter import DEVICE
from tests.ops.oracles import make_batch
from tests.whole import takes_long_on_cpu
from weft.ops.backend import Backend
from weft.ops.convolution import causal_conv1d_update
from weft.ops.mamba import ScanWeights, selective_scan, selective_scan_step
from weft.ops.norm import split_rms_norm

TORCH, TRITON = Backend.TORCH, Backend.TRITON
CHANNELS, SIZE = (8192, 16) if ON_GPU else (70, 5)

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, ScanWeights]


def scan_inputs(rows: int, dtype: torch.dtype, channels: int = CHANNELS, size: int = SIZE) -> Inputs:
    """x, z, dt, b, c of ``rows`` tokens, and the weights. z is half of a projection, x comes from a convolution."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE)

    x, z = random(rows, channels).to(dtype), random(rows, 2 * channels).to(dtype)[:, channels:]
    dt, b, c = (random(rows, n).to(dtype) for n in (channels, size, size))
    return x, z, dt, b, c, ScanWeights(random(channels), random(size, channels), random(channels))


def test_chunks_and_steps_equal_the_formula() -> None:
    """Outputs, the final state, and the states stored after 1, 2 and 64 tokens, written out as in the paper."""
    batch = make_batch([66, 70], [0, 5], checkpoints={0: {1: 7, 2: 8, 64: 9}})
    *tokens, weights = scan_inputs(136, torch.float32, 6, 3)
    x, z, dt, b, c = (t.cpu() for t in tokens)
    bias, a_log, skip = weights = ScanWeights(*(t.cpu() for t in weights))
    state = torch.randn(13, 3, 6)
    before = state.clone()
    got = selective_scan(x, z, dt, b, c, weights, state, batch, backend=TORCH)
    for i, span in enumerate((range(66), range(66, 136))):
        live = torch.zeros(3, 6) if i == 0 else before[2].clone()
        for n, t in enumerate(span, start=1):
            step = F.softplus(dt[t] + bias)
            live = torch.exp(-torch.exp(a_log) * step) * live + torch.outer(b[t], step * x[t])
            torch.testing.assert_close(got[t], (c[t] @ live + skip * x[t]) * F.silu(z[t]), atol=2e-5, rtol=2e-5)
            if i == 0 and n in (1, 2, 64):
                torch.testing.assert_close(state[{1: 7, 2: 8, 64: 9}[n]], live, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(state[i + 1], live, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else DTYPES[:1], ids=str)
def test_scan_kernel(dtype: torch.dtype) -> None:
    batch = mixed_batch()
    n = batch.num_tokens
    inputs = scan_inputs(n + 3, dtype)
    poisoned(batch, *inputs[:5])
    before = torch.randn(13, SIZE, CHANNELS, device=DEVICE)
    before[[3, 4]] = torch.nan  # sequences 2 and 3 start here: what their slots hold must not matter
    expected_state, state = before.clone(), before.clone()
    expected = selective_scan(*inputs, expected_state, batch, backend=TORCH)
    result = selective_scan(*inputs, state, batch, backend=TRITON)
    close(result, expected, dtype)
    assert (result[n:] == 0).all() and (result[:2] == 0).all(), "padding rows and rows of decodes must be zero"
    close(state[3:12], expected_state[3:12], torch.float32)
    for slot in (0, 1, 2, 12):
        assert torch.equal(state[slot], before[slot]), f"slot {slot} was touched"


@pytest.mark.gpu
@pytest.mark.parametrize("num_seqs", [1, 4])
def test_scan_of_few_and_many_sequences(num_seqs: int) -> None:
    """Few and many sequences divide the channels in different ways. Every run computes the same bits."""
    batch = on_device(make_batch([200] * num_seqs, [0] * num_seqs))
    inputs = scan_inputs(batch.num_tokens, torch.bfloat16)
    expected_state = torch.full((num_seqs + 1, SIZE, CHANNELS), torch.nan, device=DEVICE)
    expected = selective_scan(*inputs, expected_state, batch, backend=TORCH)
    state = torch.full_like(expected_state, torch.nan)
    result = selective_scan(*inputs, state, batch, backend=TRITON)
    close(result, expected, torch.bfloat16)
    close(state[1:], expected_state[1:], torch.float32)
    for _ in range(20):
        assert torch.equal(selective_scan(*inputs, state.fill_(torch.nan), batch, backend=TRITON), result)


@pytest.mark.parametrize(
    ("dtype", "state_dtype"), [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)], ids=str
)
def test_step_kernels(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    """Scan and convolution of one token per row; rows 1 and 4 are padding, once zero and once left as they are."""
    slots = torch.tensor([3, 0, 1, 4, 0], dtype=torch.int32, device=DEVICE)
    inputs = scan_inputs(5, dtype)
    state = torch.randn(6, SIZE, CHANNELS, device=DEVICE).to(state_dtype)
    weight, bias, conv = (
        torch.randn(*s, device=DEVICE).to(dtype) for s in ((CHANNELS, 4), (CHANNELS,), (6, CHANNELS, 3))
    )
    results = []
    for backend in (TORCH, TRITON):
        states = state.clone(), conv.clone()
        outs = [
            selective_scan_step(*inputs, states[0], slots, backend=backend),
            causal_conv1d_update(inputs[0], weight, bias, states[1], slots, backend=backend),
        ]
        kept = [torch.full_like(out, 7.0) for out in outs]
        selective_scan_step(*inputs, state.clone(), slots, backend=backend, out=kept[0])
        causal_conv1d_update(inputs[0], weight, bias, conv.clone(), slots, backend=backend, out=kept[1])
        for out, other in zip(outs, kept, strict=True):
            assert (out[[1, 4]] == 0).all() and (other[[1, 4]] == 7).all()
            assert torch.equal(other[[0, 2, 3]], out[[0, 2, 3]])
        results.append((*outs, *(s[1:] for s in states)))
    for expected, got in zip(*results, strict=True):
        close(got, expected, dtype)


@pytest.mark.parametrize("width", [3712, 4080] if ON_GPU else [48])
@pytest.mark.parametrize("backend", [TORCH, pytest.param(TRITON, marks=takes_long_on_cpu)])
def test_heads_are_scans_of_their_own(backend: Backend, width: int) -> None:
    """Prefill and one token, with B and C of each of two heads. The largest powers of two that divide the heads'
    channels are 128 and 16."""
    batch = mixed_batch()
    rows = batch.num_tokens + 3
    x, z, dt, *_, weights = scan_inputs(rows, torch.float32, 2 * width)
    b, c = (torch.randn(rows, 2, SIZE, device=DEVICE) for _ in range(2))
    poisoned(batch, x, z, dt, b, c)
    state = torch.randn(13, SIZE, 2 * width, device=DEVICE)
    state[[3, 4]] = torch.nan
    slots = torch.tensor([5, 0, 6], dtype=torch.int32, device=DEVICE)
    by_head = [state[..., part].contiguous() for part in (slice(width), slice(width, None))]
    got = selective_scan(x, z, dt, b, c, weights, state, batch, backend=backend)
    token = [t[:3] for t in (x, z, dt, b, c)]
    step = selective_scan_step(*token, weights, state, slots, backend=backend)
    for head, (part, own) in enumerate(zip((slice(width), slice(width, None)), by_head, strict=True)):
        cut = ScanWeights(*(w[..., part].contiguous() for w in weights))
        inputs = [*(t[:, part] for t in (x, z, dt)), *(t[:, head].contiguous() for t in (b, c))]
        want = selective_scan(*inputs, cut, own, batch, backend=TORCH)
        close(got[:, part], want, torch.float32)
        want = selective_scan_step(*(t[:3] for t in inputs), cut, own, slots, backend=TORCH)
        close(step[:, part], want, torch.float32)
        close(state[1:, :, part], own[1:], torch.float32)


def test_norms_of_parts() -> None:
    sizes = (7, 5, 5)
    wide, weight = torch.randn(4, 30, device=DEVICE), torch.randn(17, device=DEVICE)
    expected = split_rms_norm(wide[:, 3:20], weight, 1e-5, sizes, backend=TORCH)
    got = split_rms_norm(wide[:, 3:20], weight, 1e-5, sizes, backend=TRITON)
    for x, y in zip(got, expected, strict=True):
        close(x, y, torch.float32)
