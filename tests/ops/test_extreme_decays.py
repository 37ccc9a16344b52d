"""Chunks of recurrences whose decays reach from almost none to all of a state within a token, against float64.

In a chunk the kernels and the references take decays as ``exp`` of differences of a running sum G of up to 64 numbers
in float32. Each addition rounds a partial sum of at most ``max |G|``, so a difference is off by at most
``128 u max |G|`` (u = 2**-24), and a factor by a relative ``expm1`` of that. Products and sums of K channels and 64
tokens round too. ``eps = expm1(128 u max |G|) + 4 u (K + 128)`` bounds the relative error of every term. The error of
an output is at most eps times the sum of its terms' magnitudes. Deltas pass through the inverse of ``I + A`` as well.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.ops.delta_rule.test_triton_gdn import ON_GPU, on_device
from tests.ops.interpreter import DEVICE
from tests.ops.oracles import make_batch
from weft.ops.backend import Backend
from weft.ops.delta_rule import chunk_gated_delta_rule
from weft.ops.linear_attention import chunk_linear_attention

TOKENS = 64
HEADS, K, V = (32, 128, 128) if ON_GPU else (2, 20, 24)
GREATEST = [0.1, 10.0, 300.0]
"""Log decay of a token, at most; with 300, hardly a neighbour is reached, and sums differ in their third digit."""
SLOT = 1
pytestmark = [
    pytest.mark.parametrize("backend", [Backend.TORCH, Backend.TRITON]),
    pytest.mark.parametrize("greatest", GREATEST),
]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


def log_decays(greatest: float, *shape: int) -> Tensor:
    """From 1e-4 to ``greatest``, every size as often."""
    return -torch.empty(*shape, device=DEVICE).uniform_(math.log(1e-4), math.log(greatest)).exp()


def relative_error(sums: Tensor) -> float:
    u = 2.0**-24
    return math.expm1(128 * u * sums.abs().max().item()) + 4 * u * (K + 128)


def factors(sums: Tensor) -> Tensor:
    """``exp(G_i - G_j)`` for ``i >= j``, else zero: ``[64, 64, ...]`` of ``[64, ...]``."""
    lower = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=DEVICE).tril()
    lower = lower.view(TOKENS, TOKENS, *[1] * (sums.dim() - 1))
    return (sums[:, None] - sums[None, :]).masked_fill(~lower, -torch.inf).exp()


def within(got: Tensor, want: Tensor, bound: Tensor) -> None:
    assert ((got.double() - want).abs() <= bound).all(), ((got.double() - want).abs() / bound).max().item()


def test_linear_attention(greatest: float, backend: Backend) -> None:
    q, k, v = random(TOKENS, HEADS, K), random(TOKENS, HEADS, K), random(TOKENS, HEADS, V)
    g, before = log_decays(greatest, TOKENS, HEADS), random(3, HEADS, K, V)
    batch, state = on_device(make_batch([TOKENS], [5])), before.clone()
    got = chunk_linear_attention(q, k, v, g, None, None, state, batch, backend=backend)

    sums = g.double().cumsum(0)
    start, pairs, to_end = sums.exp(), factors(sums), (sums[-1] - sums).exp()

    def evaluate(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        inside = torch.einsum("ihk,jhk,ijh,jhv->ihv", q, k, pairs, v)
        out = torch.einsum("ih,ihk,hkv->ihv", start, q, s) + inside
        return out, sums[-1].exp()[:, None, None] * s + torch.einsum("jhk,jh,jhv->hkv", k, to_end, v)

    exact = [x.double() for x in (q, k, v, before[SLOT])]
    wants, magnitudes = evaluate(*exact), evaluate(*(x.abs() for x in exact))
    for x, want, magnitude in zip((got, state[SLOT]), wants, magnitudes, strict=True):
        within(x, want, relative_error(sums) * magnitude)


def test_decays_of_every_channel(greatest: float, backend: Backend) -> None:
    """Kimi Delta Attention. With r the right sides ``beta (v - k S)``, deltas are off by ``eps |T| (I + |A|) |T| |r|``
    to first order, T the inverse; twice that covers the rest."""
    q, k, v = random(TOKENS, HEADS, K), random(TOKENS, HEADS, K), random(TOKENS, HEADS, V)
    g, beta = log_decays(greatest, TOKENS, HEADS, K), random(TOKENS, HEADS).sigmoid()
    before = random(3, HEADS, K, V)
    batch, state = on_device(make_batch([TOKENS], [5])), before.clone()
    got = chunk_gated_delta_rule(q, k, v, g, beta, state, batch, backend=backend)

    sums, s = g.double().cumsum(0), before[SLOT].double()
    q, k = (x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, v, beta = q * K**-0.5, v.double(), beta.double()
    pairs, start, end = factors(sums), sums.exp(), (sums[-1] - sums).exp()

    def products(x: Tensor, y: Tensor) -> Tensor:
        return torch.einsum("ihk,jhk,ijhk->hij", x, y, pairs)

    write, identity = beta.t()[:, :, None], torch.eye(TOKENS, dtype=torch.double, device=DEVICE)
    inverse = (identity + write * products(k, k).tril(-1)).inverse()
    right = write * (v.transpose(0, 1) - torch.einsum("ihk,hkv->hiv", start * k, s))
    delta, attention = inverse @ right, products(q, k)
    out = torch.einsum("ihk,hkv->hiv", start * q, s) + attention @ delta
    last = sums[-1].exp()[..., None] * s + torch.einsum("jhk,hjv->hkv", end * k, delta)

    size, keys, queries = s.abs(), k.abs(), q.abs()
    right = write * (v.abs().transpose(0, 1) + torch.einsum("ihk,hkv->hiv", start * keys, size))
    system = identity + write * products(keys, keys).tril(-1)
    off = inverse.abs() @ (system @ (inverse.abs() @ right))
    total, eps = off + delta.abs(), 2 * relative_error(sums)
    within(
        got.transpose(0, 1), out,
        eps * (torch.einsum("ihk,hkv->hiv", start * queries, size) + products(queries, keys) @ total),
    )  # fmt: skip
    within(
        state[SLOT], last,
        eps * (sums[-1].exp()[..., None] * size + torch.einsum("jhk,hjv->hkv", end * keys, total)),
    )  # fmt: skip
