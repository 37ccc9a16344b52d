"""Kimi Delta Attention and latent attention: references against the definitions, kernels against the references."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.delta_rule.test_triton_gdn import (
    DTYPES,
    VERIFIED_DTYPES,
    Places,
    close,
    error_of_states,
    mixed_batch,
    most_error,
    on_device,
    poisoned,
)
from tests.ops.interpreter import DEVICE
from tests.ops.oracles import PAGE_SIZE, make_batch
from tests.whole import covering, unless_long
from weft.config.kimi import KimiDeltaConfig
from weft.forward_context import Verification
from weft.ops.attention import latent, latent_attention
from weft.ops.backend import Backend
from weft.ops.delta_rule import DeltaWeights, chunk_gated_delta_rule, kda_decode, kda_gates, kda_verify
from weft.ops.norm import gated_rms_norm

pytest.importorskip("triton")
from weft.ops.delta_rule.decode import Shape  # isort: skip
from weft.ops.delta_rule.few_tokens import kda_decode_triton  # isort: skip

TORCH, TRITON = Backend.TORCH, Backend.TRITON
ON_GPU = DEVICE == "cuda"
HEADS = [(32, 128), (3, 24)] if ON_GPU else [(2, 20)]
"""Heads and their size."""
DECODES = [(4, torch.float32)] + ON_GPU * [(2, torch.float32), (3, torch.bfloat16), (20, torch.bfloat16)]
"""Rows and dtype of decode steps: on a GPU also those whose states have a launch of their own."""


def rule_inputs(num_tokens: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v, g, beta; decays from almost none to almost all of a state within a token."""
    packed = torch.randn(num_tokens, 3 * heads * dim, device=DEVICE).to(dtype)
    q, k, v = packed.unflatten(-1, (3, heads, dim)).unbind(1)
    f, b = torch.randn(num_tokens, heads * dim, device=DEVICE), torch.randn(num_tokens, heads, device=DEVICE)
    a_log, dt_bias = torch.linspace(-5, 2, heads, device=DEVICE), torch.linspace(-6, 1, heads * dim, device=DEVICE)
    return q, k, v, *kda_gates.reference(f, b, a_log, dt_bias)


def token_by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and the last state, by the definition, in float64."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    state, out = torch.zeros(*k.shape[1:], v.shape[2], dtype=torch.float64, device=q.device), []
    for t in range(len(q)):
        state = state * g[t].exp()[..., None]
        delta = beta[t][:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
        state = state + k[t][..., None] * delta[:, None]
        out.append(torch.einsum("hk,hkv->hv", q[t], state) * q.shape[2] ** -0.5)
    return torch.stack(out), state


@pytest.mark.parametrize("backend", [Backend.TORCH, Backend.TRITON])
def test_chunks_are_the_recurrence(backend: Backend) -> None:
    x = rule_inputs(150, *HEADS[-1], torch.float32)
    batch = on_device(make_batch([150], [0], num_decodes=0, checkpoints={0: {71: 9}}))
    state = torch.full((13, HEADS[-1][0], *[HEADS[-1][1]] * 2), torch.nan, device=DEVICE)
    out = chunk_gated_delta_rule(*x, state, batch, backend=backend)
    want, last = token_by_token(*x)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(state[int(batch.state_slots[0])].double(), last, rtol=1e-4, atol=2e-5)
    _, middle = token_by_token(*(y[:71] for y in x))
    torch.testing.assert_close(state[9].double(), middle, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunk_kernel_of_a_mixed_batch(heads: tuple[int, int], dtype: torch.dtype) -> None:
    batch = mixed_batch()
    n, (h, dim) = batch.num_tokens, heads
    x = poisoned(batch, *rule_inputs(n + 3, h, dim, dtype))
    before = torch.randn(13, h, dim, dim, device=DEVICE)
    before[[3, 4]] = torch.nan  # sequences 2 and 3 start here: what their slots hold must not matter
    expected_state, state = before.clone(), before.clone()
    expected = chunk_gated_delta_rule(*x, expected_state, batch, backend=TORCH)
    result = chunk_gated_delta_rule(*x, state, batch, backend=TRITON)
    close(result[2:], expected[2:], dtype)
    assert (result[n:] == 0).all(), "padding rows must be zero"
    assert (result[:2] == 0).all(), "rows of decodes"
    close(state[3:12], expected_state[3:12], dtype)
    for slot in (0, 1, 2, 12):
        assert torch.equal(state[slot], before[slot]), f"slot {slot} was touched"


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("given_out", "floor"), [(False, 0.0), (True, 0.0), (False, -5.0)])
@pytest.mark.parametrize(("rows", "dtype"), DECODES)
def test_decode_step(heads: tuple[int, int], given_out: bool, floor: float, rows: int, dtype: torch.dtype) -> None:
    """Everything between the projections; the last row is padding."""
    (h, dim), last = heads, rows - 1
    geometry = KimiDeltaConfig(h, dim, 4, floor)
    projected = torch.randn(rows, 3 * h * dim + h + 2 * dim, device=DEVICE).to(dtype)
    f, gate = (torch.randn(rows, h * dim, device=DEVICE).to(dtype) for _ in range(2))
    for x in (projected, f, gate):
        x[last] = torch.nan
    weights: list[Any] = [
        torch.randn(3 * h * dim, 4, device=DEVICE).to(dtype),
        torch.linspace(-5, 2, h, device=DEVICE),
        torch.linspace(-30, 25, h * dim, device=DEVICE),  # both ends of softplus
        torch.randn(dim, device=DEVICE).to(dtype),
        1e-5,
    ]
    conv_before = torch.randn(rows + 5, 3 * h * dim, 3, device=DEVICE).to(dtype)
    before = torch.randn(rows + 5, h, dim, dim, device=DEVICE).to(dtype)
    slots = torch.randperm(rows + 4, device=DEVICE)[:rows].int() + 1
    slots[last] = 0
    results = {}
    for backend in (Backend.TORCH, Backend.TRITON):
        states = conv_before.clone(), before.clone()
        out = torch.full((rows, h * dim), 7.0, device=DEVICE, dtype=dtype) if given_out else None
        out = kda_decode(projected, f, gate, DeltaWeights(*weights), *states, slots, geometry, backend=backend, out=out)
        results[backend] = (out, *states)
    (out, conv, state), expected = results[TRITON], results[TORCH]
    assert (out[last] == (7.0 if given_out else 0.0)).all()
    for prefetch in (False, True):  # tiles of part of the columns
        states = conv_before.clone(), before.clone()
        given = projected, f, gate, DeltaWeights(*weights), *states, slots, geometry
        tiled = kda_decode_triton(*given, choose=lambda _, prefetch=prefetch: Shape(16, 4, prefetch, None))
        close(tiled[:last], expected[0][:last], dtype)
        close(states[1][1:], expected[2][1:], dtype)
    close(out, expected[0], dtype)
    assert torch.equal(conv[1:], expected[1][1:])
    close(state[1:], expected[2][1:], dtype)


def verified_inputs(
    rows: int, heads: tuple[int, int], kernel: int, dtype: torch.dtype
) -> tuple[list[Tensor], list[Any]]:
    """Projections of some tokens, and a layer's weights. Every head and channel decays at a rate of its own."""
    h, dim = heads
    sizes = 3 * h * dim + h + 2 * dim, h * dim, h * dim
    weights: list[Any] = [
        torch.randn(3 * h * dim, kernel, device=DEVICE).to(dtype),
        torch.linspace(-5, 2, h, device=DEVICE),
        torch.linspace(-30, 25, h * dim, device=DEVICE),
        torch.randn(dim, device=DEVICE).to(dtype),
        1e-5,
    ]
    return [torch.randn(rows, size, device=DEVICE).to(dtype) for size in sizes], weights


@pytest.mark.parametrize(
    ("heads", "floor", "dtypes", "tokens"),
    covering(HEADS, [0.0, -5.0], VERIFIED_DTYPES, [(2, 2), (4, 3), (4, 8)] + [(4, 17)] * ON_GPU, of=1),
    ids=str,
)
def test_verify_step(
    heads: tuple[int, int], floor: float, dtypes: tuple[torch.dtype, torch.dtype], tokens: tuple[int, int]
) -> None:
    """Outputs, and the states after every token."""
    (h, dim), (dtype, state_dtype), (kernel, num_tokens) = heads, dtypes, tokens
    places = Places(num_tokens)
    geometry = KimiDeltaConfig(h, dim, kernel, floor)
    rows, weights = verified_inputs(places.after.numel(), heads, kernel, dtype)
    for x in rows:
        x[places.padding] = torch.nan
    conv = torch.randn(places.count, 3 * h * dim, kernel - 1, device=DEVICE).to(dtype)
    recurrent = torch.randn(places.count, h, dim, dim, device=DEVICE).to(state_dtype)
    places.poison(conv, recurrent)
    slots, written = (places.before, places.after), places.written
    got = conv.clone(), recurrent.clone()
    out = kda_verify(*rows, DeltaWeights(*weights), *got, *slots, geometry, backend=TRITON)
    # The reference in float32: it rounds between its operations, the kernel at the end alone.
    wide = [w.float() if isinstance(w, Tensor) else w for w in weights]
    want = conv.float(), recurrent.clone()
    given = (x.float() for x in rows)
    expected = kda_verify(*given, DeltaWeights(*wide), *want, *slots, geometry, backend=TORCH)
    assert (out[places.padding] == 0).all(), "padding rows must be zero"
    close(out / expected.std(), expected / expected.std(), dtype)
    assert torch.equal(got[0][written].float(), want[0][written])
    assert error_of_states(got[1][written], want[1][written]) < most_error(state_dtype)
    places.check_untouched(got[0], conv)
    places.check_untouched(got[1], recurrent)


@pytest.mark.parametrize("floor", [0.0, -5.0])
@pytest.mark.parametrize("backend", [TORCH, Backend.INVARIANT_TORCH, TRITON, Backend.INVARIANT_TRITON])
def test_a_verified_token_leaves_the_state_of_a_decode_step(backend: Backend, floor: float) -> None:
    """And its output. Rejected tokens after it change nothing: all bits are those of the accepted tokens alone where
    both kernels are interpreted, or are the same kernel."""
    h, dim = HEADS[-1]
    geometry, places = KimiDeltaConfig(h, dim, 4, floor), torch.tensor([[5, 6, 1], [3, 7, 2]], dtype=torch.int32)
    slots, exact = places.to(DEVICE), not ON_GPU or backend is not TRITON
    working = slots[:, -1].contiguous()
    rows, weights = verified_inputs(6, (h, dim), 4, torch.float32)
    conv = torch.randn(8, 3 * h * dim, 3, device=DEVICE)
    state = torch.randn(8, h, dim, dim, device=DEVICE).bfloat16()
    stepwise = conv.clone(), state.clone()
    out = kda_verify(*rows, DeltaWeights(*weights), conv, state, working, slots, geometry, backend=backend)
    for i in range(3):
        token = (x[i::3] for x in rows)
        step = kda_decode(*token, DeltaWeights(*weights), *stepwise, working, geometry, backend=backend)
        after = slots[:, i].long()
        assert torch.equal(conv[after], stepwise[0][working.long()])
        assert error_of_states(state[after], stepwise[1][working.long()]) <= (0.0 if exact else 2**-8)
        assert torch.equal(out[i::3], step) if exact else error_of_states(out[i::3], step) < 2**-6


@pytest.mark.parametrize("floor", [0.0, -5.0])
def test_gates_and_norm(floor: float) -> None:
    h, dim = HEADS[-1]
    wide = 20 * torch.randn(37, h * dim + h + 5, device=DEVICE)
    f, b = wide[:, : h * dim], wide[:, h * dim : h * dim + h]
    a_log, dt_bias = torch.linspace(-5, 2, h, device=DEVICE), torch.linspace(-4, 1, h * dim, device=DEVICE)
    for got, want in zip(
        kda_gates(f, b, a_log, dt_bias, floor=floor, backend=TRITON),
        kda_gates.reference(f, b, a_log, dt_bias, floor=floor),
        strict=True,
    ):
        atol = 1e-12 if floor else 1e-30  # a bounded log decay near zero has an exponent of hundreds
        torch.testing.assert_close(got, want, rtol=5e-6, atol=atol)
    x, gate, weight = torch.randn(5, h, dim, device=DEVICE), torch.randn(5, h, dim, device=DEVICE), wide[0, :dim]
    norms = [
        gated_rms_norm(x, gate, weight, 1e-5, activation="sigmoid", backend=backend)
        for backend in (Backend.TORCH, Backend.TRITON)
    ]
    close(norms[1], norms[0], torch.float32)
    plain = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight * gate.sigmoid()
    close(norms[0], plain, torch.float32)


LATENTS = [(32, 512, 64), (5, 40, 6)] if ON_GPU else [*unless_long([], [(16, 16, 16)]), (5, 40, 6)]


@pytest.mark.parametrize("sizes", LATENTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("query", "before", "decodes"),
    [([1, 1, 40, 1, 5, 70, 3], [9, 0, 0, 63, 7, 5, 130], 2), ([1] * 6, [9, 0, 127, 128, 256, 330], 6)],
    ids=["mixed", "splits"],
)
def test_latent_attention_kernel(
    sizes: tuple[int, int, int], dtype: torch.dtype, query: list[int], before: list[int], decodes: int
) -> None:
    """Many lengths, over pages in random order, with padding; a step of decodes alone is split over the keys."""
    heads, rank, shared = sizes
    batch = on_device(make_batch(query, before, num_decodes=decodes, pad_tokens=3, pad_seqs=2, pad_chunks=0))
    pages, page_size = int(batch.page_table.max()) + 1, PAGE_SIZE
    latents = torch.full((pages, page_size, -(-(rank + shared) // 8) * 8), torch.nan, device=DEVICE).to(dtype)
    latents[..., : rank + shared] = torch.randn(pages, page_size, rank + shared, device=DEVICE)
    q = torch.randn(sum(query) + 3, heads, rank + shared, device=DEVICE).to(dtype)
    q[sum(query) :] = torch.nan
    want, got = (latent_attention(q, latents, batch, rank=rank, scale=0.1, backend=b) for b in (TORCH, TRITON))
    close(got, want, dtype)
    assert (got[sum(query) :] == 0).all() and (want[sum(query) :] == 0).all()


def test_more_heads_than_a_launch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    most = latent._MOST_HEADS
    monkeypatch.setattr(latent, "_MOST_HEADS", 3)
    launched = []
    launch = latent._launch

    def noted(q: Tensor, *given: Any, **options: Any) -> None:
        launched.append(q.shape[1])
        launch(q, *given, **options)

    monkeypatch.setattr(latent, "_launch", noted)
    test_latent_attention_kernel((5, 40, 6), torch.float32, [1, 12, 7], [9, 3, 0], 1)
    assert launched == [3, 2] and most == 64


@pytest.mark.parametrize("sizes", LATENTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_latent_attention_of_a_verification(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Each token sees the tokens before it; keys are split, and the splits merged."""
    heads, rank, shared = sizes
    batch = on_device(make_batch([3] * 4, [9, 127, 330, 62], num_decodes=0))
    batch = replace(batch, chunks=None, verification=Verification(3, batch.seq_lens[:, None].expand(-1, 3)))
    latents = torch.randn(int(batch.page_table.max()) + 1, PAGE_SIZE, -(-(rank + shared) // 8) * 8, device=DEVICE)
    q = torch.randn(12, heads, rank + shared, device=DEVICE).to(dtype)
    given = q, latents.to(dtype), batch
    want, got = (latent_attention(*given, rank=rank, scale=0.1, backend=backend) for backend in (TORCH, TRITON))
    close(got, want, dtype)


@pytest.mark.parametrize(
    ("is_hopper", "kilobytes", "keys"), [(True, 227, 64), (True, 163, 32), (False, 227, 32), (False, 99, 16)]
)
def test_many_rows_meet_as_many_keys_as_fit(
    is_hopper: bool, kilobytes: int, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latents have 512 + 64 values. A fixed order of sums is an exception, since its decodes have other tiles."""
    found = []
    monkeypatch.setattr(latent, "is_hopper", lambda device: is_hopper)
    monkeypatch.setattr(latent, "shared_bytes", lambda device: kilobytes << 10)
    monkeypatch.setattr(latent, "is_small", lambda device: kilobytes < 100)
    monkeypatch.setattr(
        latent, "_latent_attention_kernel", defaultdict(lambda: lambda *_, FIXED, **__: found.append(FIXED))
    )
    batch, latents = make_batch([40], [0]), torch.zeros(3, PAGE_SIZE, 576, dtype=torch.bfloat16)
    q = torch.zeros(40, 32, 576, dtype=torch.bfloat16)
    for backend in (TRITON, Backend.INVARIANT_TRITON):
        latent_attention(q, latents, batch, rank=512, scale=0.1, backend=backend)
    assert [fixed.keys for fixed in found] == [keys, min(keys, 32)]


@pytest.mark.parametrize("sizes", LATENTS, ids=str)
def test_latent_attention_has_the_bits_of_a_token_alone(sizes: tuple[int, int, int]) -> None:
    """In a step of any others: as a decode, as a draft, and as a token of a prompt, however its steps are cut."""
    heads, rank, shared = sizes
    before = [9, 300, 130]
    pages = on_device(make_batch([4, 1, 70], before)).page_table
    latents = torch.randn(int(pages.max()) + 1, PAGE_SIZE, -(-(rank + shared) // 8) * 8, device=DEVICE).to(DTYPES[-1])
    q = torch.randn(90, heads, rank + shared, device=DEVICE).to(DTYPES[-1])

    def attend(rows: Tensor, query: list[int], before: list[int], decodes: int, tables: Tensor | None = None) -> Tensor:
        batch = on_device(make_batch(query, before, num_decodes=decodes))
        if tables is not None:
            batch = replace(batch, page_table=tables)
        if decodes == -1:
            batch = replace(batch, num_decodes=0, verification=Verification(query[0], batch.seq_lens[:, None]))
        return latent_attention(rows, latents, batch, rank=rank, scale=0.1, backend=Backend.INVARIANT_TRITON)

    mixed = attend(q[:72], [1, 1, 70], before, 2, pages)
    for i in range(2):
        assert torch.equal(attend(q[i : i + 1], [1], before[i : i + 1], 1, pages[i : i + 1]), mixed[i : i + 1])
    assert torch.equal(attend(q[2:72], [70], [130], 0, pages[2:]), mixed[2:])
    first = attend(q[2:32], [30], [130], 0, pages[2:])
    rest = attend(torch.cat([q[:1], q[32:72]]), [1, 40], [9, 160], 1, pages[[0, 2]])
    assert torch.equal(torch.cat([first, rest[1:]]), mixed[2:])
    drafts = attend(q[:8], [4, 4], [9, 150], -1, pages[[0, 2]])
    for i in range(4):
        assert torch.equal(attend(q[i : i + 1], [1], [9 + i], 1, pages[:1]), drafts[i : i + 1])
