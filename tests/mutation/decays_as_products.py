"""Bugs to plant in the kernel for chunks of Kimi Delta Attention on Hopper, and in its choice."""

from __future__ import annotations

from tests.mutation.mutant import mutant

KERNEL, TESTS = "weft/ops/delta_rule/kda_prepare_hopper.py", "tests/ops/delta_rule/test_gluon_kda.py"
DECAYS_AS_PRODUCTS = (
    mutant(
        "decays-of-the-own-group-twice", "decays between groups leave out a token's own group", KERNEL,
        "gl.where(is_second, boundary, group + 1)", "gl.where(is_second, boundary, group)", TESTS,
    ),
    mutant(
        "decays-to-the-end-with-the-own-group", "the decay to a chunk's end begins behind a group", KERNEL,
        "_total(totals, group + 1, _GROUPS)", "_total(totals, group, _GROUPS)", TESTS,
    ),
    mutant(
        "decay-of-the-first-group", "a chunk's decay is that of all its groups", KERNEL,
        "is_last = (group == _GROUPS - 1)", "is_last = (group == 0)", TESTS,
    ),
    mutant(
        "decays-of-padding", "tokens behind a chunk forget nothing", KERNEL,
        "there = (group * _ROWS + r < length) & (channels >= 0)", "there = (r >= 0) & (group >= 0) & (channels >= 0)",
        TESTS,
    ),
    mutant(
        "beta-of-padding", "write strengths behind a chunk are not read", KERNEL,
        "mask=of_keys & (i < length)", "mask=of_keys", TESTS,
    ),
    mutant(
        "beta-by-place", "a row is multiplied by its own token's write strength", KERNEL,
        "p_beta + i * HEADS", "p_beta + place * HEADS", TESTS,
    ),
    mutant(
        "attention-without-scale", "attention is scaled, the system is not", KERNEL,
        "gl.where(of_keys, factor, _SCALE)", "gl.where(of_keys, factor, 1.0)", TESTS,
    ),
    mutant(
        "squares-without-zeros", "squares are zero above their diagonals", KERNEL,
        "        _store_zeros(p_system, p_attention)\n", "", TESTS,
    ),
    mutant(
        "queries-by-the-keys-rows", "queries and keys lie in rows of their own", KERNEL,
        "q + start * stride_q + (at * stride_q", "q + start * stride_k + (at * stride_k", TESTS,
    ),
    mutant(
        "own-effect-of-long-queries", "a token's effect on itself is of unit vectors", KERNEL,
        "(q_norm * k_norm)", "k_norm", TESTS,
    ),
    mutant(
        "keys-to-the-start", "keys for the state decay to the chunk's end", KERNEL,
        "_to(a, behind, 0, _ROWS)", "_from(a, before, 0, _ROWS)", TESTS,
    ),
    mutant(
        "second-halves-first", "second halves meet keys of first halves", KERNEL,
        "gl.permute(halves, (1, 4, 0, 2, 3))", "gl.permute(halves, (4, 1, 0, 2, 3))", TESTS,
    ),
    mutant(
        "chunks-in-float16", "the kernel is for bfloat16", KERNEL,
        "q.dtype == k.dtype == torch.bfloat16", "q.dtype == k.dtype", TESTS,
    ),
    mutant(
        "chunks-of-heads-of-64", "the kernel is for heads of 128", KERNEL, " and k.shape[2] == _K.value", "", TESTS,
    ),
)  # fmt: skip
