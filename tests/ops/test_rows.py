"""References row by row: the same values as at once, and bits that do not depend on the number of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.attention.test_attention import filled_cache
from tests.ops.oracles import make_batch
from weft.config.gated_delta_net import GatedDeltaNetConfig
from weft.config.kimi import KimiDeltaConfig
from weft.ops.activation import gate_heads, silu_and_mul
from weft.ops.attention import paged_attention
from weft.ops.backend import Backend
from weft.ops.convolution import causal_conv1d
from weft.ops.delta_rule import DeltaWeights, chunk_gated_delta_rule, gdn_decode, gdn_verify, kda_decode
from weft.ops.linear import linear, linear_silu_mul
from weft.ops.moe import fused_moe, topk_router
from weft.ops.norm import rms_norm

ALONE = Backend.INVARIANT_TORCH


def rows_of(op: str, count: int) -> Any:
    """Some operation over the first rows of the same inputs."""
    torch.manual_seed(0)
    x, w, wide = torch.randn(40, 52), torch.randn(26, 52), torch.randn(3, 52, 52)
    x, ids = x[:count], torch.randint(0, 3, (40, 2))[:count].int()
    calls = {
        "linear": lambda: linear(x, w, w[:, 0].contiguous(), backend=ALONE),
        "linear_silu_mul": lambda: linear_silu_mul(x, w, backend=ALONE),
        "gate_heads": lambda: gate_heads(x[..., None], 2 * x, backend=ALONE),
        "silu_and_mul": lambda: silu_and_mul(x, backend=ALONE),
        "rms_norm": lambda: torch.cat(rms_norm(x, w[0], 1e-6, residual=x, backend=ALONE)),
        "router": lambda: topk_router(x, 3, renormalize=True, num_tokens=count, backend=ALONE)[0],
        "experts": lambda: fused_moe(x, wide, wide[:, :, :26].contiguous(), x[:, :2], ids, backend=ALONE),
    }
    return calls[op]()


@pytest.mark.parametrize(
    "op", ["linear", "linear_silu_mul", "gate_heads", "silu_and_mul", "rms_norm", "router", "experts"]
)
def test_a_row_has_the_same_bits_for_any_number_of_rows(op: str) -> None:
    whole = rows_of(op, 40)
    for count in (1, 2, 7, 16, 33):
        part = rows_of(op, count)
        if op == "rms_norm":
            part, want = part.view(2, count, -1), whole.view(2, 40, -1)[:, :count]
        else:
            want = whole[:count]
        assert torch.equal(part, want), count


def test_a_product_at_once_has_other_bits() -> None:
    """Check that bits can differ on this processor. Otherwise the tests of this module would show nothing."""
    torch.manual_seed(0)
    x, w = torch.randn(40, 500), torch.randn(260, 500)
    assert not torch.equal(linear(x, w, backend=Backend.TORCH), linear(x, w, backend=ALONE))


def test_padding_chooses_no_expert() -> None:
    weights, ids = topk_router(torch.randn(5, 8), 2, renormalize=True, num_tokens=3, backend=ALONE)
    assert (ids[3:] == -1).all() and (weights[3:] == 0).all() and (ids[:3] >= 0).all()


def attended(query_lens: list[int], contexts: list[int]) -> Tensor:
    """The first sequence's outputs."""
    decodes = sum(n == 1 and c > 0 for n, c in zip(query_lens, contexts, strict=True))
    batch = make_batch(query_lens, contexts, num_decodes=decodes if query_lens[0] == 1 else 0)
    generator = torch.Generator().manual_seed(1)
    keys = [torch.randn(150, 2, 8, generator=generator)[: q + c] for q, c in zip(query_lens, contexts, strict=True)]
    k_cache, v_cache = filled_cache(batch, keys, 2, 8)
    q = torch.randn(150, 4, 8, generator=torch.Generator().manual_seed(2))[contexts[0] : contexts[0] + query_lens[0]]
    rest = torch.randn(batch.num_tokens - len(q), 4, 8)
    return paged_attention(torch.cat([q, rest]), k_cache, v_cache, batch, scale=0.3, backend=ALONE)[: len(q)]


def test_attention_of_a_token_does_not_depend_on_steps_or_others() -> None:
    whole = attended([150], [0])
    assert torch.equal(attended([64, 3], [0, 40]), whole[:64])
    assert torch.equal(attended([86, 1, 70], [64, 9, 0]), whole[64:])
    assert torch.equal(attended([1, 1, 33], [149, 77, 0]), whole[149:])


def advanced(query_lens: list[int], contexts: list[int], conv: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The first sequence's outputs, and its states after the step."""
    batch = make_batch(query_lens, contexts)
    inputs = [
        torch.randn(150, *shape, generator=torch.Generator().manual_seed(3)) for shape in ((2, 8), (2, 8), (4, 8), (4,))
    ]
    tokens = slice(contexts[0], contexts[0] + query_lens[0])
    rest = batch.num_tokens - query_lens[0]
    q, k, v, g = (torch.cat([x[tokens], torch.randn(rest, *x.shape[1:])]) for x in inputs)
    convs, states = torch.randn(len(query_lens) + 1, 16, 3), torch.randn(len(query_lens) + 1, 4, 8, 8)
    convs[1], states[1] = conv, state
    mixed = causal_conv1d(q.flatten(1), torch.ones(16, 4) * 0.3, None, convs, batch, backend=ALONE)
    out = chunk_gated_delta_rule(q, k, v, -g.abs(), g.abs(), states, batch, backend=ALONE)
    count = query_lens[0]
    return torch.cat([mixed[:count], out[:count].flatten(1)], dim=1), convs[1], states[1]


def test_recurrent_layers_do_not_depend_on_steps_or_others() -> None:
    nothing = torch.zeros(16, 3), torch.zeros(4, 8, 8)
    whole, *last = advanced([150], [0], *nothing)
    first, *states = advanced([64, 30], [0, 0], *nothing)
    second, *after = advanced([86, 70, 5], [64, 0, 3], *states)
    assert torch.equal(torch.cat([first, second]), whole)
    assert all(map(torch.equal, after, last))


def test_a_verification_leaves_what_decodes_leave() -> None:
    """Whatever else is verified: outputs and states to the bit."""
    geometry, seqs, tokens = GatedDeltaNetConfig(3, 9, 20, 20, 4), 5, 3
    rows = torch.randn(seqs, tokens, geometry.conv_dim + geometry.value_dim + 18)
    weights = DeltaWeights(torch.randn(geometry.conv_dim, 4), torch.rand(9), torch.rand(9), torch.rand(20), 1e-6)
    conv, state = torch.randn(1 + seqs * tokens, geometry.conv_dim, 3), torch.randn(1 + seqs * tokens, 9, 20, 20)
    slots = torch.arange(1, 1 + seqs * tokens, dtype=torch.int32).view(seqs, tokens)
    working, alone = slots[:, -1].contiguous(), (conv.clone(), state.clone())
    out = gdn_verify(rows.flatten(0, 1), weights, conv, state, working, slots, geometry, backend=ALONE)
    for i in range(tokens):
        step = gdn_decode(rows[:, i], weights, *alone, working, geometry, backend=ALONE)
        assert torch.equal(out.view(seqs, tokens, -1)[:, i], step)
        after = slots[:, i].long()
        assert torch.equal(conv[after], alone[0][working.long()]) and torch.equal(
            state[after], alone[1][working.long()]
        )


@pytest.mark.parametrize("backend", [ALONE, Backend.TORCH])
def test_a_row_of_kimi_delta_attention_has_the_bits_that_it_has_alone(backend: Backend) -> None:
    """All rows at once have other bits, or this would show nothing."""
    geometry, count = KimiDeltaConfig(num_heads=3, head_dim=21, conv_kernel=4), 7
    rows, (f, gate) = torch.randn(count, 3 * geometry.width + 3), torch.randn(2, count, geometry.width)
    weights = DeltaWeights(
        torch.randn(3 * geometry.width, 4), torch.rand(3), torch.rand(geometry.width), torch.rand(21), 1e-6
    )
    conv, state = torch.randn(count + 1, 3 * geometry.width, 3), torch.randn(count + 1, 3, 21, 21)
    slots = torch.arange(1, count + 1, dtype=torch.int32)

    def decoded(rows: Tensor, f: Tensor, gate: Tensor, slots: Tensor) -> list[Tensor]:
        states = conv.clone(), state.clone()
        out = kda_decode(rows, f, gate, weights, *states, slots, geometry, backend=backend)
        return [out, *(each[slots.long()] for each in states)]

    together = decoded(rows, f, gate, slots)
    alone = [decoded(*(x[i : i + 1].clone() for x in (rows, f, gate, slots))) for i in range(count)]
    equal = all(map(torch.equal, together, map(torch.cat, zip(*alone, strict=True))))
    assert equal == (backend is ALONE)
