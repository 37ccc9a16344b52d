"""Bugs to plant in prefill attention, groups of experts, and tiles of FP8 products."""

from __future__ import annotations

from tests.mutation.mutant import mutant

ATTENTION = "tests/ops/attention/test_gluon_attention.py"
PARTS = "weft/ops/attention/prefill_splits_hopper.py"
HEADS_AND_SCALES = (
    mutant(
        "blocks-of-broken-tokens", "a block has whole tokens of a group", "weft/ops/attention/prefill_hopper.py",
        "= (1 if SHARED else 2) * (64 // GROUP)\n    block", "= (64 if SHARED else 128) // GROUP\n    block", ATTENTION,
    ),
    mutant(
        "heads-as-wide-as-tiles", "a head's columns are its own", "weft/ops/attention/hopper_tiles.py",
        "stride + heads * DIM)[:, None]", "stride + heads * HEAD_DIM)[:, None]", ATTENTION,
    ),
    mutant(
        "columns-of-the-next-head", "nobody stores what a tile has beyond a head",
        "weft/ops/attention/hopper_tiles.py", "    if DIM < HEAD_DIM:\n", "    if False:\n", ATTENTION,
    ),
    mutant(
        "short-sequences-in-broken-blocks", "groups that leave rows empty need longer sequences",
        "weft/ops/attention/paged.py", "(1 if hopper.fills_blocks(group) else 2)", "1", ATTENTION,
    ),
    mutant(
        "parts-see-all-keys", "a row sees the keys up to its own", PARTS, "num_padding, position - first, own)",
        "num_padding, position, own)", ATTENTION,
    ),
    mutant(
        "parts-of-the-first-pages", "a part has its own keys", PARTS, "table + first // PAGE_SIZE", "table", ATTENTION
    ),
    mutant(
        "parts-without-their-weights", "parts weigh by the sums of their weights", PARTS,
        "row_max * scale_log2 + gl.log2(row_sum)", "row_max * scale_log2", ATTENTION,
    ),
    mutant(
        "sinks-in-every-part", "a sink counts once", "weft/ops/attention/prefill_hopper.py",
        "gl.where(part == 0, score, row_max)", "score", ATTENTION,
    ),
    mutant(
        "rows-without-a-key", "a row may see no key of a part", PARTS,
        "acc / gl.where(row_sum > 0.0, row_sum, 1.0)[:, None]", "acc / row_sum[:, None]", ATTENTION,
    ),
    mutant(
        "parts-of-other-blocks", "a block's parts are merged", PARTS, "(i * blocks + block) * num_kv_heads",
        "(i + block * parts) * num_kv_heads", ATTENTION,
    ),
    mutant(
        "parts-in-a-fixed-order", "a row's sums do not depend on free programs", "weft/ops/attention/prefill_hopper.py",
        "1 if fixed else MULTIPROCESSORS // num_kv_heads", "MULTIPROCESSORS // num_kv_heads", ATTENTION,
    ),
    mutant(
        "context-unknown", "short sequences behind a context go to Hopper", "weft/ops/attention/paged.py",
        "if has_context or head_dim > 128:", "if head_dim > 128:", ATTENTION,
    ),
    mutant(
        "groups-with-gaps", "groups of experts need not be powers of two", "weft/ops/moe/router.py",
        "if GROUP_PLACES > GROUP_SIZE and", "if False and", "tests/ops/moe/test_triton_moe.py",
    ),
    mutant(
        "groups-by-their-best", "a group counts by its two best experts", "weft/ops/moe/router.py",
        "    if SIZE > 1:\n        is_best", "    if False:\n        is_best", "tests/ops/moe/test_triton_moe.py",
    ),
    mutant(
        "ungated-states", "a convolution's state holds gated inputs", "weft/ops/convolution/prefill.py",
        "value = _input(x, token, stride_x, channels, mask & (token >= begin), FIXED).to(tl.float32)",
        "value = tl.load(x + token * stride_x + channels, mask=mask & (token >= begin), other=0.0).to(tl.float32)",
        "tests/ops/convolution/test_short_conv.py",
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
