"""Linear attention with one decay per head: the reference token by token, the kernels against the reference."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.ops.delta_rule.test_triton_gdn import DTYPES, ON_GPU, close, mixed_batch, poisoned
from tests.ops.interpreter import DEVICE
from tests.ops.oracles import make_batch
from weft.config.mamba2 import Mamba2Config
from weft.ops.backend import Backend
from weft.ops.linear_attention import chunk_linear_attention, lightning_attention_step, linear_attention_step_reference
from weft.ops.linear_attention.decode import StepTile, choose_step_tile, linear_attention_step
from weft.ops.mamba import Mamba2Weights, mamba2_decode, mamba2_gates
from weft.ops.norm import gated_group_norm

TORCH, TRITON = Backend.TORCH, Backend.TRITON
# Groups, heads, K, V: odd sizes force every mask; the real geometry runs where it is quick.
HEADS = [(8, 64, 128, 64), (1, 6, 256, 40), (32, 32, 128, 128)] if ON_GPU else [(2, 4, 20, 24)]


def rule_inputs(
    rows: int, heads: tuple[int, int, int, int], dtype: torch.dtype, mamba: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """q, k, v, g, beta, skip; q, k, v are slices of one projection. Without ``mamba``: decays are constants.

    Rates and time steps are those of training: sums of g that are far greater cannot be told apart in float32 to the
    digits that are compared here, by the reference neither.
    """
    groups, num_heads, dk, dv = heads
    packed = torch.randn(rows, 2 * groups * dk + num_heads * dv, device=DEVICE).to(dtype)
    v, k, q = packed.split([num_heads * dv, groups * dk, groups * dk], dim=-1)
    shaped = (q.unflatten(-1, (groups, dk)), k.unflatten(-1, (groups, dk)), v.unflatten(-1, (num_heads, dv)))
    if not mamba:
        return *shaped, -torch.linspace(0.01, 2, num_heads, device=DEVICE).expand(rows, -1), None, None
    ranges = (0.0, math.log(16.0)), (math.log(1e-3), math.log(1e-1))
    rates = (torch.linspace(*ends, num_heads, device=DEVICE) for ends in ranges)
    gates = mamba2_gates.reference(0.5 * torch.randn(rows, num_heads, device=DEVICE), *rates, (0.0, math.inf))
    return *shaped, *gates, torch.randn(num_heads, device=DEVICE)


@pytest.mark.parametrize("mamba", [True, False])
def test_chunks_equal_token_by_token(mamba: bool) -> None:
    """Outputs, the final state, and the states stored after 1, 2 and 64 tokens."""
    batch = make_batch([1, 66, 1, 70], [3, 0, 0, 5], num_decodes=1, checkpoints={1: {1: 7, 2: 8, 64: 9}})
    heads = (2, 4, 5, 3)
    inputs = [x if x is None else x.cpu() for x in rule_inputs(batch.num_tokens, heads, torch.float32, mamba)]
    state = torch.randn(13, 4, 5, 3)
    before = state.clone()
    got = chunk_linear_attention(*inputs, state, batch, backend=TORCH)
    for i, (begin, end) in enumerate(pairwise(batch.cu_seqlens_q.tolist())):
        if i == 0:
            assert (got[:end] == 0).all()
            continue
        slot = batch.state_slots[i : i + 1]
        scratch = before.clone()
        if int(batch.seq_lens[i]) == end - begin:
            scratch[slot] = 0.0
        for t in range(begin, end):
            row = [x if x is None or x.dim() == 1 else x[t : t + 1] for x in inputs]
            out = linear_attention_step_reference(*row, scratch, slot)
            torch.testing.assert_close(got[t : t + 1], out, atol=2e-5, rtol=2e-5)
            stored = {1: 7, 2: 8, 64: 9}.get(t + 1 - begin) if i == 1 else None
            if stored is not None:
                torch.testing.assert_close(state[stored], scratch[slot][0], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(state[slot], scratch[slot], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mamba", [True, False])
def test_chunked_kernels(heads: tuple[int, int, int, int], dtype: torch.dtype, mamba: bool) -> None:
    batch = mixed_batch()
    n, (_, num_heads, dk, dv) = batch.num_tokens, heads
    inputs = rule_inputs(n + 3, heads, dtype, mamba)
    poisoned(batch, *(inputs[:3] if not mamba else [x for x in inputs[:5] if x is not None]))
    before = torch.randn(13, num_heads, dk, dv, device=DEVICE)
    before[[3, 4]] = torch.nan  # sequences 2 and 3 start here: what their slots hold must not matter
    expected_state, state = before.clone(), before.clone()
    expected = chunk_linear_attention(*inputs, expected_state, batch, backend=TORCH)
    result = chunk_linear_attention(*inputs, state, batch, backend=TRITON)
    scale = expected[2:n].float().abs().mean().clamp(min=1.0)  # sums over K keys: as large as K is
    close(result[2:] / scale, expected[2:] / scale, dtype)
    assert (result[n:] == 0).all(), "padding rows must be zero"
    assert (result[:2] == 0).all(), "rows of decodes"
    close(state[3:12], expected_state[3:12], dtype)
    for slot in (0, 1, 2, 12):
        assert torch.equal(state[slot], before[slot]), f"slot {slot} was touched"


def geometry_of(heads: tuple[int, int, int, int], kernel: int, **more: bool) -> Mamba2Config:
    groups, num_heads, dk, dv = heads
    return Mamba2Config(num_heads, dv, dk, groups, kernel, dt_limit=(0.01, 2.0), **more)


def weights_of(geometry: Mamba2Config, bias: bool, dtype: torch.dtype) -> Mamba2Weights:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE)

    conv = (0.5 * random(geometry.conv_dim, geometry.conv_kernel)).to(dtype)
    heads = [random(geometry.num_heads) for _ in range(3)]
    norm = (1 + 0.2 * random(geometry.inner_size)).to(dtype) if geometry.norm else None
    return Mamba2Weights(conv, random(geometry.conv_dim).to(dtype) if bias else None, *heads, norm, 1e-5)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "state_dtype", "kernel", "norm", "norm_first"),
    [
        (torch.float32, torch.float32, 4, True, False),
        (torch.float32, torch.float32, 2, False, False),
        (torch.bfloat16, torch.bfloat16, 4, True, True),
    ],
)
def test_decode_step(
    heads: tuple[int, int, int, int],
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    kernel: int,
    norm: bool,
    norm_first: bool,
) -> None:
    """Everything between the projections; rows 1 and 4 are padding, once zero and once left as they are."""
    geometry = geometry_of(heads, kernel, norm=norm, norm_before_gate=norm_first)
    weights = weights_of(geometry, kernel == 4, dtype)
    slots = torch.tensor([3, 0, 1, 4, 0], dtype=torch.int32, device=DEVICE)
    wide = (0.5 * torch.randn(5, sum(geometry.part_sizes) + 8, device=DEVICE)).to(dtype)
    projected = wide[:, 8:]
    projected[[1, 4]] = torch.nan
    shape = (geometry.num_heads, geometry.state_size, geometry.head_dim)
    conv = torch.randn(6, geometry.conv_dim, kernel - 1, device=DEVICE).to(dtype)
    state = torch.randn(6, *shape, device=DEVICE).to(state_dtype)
    results = []
    for backend in (TORCH, TRITON):
        states = conv.clone(), state.clone()
        out = mamba2_decode(projected, weights, *states, slots, geometry, backend=backend)
        assert (out[[1, 4]] == 0).all()
        kept = torch.full_like(out, 7.0)
        mamba2_decode(projected, weights, conv.clone(), state.clone(), slots, geometry, backend=backend, out=kept)
        assert (kept[[1, 4]] == 7).all() and torch.equal(kept[[0, 2, 3]], out[[0, 2, 3]])
        results.append((out, *(x[1:] for x in states)))
    # The reference rounds between its steps where the kernels do not: compare with the scale of the values.
    scale = results[0][0].float().std()
    close(results[1][0] / scale, results[0][0] / scale, dtype)
    assert torch.equal(results[1][1], results[0][1])
    close(results[1][2], results[0][2], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lightning_step(dtype: torch.dtype) -> None:
    """Fixed decays, queries and keys of their own for every head; rows 1 and 4 are padding."""
    heads, size = (64, 128) if ON_GPU else (3, 20)
    qkv = torch.randn(5, 3, heads, size, device=DEVICE).to(dtype)
    qkv[[1, 4]] = torch.nan
    rates = -torch.linspace(0.01, 2, heads, device=DEVICE)
    slots = torch.tensor([3, 0, 1, 4, 0], dtype=torch.int32, device=DEVICE)
    state = torch.randn(6, heads, size, size, device=DEVICE)
    results = []
    for backend in (TORCH, TRITON):
        advanced = state.clone()
        out = lightning_attention_step(*qkv.unbind(1), rates, advanced, slots, backend=backend)
        kept = torch.full_like(out, 7.0)
        lightning_attention_step(*qkv.unbind(1), rates, state.clone(), slots, backend=backend, out=kept)
        assert (out[[1, 4]] == 0).all() and (kept[[1, 4]] == 7).all()
        assert torch.equal(kept[[0, 2, 3]], out[[0, 2, 3]])
        results.append((out, advanced[1:]))
    scale = results[0][0].float().std()
    close(results[1][0] / scale, results[0][0] / scale, dtype)
    close(results[1][1], results[0][1], torch.float32)


@pytest.mark.parametrize("keep", [False, True])
def test_tiles_of_a_step(keep: bool) -> None:
    """A program with all tiles of a head and programs with one tile each compute the same bits. The last tile is not
    full, and rows 1 and 4 are padding."""
    dk, dv, heads, width = (256, 104, 6, 64) if ON_GPU else (12, 20, 3, 16)
    q, k = (torch.randn(5, heads, dk, device=DEVICE).to(torch.bfloat16) for _ in range(2))
    v = torch.randn(5, heads, dv, device=DEVICE).to(torch.bfloat16)
    v[[1, 4]] = torch.nan
    rates, state = -torch.linspace(0.01, 2, heads, device=DEVICE), torch.randn(6, heads, dk, dv, device=DEVICE)
    slots = torch.tensor([3, 0, 1, 4, 0], dtype=torch.int32, device=DEVICE)
    results = []
    for tile in (StepTile(128, 8), *(StepTile(width, 4, split=split) for split in (False, True))):
        out, advanced = torch.full_like(v, 7.0), state.clone()
        got = linear_attention_step(q, k, v, rates, advanced, slots, out=out if keep else None, tile=tile)
        assert (got[[1, 4]] == (7 if keep else 0)).all()
        results.append((got, advanced[1:]))
    scale = results[0][0].float().std()
    close(results[1][0] / scale, results[0][0] / scale, torch.bfloat16)
    assert all(torch.equal(x, y) for x, y in zip(results[1], results[2], strict=True))
    close(results[2][1], results[0][1], torch.float32)


@pytest.mark.parametrize(
    ("dims", "heads", "tile"),
    [
        ((128, 64), 32, (64, 2, False)), ((128, 128), 64, (64, 2, True)), ((128, 128), 512, (64, 2, False)),
        ((256, 64), 32, (64, 4, False)), ((256, 128), 264, (64, 4, True)), ((256, 128), 265, (64, 4, False)),
        ((20, 24), 4, (32, 2, False)),
    ],
)  # fmt: skip
def test_tiles_of_few_heads_have_programs_of_their_own(
    dims: tuple[int, int], heads: int, tile: tuple[int, int, bool]
) -> None:
    assert choose_step_tile(*dims, heads) == tile


def test_gates_kernel_keeps_the_limits() -> None:
    wide = torch.randn(37, 20, device=DEVICE) * 4
    a_log, bias = torch.randn(7, device=DEVICE), torch.randn(7, device=DEVICE)
    for limit in ((0.0, math.inf), (0.1, 0.7)):
        expected = mamba2_gates(wide[:, 5:12], a_log, bias, limit, backend=TORCH)
        got = mamba2_gates(wide[:, 5:12], a_log, bias, limit, backend=TRITON)
        assert limit[0] <= got[1].min() and got[1].max() <= limit[1]
        for x, y in zip(got, expected, strict=True):
            close(x, y, torch.float32)


@pytest.mark.parametrize(("weight", "first"), [(True, False), (True, True), (False, False)])
def test_group_norm_kernel(weight: bool, first: bool) -> None:
    x, wide = torch.randn(9, 90, device=DEVICE), torch.randn(9, 100, device=DEVICE)
    w = torch.randn(90, device=DEVICE) if weight else None
    results = [
        gated_group_norm(x, wide[:, 4:94], w, 1e-5, 3, norm_before_gate=first, backend=backend)
        for backend in (TORCH, TRITON)
    ]
    close(results[1], results[0], torch.float32)
    assert results[0][:, :30].std() > 0.1


def test_a_group_is_normalised_on_its_own() -> None:
    """Scaling one group's channels changes nothing in another one's."""
    x, gate, weight = torch.randn(4, 12), torch.randn(4, 12), torch.rand(12)
    one = gated_group_norm(x, gate, weight, 1e-6, 3, backend=TORCH)
    scaled = torch.cat([x[:, :4] * 100, x[:, 4:]], dim=1)
    other = gated_group_norm(scaled, gate, weight, 1e-6, 3, backend=TORCH)
    torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("rows", "columns", "tile"), [(64, 64, (32, 4, 3)), (64, 128, (64, 4, 3)), (256, 128, (64, 4, 2))]
)
def test_tiles_are_the_widest_that_leave_no_multiprocessor_idle(rows: int, columns: int, tile: tuple[int, ...]) -> None:
    """One prompt of Mamba-2, one and four of lightning attention."""
    from weft.ops.linear_attention.prefill import choose_tile

    assert choose_tile(rows, 128, columns, torch.bfloat16) == tile
