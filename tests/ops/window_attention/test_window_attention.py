"""Attention over sliding windows: the reference against plain masked attention, the kernels against the reference."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.ops.delta_rule.test_triton_gdn import DTYPES, TOLERANCE, mixed_batch, on_device
from tests.ops.interpreter import DEVICE
from tests.ops.oracles import make_batch
from tests.whole import covering, takes_long_on_cpu
from weft.ops.backend import Backend
from weft.ops.window_attention import ScoreTerms, Windows, window_attention, window_attention_decode

pytest.importorskip("triton")
from weft.ops.window_attention.kernels import window_split  # isort: skip

ON_GPU = DEVICE == "cuda"
CHUNK, SLOTS = 64, 13
# Query heads, key heads, head dim.
HEADS = [(64, 8, 64), (6, 2, 24), (8, 4, 256)] if ON_GPU else [(6, 2, 24)]
WINDOWS = [(1, 0), (5, 1), (64, 2), (200, 1), (7, 2)]
"""And the sinks: none, by head, or by row and head."""


def bias_of(q: Tensor, window: int) -> Tensor:
    return (3.0 * torch.randn(*q.shape[:2], window, device=DEVICE)).to(q.dtype)


def full(
    q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, sinks: Tensor | None, bias: Tensor | None
) -> Tensor:
    """One whole sequence in float64, ``[L, Hq, D]``."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k)
    distance = torch.arange(len(q), device=q.device)[:, None] - torch.arange(len(q), device=q.device)
    if bias is not None:
        for back in range(min(window, len(q))):
            query, key = (distance == back).nonzero().unbind(1)
            scores[:, query, key] += bias[query, :, back].double().T
    scores *= scale
    scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().expand(len(q), -1).T[..., None]], dim=2)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[:, :, : len(q)], v)


def inputs(tokens: int, heads: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    hq, hkv, dim = heads
    q, k, v = (torch.randn(tokens, count, dim, device=DEVICE).to(dtype) for count in (hq, hkv, hkv))
    return q, k, v


def empty_windows(heads: tuple[int, int, int], window: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.full((SLOTS, window, *heads[1:]), torch.nan, dtype=dtype, device=DEVICE) for _ in range(2)]


@pytest.mark.parametrize(("sizes", "backend"), covering(WINDOWS, [Backend.TORCH, Backend.TRITON], of=1))
def test_a_sequence_in_pieces_is_masked_attention(sizes: tuple[int, int], backend: Backend) -> None:
    window, sink_dims = sizes
    """Prefills of odd lengths, one with a checkpoint, then decodes; and decodes from the checkpoint."""
    heads, scale = HEADS[-1], 0.3
    q, k, v = inputs(90, heads)
    sinks = torch.randn((90, heads[0])[2 - sink_dims :], device=DEVICE) if sink_dims else None
    bias = bias_of(q, window) if window in (5, 64) else None
    want = full(q, k, v, window, scale, sinks, bias).float()
    windows, got, start = empty_windows(heads, window), [], 0
    for length in (3, 1, 70, 5):
        part, checkpoints = slice(start, start + length), {0: {11: 9}} if length == 70 else {}
        batch = on_device(make_batch([length], [start], num_decodes=0, checkpoints=checkpoints))
        batch.state_slots[:] = 4
        x = (y[part] for y in (q, k, v))
        added = None if bias is None else bias[part]
        own = sinks[part] if sinks is not None and sink_dims == 2 else sinks
        options = {"scale": scale, "sinks": own, "bias": added, "backend": backend}
        got.append(window_attention(*x, *windows, batch, **options))
        start += length
    for slot, first in ((4, start), (9, 15)):
        for t in range(first, min(first + 11, 90)):
            row, position = slice(t, t + 1), torch.tensor([t], device=DEVICE)
            slots = torch.tensor([slot], dtype=torch.int32, device=DEVICE)
            x = (y[row] for y in (q, k, v))
            added = None if bias is None else bias[row]
            own = sinks[row] if sinks is not None and sink_dims == 2 else sinks
            options = {"scale": scale, "terms": ScoreTerms(own, added), "backend": backend}
            one = window_attention_decode(*x, Windows(*windows), slots, position, **options)
            torch.testing.assert_close(one, want[row], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(torch.cat(got), want[:start], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [7, 130])
def test_prefill_kernel_of_a_mixed_batch(heads: tuple[int, int, int], dtype: torch.dtype, window: int) -> None:
    """Decodes, fresh, short and continued sequences, checkpoints and padding: outputs, windows, nobody else's slots."""
    batch = mixed_batch()
    n = batch.num_tokens
    x = inputs(n + 3, heads, dtype)
    bias = bias_of(x[0], window) if window > 100 else None
    sinks = torch.randn(n + 3, heads[0], device=DEVICE).to(dtype) if window > 100 else None
    for y in x:
        y[n:] = torch.nan
    before = [torch.randn(SLOTS, window, *heads[1:], device=DEVICE).to(dtype) for _ in range(2)]
    results = {}
    for backend in (Backend.TORCH, Backend.TRITON):
        windows = [w.clone() for w in before]
        out = window_attention(*x, *windows, batch, scale=0.2, sinks=sinks, bias=bias, backend=backend)
        results[backend] = (out, *windows)
    (out, *windows), (want, *wanted) = results[Backend.TRITON], results[Backend.TORCH]
    torch.testing.assert_close(out.float(), want.float(), **TOLERANCE[dtype])
    assert (out[:2] == 0).all() and (out[n:] == 0).all()
    for got, expected in zip(windows, wanted, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("given_out", "window"), [(True, 70), (False, 300), (True, 300)])
def test_decode_kernel(heads: tuple[int, int, int], dtype: torch.dtype, given_out: bool, window: int) -> None:
    """Windows that are empty, filling, full and turning over, in one part or split; the last row is padding."""
    assert (window_split(window, 12) < window) == (window == 300)
    positions = torch.tensor([0, 3, window - 1, window, 2 * window + 10, 9], device=DEVICE)
    slots = torch.tensor([3, 1, 5, 2, 8, 0], dtype=torch.int32, device=DEVICE)
    x = inputs(6, heads, dtype)
    sinks = torch.randn((6, heads[0])[window < 100 :], device=DEVICE).to(dtype)
    bias = bias_of(x[0], window) if not given_out or window < 100 else None
    before = [torch.randn(SLOTS, window, *heads[1:], device=DEVICE).to(dtype) for _ in range(2)]
    for windows in before:
        windows[3] = torch.nan  # nothing in it yet
    results = {}
    for backend in (Backend.TORCH, Backend.TRITON):
        windows = [w.clone() for w in before]
        out = torch.full_like(x[0], 7.0) if given_out else None
        out = window_attention_decode(
            *x, Windows(*windows), slots, positions, scale=0.2, terms=ScoreTerms(sinks, bias), out=out, backend=backend
        )  # fmt: skip
        results[backend] = (out, *windows)
    (out, *windows), (want, *wanted) = results[Backend.TRITON], results[Backend.TORCH]
    torch.testing.assert_close(out.float(), want.float(), **TOLERANCE[dtype])
    assert (out[5] == (7.0 if given_out else 0.0)).all()
    for got, expected in zip(windows, wanted, strict=True):
        assert torch.equal(got[1:].nan_to_num(), expected[1:].nan_to_num())


@pytest.mark.parametrize("with_bias", [pytest.param(False, marks=takes_long_on_cpu), True])
def test_a_token_has_the_bits_that_it_has_alone(with_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are prefilled in other steps, which end at multiples of 64 tokens, and decoded in a larger batch. The
    batch size would choose other splits."""
    monkeypatch.setattr("weft.ops.window_attention.kernels._FILLED", 16)
    heads, window, count = HEADS[-1], 150, 12
    x, backend = inputs(210, heads), Backend.INVARIANT_TRITON
    bias = bias_of(x[0], window) if with_bias else None

    def prefilled(steps: list[int]) -> list[Tensor]:
        windows, outputs = empty_windows(heads, window), list[Tensor]()
        for start, end in pairwise(steps):
            batch = on_device(make_batch([end - start], [start], num_decodes=0))
            rows = slice(start, end)
            added = None if bias is None else bias[rows]
            part = (y[rows] for y in x)
            outputs.append(window_attention(*part, *windows, batch, scale=0.2, bias=added, backend=backend))
        return [torch.cat(outputs), *(each[batch.state_slots.long()] for each in windows)]

    for one, other in zip(prefilled([0, 210]), prefilled([0, 64, 192, 210]), strict=True):
        assert torch.equal(one, other)
    before = [torch.randn(count + 1, window, *heads[1:], device=DEVICE) for _ in range(2)]
    positions = torch.arange(0, 30 * count, 30, device=DEVICE)
    slots = torch.arange(1, count + 1, dtype=torch.int32, device=DEVICE)
    assert window_split(window, count * heads[1]) > window_split(window, heads[1])

    def decoded(rows: slice) -> Tensor:
        windows, terms = Windows(*(w.clone() for w in before)), ScoreTerms(None, None if bias is None else bias[rows])
        part = (y[rows] for y in x)
        return window_attention_decode(
            *part, windows, slots[rows], positions[rows], scale=0.2, terms=terms, backend=backend
        )

    together = decoded(slice(count))
    for i in (0, 5, count - 1):
        assert torch.equal(decoded(slice(i, i + 1)), together[i : i + 1])
