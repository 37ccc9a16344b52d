"""The gated delta rule against a token-by-token oracle and transformers' functions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from tests.ops.oracles import make_batch, naive_gated_delta_rule
from weft.ops.backend import Backend
from weft.ops.delta_rule import chunk_gated_delta_rule, gdn_gates, recurrent_gated_delta_rule_reference

TORCH = Backend.TORCH
# Strong decays sum to hundreds within a chunk, so float32 differences of the sums are good to a few 1e-6.
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


def inputs(num_tokens: int, hk: int = 2, hv: int = 4, dk: int = 8, dv: int = 6, seed: int = 0) -> list[Tensor]:
    """q, k, v, g, beta; the decays run from none to nearly everything."""
    gen = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(num_tokens, hk, dk, generator=gen) * 3 for _ in range(2))
    v = torch.randn(num_tokens, hv, dv, generator=gen)
    a, b = (torch.randn(num_tokens, hv, generator=gen) * 2 for _ in range(2))
    g, beta = gdn_gates.reference(a, b, torch.linspace(-6.0, 2.0, hv), torch.linspace(-1.0, 1.0, hv))
    return [q, k, v, g, beta]


def for_transformers(x: list[Tensor]) -> list[Tensor]:
    """The same inputs with a key head for each value head: not every version of transformers repeats them itself."""
    q, k, v, g, beta = x
    q, k = (t.repeat_interleave(v.shape[1] // t.shape[1], dim=1) for t in (q, k))
    return [q, k, v, g, beta]


def states(num_slots: int, hv: int = 4, dk: int = 8, dv: int = 6) -> Tensor:
    return torch.randn(num_slots, hv, dk, dv, generator=torch.Generator().manual_seed(7))


def test_gates_are_transformers_formula() -> None:
    a, b = torch.randn(2, 5, 3).bfloat16()
    a_log, dt_bias = torch.randn(3), torch.randn(3)
    g, beta = gdn_gates.reference(a, b, a_log, dt_bias)
    torch.testing.assert_close(g, -a_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias))
    torch.testing.assert_close(beta, b.float().sigmoid())
    assert g.dtype == beta.dtype == torch.float32


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 130, 210])
@pytest.mark.parametrize("heads", [(2, 4), (3, 3), (1, 5)])
def test_chunked_equals_oracle_and_transformers(num_tokens: int, heads: tuple[int, int]) -> None:
    hk, hv = heads
    x = inputs(num_tokens, hk, hv)
    state = states(3, hv).fill_(torch.nan)
    out = chunk_gated_delta_rule(*x, state, make_batch([num_tokens], [0]), backend=TORCH)
    expected, after = naive_gated_delta_rule(*(t.double() for t in x), torch.zeros(hv, 8, 6, dtype=torch.double))
    torch.testing.assert_close(out.double(), expected, **TOLERANCE)
    torch.testing.assert_close(state[1].double(), after[-1], **TOLERANCE)
    theirs, their_state = torch_chunk_gated_delta_rule(
        *(t[None] for t in for_transformers(x)), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(out, theirs[0], **TOLERANCE)
    torch.testing.assert_close(state[1], their_state[0], **TOLERANCE)
    assert state[2].isnan().all(), "another slot was touched"


def test_mixed_batch_with_padding_and_poison() -> None:
    query_lens, contexts = [1, 1, 70, 1, 200, 5], [9, 3, 0, 0, 33, 7]
    batch = make_batch(query_lens, contexts, num_decodes=2, pad_tokens=11, pad_seqs=3, pad_chunks=2)
    x = inputs(batch.num_tokens + 11)
    for t in x:
        t[batch.num_tokens :] = torch.nan
    state = states(7)
    state[[3, 4]] = torch.nan  # sequences 2 and 3 start here: what their slots hold must not matter
    before = state.clone()
    out = chunk_gated_delta_rule(*x, state, batch, backend=TORCH)
    assert (out[batch.num_tokens :] == 0).all()
    assert (out[:2] == 0).all(), "decode rows belong to the recurrent step"
    assert torch.equal(state[:3], before[:3]), "slots of decode rows and padding were touched"
    starts = batch.cu_seqlens_q.tolist()
    for s in range(2, 6):
        rows = slice(starts[s], starts[s + 1])
        initial = before[s + 1].double() if contexts[s] else torch.zeros(4, 8, 6, dtype=torch.double)
        expected, after = naive_gated_delta_rule(*(t[rows].double() for t in x), initial)
        torch.testing.assert_close(out[rows].double(), expected, **TOLERANCE)
        torch.testing.assert_close(state[s + 1].double(), after[-1], **TOLERANCE)


def test_without_out_all_other_rows_are_zero() -> None:
    batch = make_batch([1, 3], [4, 0], num_decodes=1, pad_tokens=2)
    out = chunk_gated_delta_rule(*inputs(6), states(3), batch, backend=TORCH)
    assert (out[[0, 4, 5]] == 0).all()
    assert (out[1:4] != 0).any()


def test_batch_of_decodes_only_is_left_alone() -> None:
    state = states(3)
    out = chunk_gated_delta_rule(*inputs(2), state.clone(), make_batch([1, 1], [4, 5], num_decodes=2), backend=TORCH)
    assert (out == 0).all()


@pytest.mark.parametrize("position", [1, 63, 64, 65, 100, 192, 209, 210])
def test_checkpoint_holds_the_state_after_exactly_that_many_tokens(position: int) -> None:
    x, state = inputs(210), states(12)
    batch = make_batch([210], [0], checkpoints={0: {position: 9}})
    chunk_gated_delta_rule(*x, state, batch, backend=TORCH)
    _, after = naive_gated_delta_rule(*(t.double() for t in x), torch.zeros(4, 8, 6, dtype=torch.double))
    torch.testing.assert_close(state[9].double(), after[position - 1], **TOLERANCE)
    alone = states(12)
    chunk_gated_delta_rule(*(t[:position] for t in x), alone, make_batch([position], [0]), backend=TORCH)
    assert torch.equal(state[9], alone[1]), "a run that stops there has the same chunk grid, so the same bits"


def test_checkpoints_of_several_sequences() -> None:
    checkpoints = {0: {3: 5, 50: 6}, 1: {64: 7, 65: 8, 130: 9}, 2: {1: 10}}
    batch = make_batch([50, 130, 1], [0, 12, 0], checkpoints=checkpoints)
    x, state = inputs(181), states(11)
    before = state.clone()
    chunk_gated_delta_rule(*x, state, batch, backend=TORCH)
    starts = batch.cu_seqlens_q.tolist()
    for s, stored in checkpoints.items():
        rows = slice(starts[s], starts[s + 1])
        initial = before[s + 1].double() * (s == 1)
        _, after = naive_gated_delta_rule(*(t[rows].double() for t in x), initial)
        for position, slot in stored.items():
            torch.testing.assert_close(state[slot].double(), after[position - 1], **TOLERANCE)


def test_cutting_a_prompt_anywhere_changes_nothing() -> None:
    x, whole, parts = inputs(150), states(2), states(2)
    expected = chunk_gated_delta_rule(*x, whole, make_batch([150], [0]), backend=TORCH)
    pieces, begin = [], 0
    for length in (1, 63, 64, 22):
        piece = [t[begin : begin + length] for t in x]
        pieces.append(chunk_gated_delta_rule(*piece, parts, make_batch([length], [begin]), backend=TORCH))
        begin += length
    torch.testing.assert_close(torch.cat(pieces), expected, **TOLERANCE)
    torch.testing.assert_close(parts[1], whole[1], **TOLERANCE)


@pytest.mark.parametrize("heads", [(2, 4), (3, 3), (1, 5)])
def test_recurrent_step_equals_oracle_and_transformers(heads: tuple[int, int]) -> None:
    hk, hv = heads
    x, state = inputs(5, hk, hv), states(8, hv)
    before, slots = state.clone(), torch.tensor([3, 7, 1, 0, 0], dtype=torch.int32)
    out = recurrent_gated_delta_rule_reference(*x, state, slots)
    theirs, their_state = torch_recurrent_gated_delta_rule(
        *(t[:, None] for t in for_transformers(x)),
        initial_state=before[slots.long()],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(out, theirs[:, 0], **TOLERANCE)
    for row, slot in enumerate([3, 7, 1]):
        expected, after = naive_gated_delta_rule(*(t[row : row + 1].double() for t in x), before[slot].double())
        torch.testing.assert_close(out[row].double(), expected[0], **TOLERANCE)
        torch.testing.assert_close(state[slot].double(), after[0], **TOLERANCE)
        torch.testing.assert_close(state[slot], their_state[row], **TOLERANCE)
    untouched = [2, 4, 5, 6]
    assert torch.equal(state[untouched], before[untouched])


def test_bfloat16_state_is_rounded_at_the_store_only() -> None:
    x, state32 = inputs(40), states(3).bfloat16().float()
    state16 = state32.bfloat16()
    batch = make_batch([40], [8])
    out32 = chunk_gated_delta_rule(*x, state32, batch, backend=TORCH)
    out16 = chunk_gated_delta_rule(*x, state16, batch, backend=TORCH)
    assert torch.equal(out32, out16)
    assert torch.equal(state16, state32.bfloat16())
    step = [t[:1] for t in x]
    slots = torch.tensor([1])
    state32 = state16.float()
    out32 = recurrent_gated_delta_rule_reference(*step, state32, slots)
    out16 = recurrent_gated_delta_rule_reference(*step, state16, slots)
    assert torch.equal(out32, out16)
    assert torch.equal(state16, state32.bfloat16())


def test_bfloat16_inputs_are_computed_in_float32() -> None:
    x = [t.bfloat16() for t in inputs(70)[:3]] + inputs(70)[3:]
    batch, state16, state32 = make_batch([70], [0]), states(2), states(2)
    out16 = chunk_gated_delta_rule(*x, state16, batch, backend=TORCH)
    out32 = chunk_gated_delta_rule(*(t.float() for t in x), state32, batch, backend=TORCH)
    assert out16.dtype == torch.bfloat16
    assert torch.equal(out16, out32.bfloat16())
    assert torch.equal(state16, state32)
