"""Bugs to plant in prefill attention of odd heads and groups, and tiles of FP8 products."""

from __future__ import annotations

from tests.mutation.mutant import mutant

ATTENTION = "tests/ops/attention/test_gluon_attention.py"
HEADS_AND_SCALES = (
    mutant(
        "blocks-of-broken-tokens", "a block has whole tokens of a group", "weft/ops/attention/prefill_hopper.py",
        "        (1 if SHARED else 2) * (64 // GROUP),\n", "        (64 if SHARED else 128) // GROUP,\n", ATTENTION,
    ),
    mutant(
        "heads-as-wide-as-tiles", "a head's columns are its own", "weft/ops/attention/prefill_hopper.py",
        "stride + heads * DIM)[:, None]", "stride + heads * HEAD_DIM)[:, None]", ATTENTION,
    ),
    mutant(
        "columns-of-the-next-head", "nobody stores what a tile has beyond a head",
        "weft/ops/attention/prefill_hopper.py", "    if DIM < HEAD_DIM:\n", "    if False:\n", ATTENTION,
    ),
    mutant(
        "short-sequences-in-broken-blocks", "groups that leave rows empty need longer sequences",
        "weft/ops/attention/paged.py", "if hopper.fills_blocks(group) else 2 * _HOPPER_ROWS_EACH",
        "if hopper.fills_blocks(group) else _HOPPER_ROWS_EACH", ATTENTION,
    ),
    mutant(
        "latents-64-keys-everywhere", "tiles of latents fit in shared memory", "weft/ops/attention/latent.py",
        "and needed <= shared_bytes(q.device)", "and needed > 0", "tests/ops/delta_rule/test_kimi.py",
    ),
    mutant(
        "fixed-sums-of-64-keys", "a fixed order of sums has one tile", "weft/ops/attention/latent.py",
        "many_keys=many and not fixed", "many_keys=many", "tests/ops/delta_rule/test_kimi.py",
    ),
    mutant(
        "static-pass-never", "a pass quantises many rows once", "weft/ops/linear/fp8_few_rows.py",
        "return tokens <= _OWN_GROUP_TOKENS and rows * inner <= limit", "return True",
        "tests/ops/linear/test_triton_fp8.py",
    ),
    mutant(
        "static-limit-of-few", "up to eight rows have the smaller limit", "weft/ops/linear/fp8_few_rows.py",
        "limit = _OWN_WEIGHT if tokens <= 8 else _OWN_STATIC_WEIGHT", "limit = _OWN_STATIC_WEIGHT",
        "tests/ops/linear/test_triton_fp8.py",
    ),
    mutant(
        "no-tiles-of-columns", "narrow experts go through several tiles of columns", "weft/ops/moe/fp8_experts.py",
        "8 if width <= _NARROW else 1", "1", "tests/ops/moe/test_triton_fp8_moe.py",
    ),
)  # fmt: skip
