"""The Gated DeltaNet kernels against their torch references: interpreted at small sizes, on the GPU at real ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.interpreter import DEVICE
from tests.ops.oracles import make_batch
from tests.whole import covering, takes_long_on_cpu, unless_long
from weft.config.gated_delta_net import GatedDeltaNetConfig
from weft.forward_context import Batch, ChunkTable
from weft.ops.backend import Backend
from weft.ops.convolution import causal_conv1d
from weft.ops.convolution import prefill as conv
from weft.ops.delta_rule import (
    DeltaWeights,
    chunk_gated_delta_rule,
    gdn_decode,
    gdn_gates,
    gdn_verify,
)
from weft.ops.delta_rule import gdn_prefill as gates
from weft.ops.norm import gated_rms_norm
from weft.ops.norm import kernels as norm

pytest.importorskip("triton")
TORCH, TRITON = Backend.TORCH, Backend.TRITON
ON_GPU = DEVICE == "cuda"
TOLERANCE = {
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
    torch.float16: {"atol": 4e-3, "rtol": 4e-3},
    torch.bfloat16: {"atol": 4e-2, "rtol": 2e-2},
}
# The interpreter's tl.dot is wrong for bfloat16.
DTYPES = [torch.float32, torch.bfloat16 if ON_GPU else torch.float16]
# Key heads, value heads, K, V: odd sizes force every mask; the real geometry runs where it is quick.
HEADS = [(16, 32, 128, 128), (2, 6, 24, 40)] if ON_GPU else [(1, 2, 20, 24)]


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), **TOLERANCE[dtype])


def on_device(batch: Batch) -> Batch:
    """The same batch with its tensors on the test's device."""
    moved = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    moved = {n: x.to(DEVICE) if isinstance(x, Tensor) else x for n, x in moved.items()}
    if batch.chunks is not None:
        columns = {f.name: getattr(batch.chunks, f.name) for f in dataclasses.fields(batch.chunks)}
        columns = {n: x.to(DEVICE) if isinstance(x, Tensor) else x for n, x in columns.items()}
        moved["chunks"] = ChunkTable(**columns)
    return Batch(**moved)


def mixed_batch() -> Batch:
    """Decodes, fresh, short and continued sequences; checkpoints after 1, 2 and 64 tokens; padding of each kind."""
    return on_device(
        make_batch(
            [1, 1, 66, 1, 5, 70], [9, 3, 0, 0, 7, 5],
            num_decodes=2, checkpoints={2: {1: 7, 2: 8, 64: 9}, 5: {2: 10, 9: 11}},
            pad_tokens=3, pad_seqs=2, pad_chunks=2,
        )
    )  # fmt: skip


def poisoned(batch: Batch, *tensors: Tensor) -> tuple[Tensor, ...]:
    for x in tensors:
        x[batch.num_tokens :] = torch.nan
    return tensors


def rule_inputs(num_tokens: int, heads: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v, g, beta; q, k, v are slices of one projection, as in the layer."""
    hk, hv, dk, dv = heads
    packed = torch.randn(num_tokens, 2 * hk * dk + hv * dv, device=DEVICE).to(dtype)
    q, k, v = packed.split([hk * dk, hk * dk, hv * dv], dim=-1)
    a, b = (torch.randn(num_tokens, hv, device=DEVICE) for _ in range(2))
    decays = torch.linspace(-5, 2, hv, device=DEVICE), torch.linspace(-2, 1, hv, device=DEVICE)
    gates = gdn_gates.reference(a, b, *decays)
    return q.unflatten(-1, (hk, dk)), k.unflatten(-1, (hk, dk)), v.unflatten(-1, (hv, dv)), *gates


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunked_rule(heads: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    batch = mixed_batch()
    n, (_, hv, dk, dv) = batch.num_tokens, heads
    x = poisoned(batch, *rule_inputs(n + 3, heads, dtype))
    before = torch.randn(13, hv, dk, dv, device=DEVICE)
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


def test_repeated_keys_without_decay_stay_accurate() -> None:
    """The hardest triangular system: equal keys, full strength. A power series loses every digit here."""
    hk, hv, dk, dv = 1, 1, 16, 16
    key = torch.randn(1, hk, dk, device=DEVICE).expand(64, -1, -1).contiguous()
    q, v = torch.randn(64, hk, dk, device=DEVICE), torch.randn(64, hv, dv, device=DEVICE)
    g, beta = torch.zeros(64, hv, device=DEVICE), torch.full((64, hv), 0.999, device=DEVICE)
    batch, state = on_device(make_batch([64], [0])), torch.zeros(2, hv, dk, dv, device=DEVICE)
    expected = chunk_gated_delta_rule(q, key, v, g, beta, state.clone(), batch, backend=TORCH)
    close(chunk_gated_delta_rule(q, key, v, g, beta, state, batch, backend=TRITON), expected, torch.float32)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_effect_of_a_token_on_itself_is_rounded_once(heads: tuple[int, int, int, int]) -> None:
    """Where nothing outlives a token, the output is its own: ``beta (q . k) v`` in float32, rounded at the store."""
    dtype = DTYPES[1]
    q, k, v, g, beta = rule_inputs(70, heads, dtype)
    batch, state = on_device(make_batch([70], [0])), torch.zeros(2, heads[1], *heads[2:], device=DEVICE)
    exact = (q.float(), k.float(), v.float(), torch.full_like(g, -100.0), beta)
    expected = chunk_gated_delta_rule(*exact, state.clone(), batch, backend=TORCH)
    result = chunk_gated_delta_rule(q, k, v, exact[3], beta, state, batch, backend=TRITON)
    half_a_step = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(result.float(), expected, atol=1e-6, rtol=1.01 * half_a_step)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", [2, 4])
def test_decode_step(
    heads: tuple[int, int, int, int], dtype: torch.dtype, state_dtype: torch.dtype, kernel: int
) -> None:
    """Everything between the projections; the last row is padding."""
    hk, hv, dk, dv = heads
    channels = 2 * hk * dk + hv * dv
    projected = torch.randn(4, channels + hv * dv + 2 * hv, device=DEVICE).to(dtype)
    projected[3] = torch.nan
    weights: list[Any] = [
        torch.randn(channels, kernel, device=DEVICE).to(dtype),
        torch.linspace(-5, 2, hv, device=DEVICE),
        torch.linspace(-30, 25, hv, device=DEVICE),  # both ends of softplus
        torch.randn(dv, device=DEVICE).to(dtype),
        1e-6,
    ]
    conv, recurrent = torch.randn(9, channels, kernel - 1, device=DEVICE), torch.randn(9, hv, dk, dv, device=DEVICE)
    conv, recurrent = conv.to(dtype), recurrent.to(state_dtype)
    slots = torch.tensor([3, 1, 5, 0], dtype=torch.int32, device=DEVICE)
    geometry = GatedDeltaNetConfig(
        hk, hv, dk, dv, kernel, negative_eigenvalues=kernel == 2, sigmoid_gate=state_dtype == torch.float32
    )
    results = {}
    for backend in (TORCH, TRITON):
        # The kernel rounds once, at the end: the reference computes in float32, from the same numbers.
        given = [x.float() if backend is TORCH and isinstance(x, Tensor) else x for x in (projected, *weights)]
        states = [x.float() if backend is TORCH else x for x in (conv.clone(), recurrent.clone())]
        kept = torch.full((4, hv * dv), 7.0, dtype=given[0].dtype, device=DEVICE) if kernel == 2 else None
        out = gdn_decode(given[0], DeltaWeights(*given[1:]), *states, slots, geometry, backend=backend, out=kept)
        results[backend] = (out, *states)
    (out, conv, state), expected = results[TRITON], results[TORCH]
    assert (out[3] == (7 if kernel == 2 else 0)).all(), "padding rows are zero, or left as they are"
    close(out / expected[0].std(), expected[0] / expected[0].std(), dtype)
    assert torch.equal(conv[1:].float(), expected[1][1:])
    close(state[1:], expected[2][1:], state_dtype)


class Places:
    """Slots of four sequences that verify drafts. The third one is padding. With three tokens or more the last one has
    fewer drafts: nothing is kept after its last token."""

    SEQUENCES = 4

    def __init__(self, num_tokens: int) -> None:
        self.count = self.SEQUENCES * num_tokens + 3
        slots = torch.randperm(self.count - 1)[: self.SEQUENCES * num_tokens] + 1
        self.after = slots.view(self.SEQUENCES, num_tokens).int().to(DEVICE)
        self.after[2] = 0
        self.before = self.after[:, -1].contiguous()
        if num_tokens > 2:
            self.after[3, -2:] = self.after[3, -2:].roll(-1) * torch.tensor([1, 0], device=DEVICE)
        self.written = self.after[self.after > 0].long()
        self.untouched = [slot for slot in range(1, self.count) if slot not in self.written.tolist()]
        self.padding = slice(2 * num_tokens, 3 * num_tokens)

    def poison(self, *states: Tensor) -> None:
        """Fill the slots that are only written, and may hold anything, with NaN."""
        before = self.before.tolist()
        for state in states:
            state[[slot for slot in self.written.tolist() if slot not in before]] = torch.nan

    def check_untouched(self, state: Tensor, before: Tensor) -> None:
        at = self.untouched
        torch.testing.assert_close(state[at], before[at], rtol=0, atol=0, equal_nan=True)


VERIFIED_DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]
"""Dtypes of the inputs and of the recurrent state."""


def error_of_states(got: Tensor, want: Tensor) -> float:
    return float((got - want).float().norm() / want.float().norm())


def most_error(state_dtype: torch.dtype) -> float:
    """The interpreter cuts bfloat16 off where a GPU rounds, and every token does it again."""
    return 1e-6 if state_dtype == torch.float32 else 2**-8 if ON_GPU else 2**-5


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("dtype", "state_dtype"), VERIFIED_DTYPES, ids=str)
@pytest.mark.parametrize(("kernel", "num_tokens"), [(2, 2), (4, 3), *unless_long([], [(4, 8)]), *([(4, 1)] * ON_GPU)])
def test_verify_step(
    heads: tuple[int, int, int, int], dtype: torch.dtype, state_dtype: torch.dtype, kernel: int, num_tokens: int
) -> None:
    """Outputs, and the states after every token."""
    hk, hv, dk, dv = heads
    channels, rows = 2 * hk * dk + hv * dv, Places.SEQUENCES * num_tokens
    projected = torch.randn(rows, channels + hv * dv + 2 * hv, device=DEVICE).to(dtype)
    weights: list[Any] = [
        torch.randn(channels, kernel, device=DEVICE).to(dtype),
        torch.linspace(-5, 2, hv, device=DEVICE),
        torch.linspace(-3, 3, hv, device=DEVICE),
        torch.randn(dv, device=DEVICE).to(dtype),
        1e-6,
    ]
    conv = torch.randn(rows + 3, channels, kernel - 1, device=DEVICE).to(dtype)
    recurrent = torch.randn(rows + 3, hv, dk, dv, device=DEVICE).to(state_dtype)
    places = Places(num_tokens)
    projected[places.padding] = torch.nan
    places.poison(conv, recurrent)
    geometry = GatedDeltaNetConfig(
        hk, hv, dk, dv, kernel, negative_eigenvalues=kernel == 2, sigmoid_gate=state_dtype == torch.float32
    )
    got_conv, got_state = conv.clone(), recurrent.clone()
    slots, written = (places.before, places.after), places.written
    out = gdn_verify(projected, DeltaWeights(*weights), got_conv, got_state, *slots, geometry, backend=TRITON)
    # The reference in float32: it rounds between its operations, the kernel at the end alone.
    wide = [w.float() if isinstance(w, Tensor) else w for w in weights]
    want_conv, want_state = conv.float(), recurrent.clone()
    want = gdn_verify(projected.float(), DeltaWeights(*wide), want_conv, want_state, *slots, geometry, backend=TORCH)
    assert (out[places.padding] == 0).all(), "padding rows must be zero"
    close(out / want.std(), want / want.std(), dtype)
    assert torch.equal(got_conv[written].float(), want_conv[written])
    assert error_of_states(got_state[written], want_state[written]) < most_error(state_dtype)
    places.check_untouched(got_conv, conv)
    places.check_untouched(got_state, recurrent)


@pytest.mark.parametrize("backend", [TRITON, Backend.INVARIANT_TRITON])
def test_a_verified_token_leaves_the_state_of_a_decode_step(backend: Backend) -> None:
    """States equal those of as many decode steps, rounding included. Interpreted kernels agree to the bit."""
    geometry = GatedDeltaNetConfig(2, 4, 16, 8, 4)
    rows = geometry.conv_dim + geometry.value_dim + 8
    projected = torch.randn(2, 3, rows, device=DEVICE)
    weights: list[Any] = [torch.randn(geometry.conv_dim, 4), torch.zeros(4), torch.zeros(4), torch.ones(8)]
    weights = [*(weight.to(DEVICE) for weight in weights), 1e-6]
    conv, state = torch.randn(8, geometry.conv_dim, 3), torch.randn(8, 4, 16, 8).bfloat16()
    conv, state = conv.to(DEVICE), state.to(DEVICE)
    slots = torch.tensor([[5, 6, 1], [3, 7, 2]], dtype=torch.int32, device=DEVICE)
    working = slots[:, -1].contiguous()
    stepwise = conv.clone(), state.clone()
    gdn_verify(projected.flatten(0, 1), DeltaWeights(*weights), conv, state, working, slots, geometry, backend=backend)
    for i in range(3):
        gdn_decode(projected[:, i], DeltaWeights(*weights), *stepwise, working, geometry, backend=backend)
        after = slots[:, i].long()
        assert torch.equal(conv[after], stepwise[0][working.long()])
        error = (state[after] - stepwise[1][working.long()]).float().norm() / state[after].float().norm()
        assert error <= (2**-8 if ON_GPU and backend is TRITON else 0.0)


CONV_TILES = [
    conv.Tile(32, 16, 8, 1, None),
    conv.Tile(64, 4, 4, 1, None),
    *list(conv.TILES.values())[0 if ON_GPU else -1 :],
]


def check_convolution(
    batch: Batch, tile: conv.Tile, kernel: int, bias: bool, dtype: torch.dtype, pad_tokens: int, foreign: list[int]
) -> None:
    """Outputs, states and checkpoints; ``foreign``: slots that no prefill sequence names."""
    channels, n = 8192 if ON_GPU else 70, batch.num_tokens
    x = torch.randn(n + pad_tokens, channels + 9, device=DEVICE).to(dtype)[:, :channels]
    poisoned(batch, x)
    weight = torch.randn(channels, kernel, device=DEVICE).to(dtype)
    offset = torch.randn(channels, device=DEVICE).to(dtype) if bias else None
    before = torch.randn(13, channels, kernel - 1, device=DEVICE).to(dtype)
    fresh = batch.seq_lens == batch.cu_seqlens_q.diff()
    before[batch.state_slots[fresh & (batch.seq_lens > 0)].long()] = torch.nan
    expected_state, state = before.clone(), before.clone()
    expected = causal_conv1d(x, weight, offset, expected_state, batch, backend=TORCH)
    result = conv.causal_conv1d_triton(x, weight, offset, state, batch, tile=tile)
    close(result, expected, dtype)
    assert (result[n:] == 0).all() and (result[: batch.num_decodes] == 0).all()
    named = [slot for slot in range(13) if slot not in foreign]
    assert torch.equal(state[named], expected_state[named])
    assert torch.equal(state[foreign], before[foreign]), "slots of others were touched"


@pytest.mark.parametrize(("tile", "form"), covering(CONV_TILES, [(2, True), (4, False)], of=1))
def test_convolution_of_chunks(tile: conv.Tile, form: tuple[int, bool]) -> None:
    kernel, bias = form
    """Checkpoints closer to the start than the convolution reaches, and a sequence shorter than that."""
    check_convolution(mixed_batch(), tile, kernel, bias, torch.float32, 3, [0, 1, 2, 12])


@takes_long_on_cpu
def test_convolution_of_awkward_lengths() -> None:
    """Lengths around the pieces' and chunks' edges; more padding rows than programs, as in a graph for more tokens."""
    batch = make_batch(
        [1, 1, 2, 3, 63, 65, 130], [9, 0, 5, 0, 64, 0, 1],
        num_decodes=1, checkpoints={3: {1: 9}, 4: {3: 10}, 6: {17: 11, 64: 12}}, pad_tokens=90, pad_seqs=3,
    )  # fmt: skip
    check_convolution(on_device(batch), CONV_TILES[0], 4, False, DTYPES[1], 90, [0, 1])


def test_convolution_without_prefills() -> None:
    """A graph of any mixture may hold decodes alone: nothing is touched, every row is zero."""
    none = torch.zeros(1, dtype=torch.int32)
    chunks = ChunkTable(none, none, none, none - 1, torch.zeros(4, dtype=torch.int32), max_seqs=2)
    batch = make_batch([1, 1], [4, 4], num_decodes=2, pad_tokens=5, pad_seqs=1)
    batch = on_device(dataclasses.replace(batch, chunks=chunks))
    state = torch.randn(4, 40, 3, device=DEVICE)
    before, x = state.clone(), torch.full((7, 40), torch.nan, device=DEVICE)
    result = causal_conv1d(x, torch.randn(40, 4, device=DEVICE), None, state, batch, backend=TRITON)
    assert (result == 0).all() and torch.equal(state, before)


@pytest.mark.parametrize("width", [24, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gated_norm_with_strided_gate(width: int, dtype: torch.dtype) -> None:
    x = torch.randn(7, 3, width, device=DEVICE).to(dtype)
    gate = torch.randn(7, 3 * width + 5, device=DEVICE).to(dtype)[:, : 3 * width].unflatten(-1, (3, width))
    weight = torch.randn(width, device=DEVICE).to(dtype)
    expected = gated_rms_norm(x, gate, weight, 1e-6, backend=TORCH)
    close(gated_rms_norm(x, gate, weight, 1e-6, backend=TRITON), expected, dtype)
    flat = gated_rms_norm(x.flatten(0, 1), gate.reshape(-1, width), weight, 1e-6, backend=TRITON)
    assert torch.equal(flat.view_as(x), gated_rms_norm(x, gate, weight, 1e-6, backend=TRITON))


@pytest.mark.parametrize("tile", [*norm.TILES.values(), norm.Tile(128, 1, None)])
def test_gated_norm_tiles(tile: norm.Tile) -> None:
    """More rows than one program takes; the last program's are not all there."""
    x, gate = (torch.randn(65, 3, 40, device=DEVICE) for _ in range(2))
    gate[0, 0, :4] = torch.tensor([-200.0, -90.0, 90.0, 200.0])  # both ends of the sigmoid
    weight = torch.randn(40, device=DEVICE)
    expected = gated_rms_norm(x, gate, weight, 1e-6, backend=TORCH)
    close(norm.gated_rms_norm_triton(x, gate, weight, 1e-6, tile=tile), expected, torch.float32)


@pytest.mark.parametrize("num_tokens", [1, 65])
@pytest.mark.parametrize("heads", [3, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gates(num_tokens: int, heads: int, dtype: torch.dtype) -> None:
    """Slices of a wider projection, from one end of softplus to the other."""
    b, a = (40 * torch.randn(num_tokens, 2 * heads + 5, device=DEVICE)).to(dtype)[:, 3 : 2 * heads + 3].chunk(2, dim=-1)
    a_log, dt_bias = torch.linspace(-5, 2, heads, device=DEVICE), torch.linspace(-4, 1, heads, device=DEVICE)
    x = a.double() + dt_bias.double()
    want = -a_log.double().exp() * torch.logaddexp(x, torch.zeros_like(x)), b.double().sigmoid()
    doubled = gdn_gates(a, b, a_log, dt_bias, negative_eigenvalues=True, backend=TRITON)[1]
    torch.testing.assert_close(doubled.double(), 2.0 * want[1], rtol=5e-6, atol=1e-30)
    for got, expected in zip(gdn_gates(a, b, a_log, dt_bias, backend=TRITON), want, strict=True):
        assert got.dtype is torch.float32 and got.is_contiguous()
        torch.testing.assert_close(got.double(), expected, rtol=5e-6, atol=1e-30)


def test_gates_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token depends on how many a program has."""
    a, b, a_log = torch.randn(37, 6, device=DEVICE), torch.randn(37, 6, device=DEVICE), torch.randn(6, device=DEVICE)
    whole = gates.gdn_gates_triton(a, b, a_log, a_log)
    monkeypatch.setattr(gates, "_ELEMENTS", 16)
    for got, want in zip(gates.gdn_gates_triton(a, b, a_log, a_log), whole, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("programs", "dtype", "ahead"), [(264, "bfloat16", True), (265, "bfloat16", False), (4096, "float32", True)]
)
def test_many_programs_read_states_in_bfloat16_when_it_is_their_turn(programs: int, dtype: str, ahead: bool) -> None:
    from weft.ops.delta_rule.decode import choose_shape

    assert choose_shape(programs, getattr(torch, dtype)).prefetch is ahead


@pytest.mark.parametrize(
    ("dv", "dtype", "alone", "is_wide"),
    [
        (192, "bfloat16", False, True), (192, "bfloat16", True, False), (192, "float32", False, False),
        (128, "bfloat16", False, False),
    ],
)  # fmt: skip
def test_wide_heads_have_a_shape_of_their_own_but_in_deterministic_inference(
    dv: int, dtype: str, alone: bool, is_wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weft.ops.delta_rule import few_tokens

    shapes: list[Any] = []
    monkeypatch.setattr(few_tokens, "serves_decodes", lambda *given: False)
    monkeypatch.setattr(few_tokens, "launch_rows", lambda *given: shapes.append(given[5]))
    state, rows = torch.empty(1, 2, 96, dv, dtype=getattr(torch, dtype)), torch.empty(133, 4)
    geometry = GatedDeltaNetConfig(2, 2, 96, dv, 4)
    few_tokens.gdn_decode_triton(rows, None, None, state, None, geometry, out=None, alone=alone)
    assert [shape.warps for shape in shapes] == [2 if is_wide else 4]
