"""RG-LRU: the reference against the paper's formula, the kernels against the reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.delta_rule.test_triton_gdn import DTYPES, ON_GPU, close, mixed_batch, on_device, poisoned
from tests.ops.interpreter import DEVICE
from tests.ops.oracles import make_batch
from weft.ops.backend import Backend
from weft.ops.convolution import causal_conv1d_update
from weft.ops.rg_lru import rg_lru, rg_lru_step

TORCH, TRITON = Backend.TORCH, Backend.TRITON
CHANNELS = 2560 if ON_GPU else 70


def inputs_of(rows: int, dtype: torch.dtype, channels: int = CHANNELS) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """x, gates, and their biases with the decay's parameter. x is half of a projection."""
    x = torch.randn(rows, 2 * channels, device=DEVICE).to(dtype)[:, channels:]
    weights = torch.randn(2, channels, device=DEVICE).to(dtype), torch.randn(channels, device=DEVICE)
    return x, torch.randn(rows, 2, channels, device=DEVICE).to(dtype), weights


def test_chunks_and_steps_equal_the_formula() -> None:
    """Outputs, final states, and the states stored after 1, 2 and 64 tokens; then one step of each sequence."""
    batch = make_batch([66, 70], [0, 5], checkpoints={0: {1: 7, 2: 8, 64: 9}})
    x, gates, weights = inputs_of(138, torch.float32, 6)
    x, gates, bias, decay = (t.cpu() for t in (x, gates, *weights))
    state = torch.randn(13, 6)
    before = state.clone()
    got = rg_lru(x[:136], gates[:136], bias, decay, state, batch, backend=TORCH)
    prefilled = state.clone()
    step = rg_lru_step(x[136:], gates[136:], bias, decay, state, torch.tensor([1, 2], dtype=torch.int32), backend=TORCH)
    for i, span in enumerate((range(66), range(66, 136))):
        live = torch.zeros(6) if i == 0 else before[2].clone()
        for n, t in enumerate([*span, 136 + i], start=1):
            a = torch.exp(-8 * torch.sigmoid(gates[t, 1] + bias[1]) * F.softplus(decay))
            factor = torch.ones(6) if i == 0 and n == 1 else (1 - a * a).sqrt()
            live = a * live + factor * torch.sigmoid(gates[t, 0] + bias[0]) * x[t]
            torch.testing.assert_close(got[t] if t < 136 else step[i], live, atol=2e-5, rtol=2e-5)
            if i == 0 and n in (1, 2, 64):
                torch.testing.assert_close(state[{1: 7, 2: 8, 64: 9}[n]], live, atol=2e-5, rtol=2e-5)
            if n == len(span):
                torch.testing.assert_close(prefilled[i + 1], live, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(state[i + 1], live, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else DTYPES[:1], ids=str)
def test_chunk_kernels(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    batch = mixed_batch()
    n = batch.num_tokens
    x, gates, weights = inputs_of(n + 3, dtype)
    poisoned(batch, x, gates)
    before = torch.randn(13, CHANNELS, device=DEVICE).to(state_dtype)
    before[[3, 4]] = torch.nan  # sequences 2 and 3 start here: what their slots hold must not matter
    expected_state, state = before.clone(), before.clone()
    expected = rg_lru(x, gates, *weights, expected_state, batch, backend=TORCH)
    result = rg_lru(x, gates, *weights, state, batch, backend=TRITON)
    close(result, expected, dtype)
    assert (result[n:] == 0).all() and (result[:2] == 0).all(), "padding rows and rows of decodes must be zero"
    close(state[3:12], expected_state[3:12], state_dtype)
    for slot in (0, 1, 2, 12):
        assert torch.equal(state[slot], before[slot]), f"slot {slot} was touched"


def test_more_chunks_than_are_read_at_a_time() -> None:
    """A checkpoint after each of 17 tokens, so that each is a chunk. One sequence begins and the other continues."""
    checkpoints = {s: {i: 20 * s + i + 2 for i in range(1, 18)} for s in (0, 1)}
    batch = on_device(make_batch([18, 19], [0, 64], checkpoints=checkpoints))
    x, gates, weights = inputs_of(37, torch.float32)
    expected_state = torch.randn(40, CHANNELS, device=DEVICE)
    state = expected_state.clone()
    expected = rg_lru(x, gates, *weights, expected_state, batch, backend=TORCH)
    close(rg_lru(x, gates, *weights, state, batch, backend=TRITON), expected, torch.float32)
    close(state, expected_state, torch.float32)


@pytest.mark.filterwarnings("ignore:overflow")
def test_extreme_gates() -> None:
    """Gates that are open or shut, decays of 0 and 1: finite, and equal to the reference."""
    batch = on_device(make_batch([9], [7]))
    x, gates, weights = inputs_of(9, torch.float32)
    gates[:] = torch.tensor([-200.0, -60.0, 0.0, 60.0, 200.0], device=DEVICE)[
        torch.randint(5, gates.shape, device=DEVICE)
    ]
    weights[1][: CHANNELS // 2], weights[1][CHANNELS // 2 :] = -60.0, 60.0
    expected_state = torch.randn(2, CHANNELS, device=DEVICE)
    state = expected_state.clone()
    expected = rg_lru(x, gates, *weights, expected_state, batch, backend=TORCH)
    close(rg_lru(x, gates, *weights, state, batch, backend=TRITON), expected, torch.float32)
    close(state, expected_state, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else DTYPES[:1], ids=str)
def test_bits_do_not_depend_on_steps_or_company(dtype: torch.dtype) -> None:
    """A prompt in one step, in three that end at multiples of 64 tokens, and beside other sequences."""
    length, checkpoints = 210, {64: 7, 128: 8, 192: 9}
    x, gates, weights = inputs_of(length, dtype)
    others = inputs_of(20, dtype)
    initial = torch.randn(12, CHANNELS, device=DEVICE)

    def run(spans: list[tuple[int, int]], company: bool) -> tuple[Tensor, Tensor]:
        state, outputs = initial.clone(), []
        for begin, end in spans:
            stored = {t - begin: slot for t, slot in checkpoints.items() if begin < t <= end}
            parts = [(x[begin:end], gates[begin:end])]
            lengths, contexts = [end - begin], [begin]
            if company:
                parts, lengths, contexts = [*parts, others[:2]], [*lengths, 20], [*contexts, 3]
            batch = on_device(make_batch(lengths, contexts, checkpoints={0: stored}))
            both_x, both_gates = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            outputs.append(rg_lru(both_x, both_gates, *weights, state, batch, backend=TRITON)[: end - begin])
        return torch.cat(outputs), state[[1, 7, 8, 9]]

    expected = run([(0, length)], company=False)
    for spans in ([(0, length)], [(0, 64), (64, 192), (192, length)]):
        for got, alone in zip(run(spans, company=True), expected, strict=True):
            assert torch.equal(got, alone), spans


@pytest.mark.parametrize(
    ("dtype", "state_dtype"), [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)], ids=str
)
def test_step_kernels(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    """RG-LRU, and the convolution without SiLU, of one token per row; rows 1 and 4 are padding, zero or left alone."""
    slots = torch.tensor([3, 0, 1, 4, 0], dtype=torch.int32, device=DEVICE)
    x, gates, weights = inputs_of(5, dtype)
    state = torch.randn(6, CHANNELS, device=DEVICE).to(state_dtype)
    weight, bias, conv = (
        torch.randn(*s, device=DEVICE).to(dtype) for s in ((CHANNELS, 4), (CHANNELS,), (6, CHANNELS, 3))
    )
    results = []
    for backend in (TORCH, TRITON):
        states = state.clone(), conv.clone()
        outs = [
            rg_lru_step(x, gates, *weights, states[0], slots, backend=backend),
            causal_conv1d_update(x, weight, bias, states[1], slots, silu=False, backend=backend),
        ]
        kept = [torch.full_like(out, 7.0) for out in outs]
        rg_lru_step(x, gates, *weights, state.clone(), slots, backend=backend, out=kept[0])
        causal_conv1d_update(x, weight, bias, conv.clone(), slots, silu=False, backend=backend, out=kept[1])
        for out, other in zip(outs, kept, strict=True):
            assert (out[[1, 4]] == 0).all() and (other[[1, 4]] == 7).all()
            assert torch.equal(other[[0, 2, 3]], out[[0, 2, 3]])
        results.append((*outs, *(s[1:] for s in states)))
    for expected, got in zip(*results, strict=True):
        close(got, expected, dtype)
