"""The short convolution and its state of inputs."""

from __future__ import annotations

import pytest
import torch

from tests.ops.oracles import make_batch, naive_conv1d
from weft.ops.backend import Backend
from weft.ops.convolution import causal_conv1d, causal_conv1d_update_reference

TORCH = Backend.TORCH


@pytest.mark.parametrize("kernel", [2, 3, 4])
@pytest.mark.parametrize("with_bias", [False, True])
def test_mixed_batch_with_padding_checkpoints_and_poison(kernel: int, with_bias: bool) -> None:
    query_lens, contexts = [1, 1, 70, 1, 130, 2], [9, 3, 0, 0, 33, 1]
    checkpoints = {2: {1: 8, 2: 9, 70: 10}, 4: {64: 11, 65: 12}, 3: {1: 13}}
    batch = make_batch(
        query_lens, contexts, num_decodes=2, checkpoints=checkpoints, pad_tokens=5, pad_seqs=2, pad_chunks=2
    )
    channels = 6
    x = torch.randn(batch.num_tokens + 5, channels)
    x[batch.num_tokens :] = torch.nan
    weight = torch.randn(channels, kernel)
    bias = torch.randn(channels) if with_bias else None
    state = torch.randn(14, channels, kernel - 1)
    state[[3, 4]] = torch.nan
    before = state.clone()
    out = causal_conv1d(x, weight, bias, state, batch, backend=TORCH)
    assert (out[:2] == 0).all()
    assert (out[batch.num_tokens :] == 0).all()
    assert torch.equal(state[:3], before[:3])
    starts = batch.cu_seqlens_q.tolist()
    for s in range(2, 6):
        rows = slice(starts[s], starts[s + 1])
        initial = before[s + 1] if contexts[s] else torch.zeros(channels, kernel - 1)
        expected, after = naive_conv1d(x[rows], weight, bias, initial)
        torch.testing.assert_close(out[rows], expected)
        assert torch.equal(state[s + 1], after[-1])
        for position, slot in checkpoints.get(s, {}).items():
            assert torch.equal(state[slot], after[position - 1])


@pytest.mark.parametrize("length", [1, 63, 64, 65, 210])
def test_equals_torch_convolution_from_an_empty_state(length: int) -> None:
    x, weight = torch.randn(length, 5), torch.randn(5, 4)
    out = causal_conv1d(x, weight, None, torch.zeros(2, 5, 3), make_batch([length], [0]), backend=TORCH)
    padded = torch.nn.functional.pad(x.T[None], (3, 0))
    expected = torch.nn.functional.silu(torch.nn.functional.conv1d(padded, weight[:, None], groups=5))
    torch.testing.assert_close(out, expected[0].T)


@pytest.mark.parametrize("kernel", [2, 4])
def test_update_continues_a_prefill(kernel: int) -> None:
    x, weight = torch.randn(9, 5), torch.randn(5, kernel)
    state = torch.randn(4, 5, kernel - 1)
    whole, _ = naive_conv1d(x, weight, None, torch.zeros(5, kernel - 1))
    causal_conv1d(x[:4], weight, None, state, make_batch([4], [0]), backend=TORCH)
    slots = torch.tensor([1, 0, 0], dtype=torch.int32)
    for t in range(4, 9):
        rows = torch.stack([x[t], torch.zeros(5), torch.ones(5)])
        out = causal_conv1d_update_reference(rows, weight, state, slots)
        torch.testing.assert_close(out[0], whole[t])


def test_decodes_only_and_low_precision() -> None:
    state = torch.randn(3, 4, 3)
    before = state.clone()
    out = causal_conv1d(
        torch.randn(2, 4),
        torch.randn(4, 4),
        None,
        state,
        make_batch([1, 1], [3, 3], num_decodes=2),
        backend=TORCH,
    )
    assert (out == 0).all()
    assert torch.equal(state, before)
    x, weight = torch.randn(7, 4).bfloat16(), torch.randn(4, 4).bfloat16()
    state16, state32 = state.bfloat16(), state.bfloat16().float()
    out16 = causal_conv1d(x, weight, None, state16, make_batch([7], [2]), backend=TORCH)
    out32 = causal_conv1d(x.float(), weight.float(), None, state32, make_batch([7], [2]), backend=TORCH)
    assert torch.equal(out16, out32.bfloat16())
    assert torch.equal(state16, state32.bfloat16())
