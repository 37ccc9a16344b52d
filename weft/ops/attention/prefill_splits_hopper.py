"""Prefill attention of few rows behind many keys, for Hopper: several programs share the keys of a block.

Job: give each program of ``prefill_hopper.py`` a block and a part of its keys, and merge the sums of all parts.
Owns: the layout of sums, and how many programs share a block. Does not know: how sums are computed.

Blocks and keys are counted on the device, so a captured graph gives its programs to whatever sequences are there. A
program sees its part of the keys as if the sequence began with them. Positions of rows may be negative then: such rows
see no key. A block with few keys has one part. Its program writes the output, and nothing is merged.
"""

import functools

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from weft.ops.attention import AttentionCall
from weft.ops.attention.hopper_tiles import count_blocks, place_of_block
from weft.ops.attention.tiles import METADATA
from weft.ops.triton.early_launch import early_launch, release, wait
from weft.ops.triton.hopper import GluonKernel

_MOST_PARTS = gl.constexpr(16)
_LEAST_TILES = gl.constexpr(4)
"""Parts of a block at most, and tiles of a part at least."""

_MERGE_PROGRAMS, _ROWS = 4, gl.constexpr(4)
"""Programs that merge a block, and rows of a program at a time, one for each warp. All programs find room at once, two
on a multiprocessor. A second round would begin to look for work when attention is over."""


@gluon.jit
def share_of_block(program, cu_seqlens_q, counts, num_rows, num_seqs, programs, TOKENS: gl.constexpr):
    """The block of a program, the part that it has, how many parts a block may have, so that all together have at most
    ``programs``, and how many blocks there are. Arguments as of ``place_of_block``."""
    _first_seq, _first_token, _num_seqs, total, blocks = count_blocks(cu_seqlens_q, counts, num_seqs, TOKENS)
    blocks += gl.maximum(num_rows - total + TOKENS - 1, 0) // TOKENS  # of padding
    blocks = gl.maximum(blocks, 1)
    most = gl.minimum(gl.maximum(programs // blocks, 1), _MOST_PARTS)
    return program % blocks, program // blocks, most, blocks


@gluon.jit
def _parts_of(keys, most, KEYS: gl.constexpr):
    """How many parts ``keys`` keys have, and how many tiles a part."""
    tiles = gl.maximum((keys + KEYS - 1) // KEYS, 1)
    parts = gl.minimum(gl.maximum(tiles // _LEAST_TILES, 1), most)
    each = (tiles + parts - 1) // parts
    return (tiles + each - 1) // each, each


@gluon.jit
def own_part(place, table, part, most, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr):
    """``place`` and pages of a block as of the keys of one part, and the number of parts. A part that the block does
    not have is without keys; the first one has the rows of padding."""
    row, num_tokens, num_padding, position, keys = place
    parts, each = _parts_of(keys, most, KEYS)
    first = part * each * KEYS
    if part > 0:
        num_padding = 0
    own = gl.minimum(keys - first, each * KEYS)
    return (row, num_tokens, num_padding, position - first, own), table + first // PAGE_SIZE, parts


@gluon.jit
def store_part(
    acc, row_max, row_sum, parts, num_tokens, scale_log2,
    SHARED: gl.constexpr, FIRST: gl.constexpr, GROUP: gl.constexpr, VALUE: gl.constexpr, V_DIM: gl.constexpr,
    OUT: gl.constexpr,
):  # fmt: skip
    """Store a consumer's 64 rows, if their block has several parts: means of values, and logarithms of the sums of
    weights. A row that sees no key weighs nothing."""
    means, logs, _part, num_parts = parts
    lanes = gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    columns = gl.arange(0, V_DIM, layout=gl.SliceLayout(0, OUT))
    block_rows: gl.constexpr = (1 if SHARED else 2) * (64 // GROUP) * GROUP
    program = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
    rows = program.to(gl.int64) * block_rows + FIRST * GROUP + lanes
    mask = (lanes < 64 // GROUP * GROUP) & (FIRST + lanes // GROUP < num_tokens) & (num_parts > 1)
    mean = acc / gl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
    gl.store(means + rows[:, None] * VALUE + columns[None, :], mean, mask=mask[:, None] & (columns < VALUE)[None, :])
    gl.store(logs + rows, row_max * scale_log2 + gl.log2(row_sum), mask=mask)


@functools.partial(
    GluonKernel,
    do_not_specialize=["num_rows", "num_seqs", "least_tokens", "programs", "stride_table"],
    do_not_specialize_on_alignment=METADATA,
)
def _merge_parts_kernel(
    means, logs, page_table, seq_lens, cu_seqlens_q, v_scale, out, counts, num_rows, num_seqs, least_tokens, programs,
    stride_out, stride_table,
    VALUE: gl.constexpr, V_DIM: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr, KEYS: gl.constexpr,
    SCALED: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Merge rows of one block and key head, if the block has several parts."""
    release(EARLY)
    kv_head, num_kv_heads = gl.program_id(0), gl.num_programs(0)
    block, part, most, blocks = share_of_block(
        gl.program_id(1), cu_seqlens_q, counts, num_rows, num_seqs, programs, TOKENS
    )  # fmt: skip
    place, _table = place_of_block(
        block, page_table, seq_lens, cu_seqlens_q, counts, num_rows, num_seqs, least_tokens, stride_table, TOKENS
    )
    row, num_tokens, _num_padding, _position, keys = place
    parts, _each = _parts_of(keys, most, KEYS)
    wait(EARLY)
    if (part == 0) & (parts > 1):
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, V_DIM // 32], [1, 32], [4, 1], [1, 0])
        columns = gl.arange(0, V_DIM, layout=gl.SliceLayout(0, LAYOUT))
        for first in range(gl.program_id(2) * _ROWS, num_tokens * GROUP, gl.num_programs(2) * _ROWS):
            lanes = first + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, LAYOUT))
            inside = lanes < num_tokens * GROUP
            mask = inside[:, None] & (columns < VALUE)[None, :]
            loaded = ()
            largest = gl.full([_ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, LAYOUT))
            for i in gl.static_range(_MOST_PARTS):
                rows = ((i * blocks + block) * num_kv_heads + kv_head).to(gl.int64) * (TOKENS * GROUP) + lanes
                log = gl.load(logs + rows, mask=inside & (i < parts), other=float("-inf"))
                places = rows[:, None] * VALUE + columns[None, :]
                loaded = loaded + ((log, gl.load(means + places, mask=mask & (i < parts), other=0.0)),)  # type: ignore[assignment]  # noqa: RUF005
                largest = gl.maximum(largest, log)
            largest = gl.where(inside, largest, 0.0)
            weights = gl.full([_ROWS], 0.0, gl.float32, layout=gl.SliceLayout(1, LAYOUT))
            acc = gl.full([_ROWS, V_DIM], 0.0, gl.float32, layout=LAYOUT)
            for i in gl.static_range(_MOST_PARTS):
                weight = gl.exp2(loaded[i][0] - largest)
                weights += weight
                acc += loaded[i][1] * weight[:, None]
            result = acc / gl.where(inside, weights, 1.0)[:, None]
            if SCALED:
                result *= gl.load(v_scale)
            tokens = (row + lanes // GROUP).to(gl.int64)
            heads = kv_head * GROUP + lanes % GROUP
            p_out = out + (tokens * stride_out + heads * VALUE)[:, None] + columns[None, :]
            gl.store(p_out, result.to(gl.bfloat16), mask=mask)


def merge_parts(
    call: AttentionCall, sums: tuple[Tensor, Tensor], metadata: tuple[Tensor, int, int], programs: int,
    tile: tuple[int, int, int],
) -> None:  # fmt: skip
    """Merge what the programs of ``prefill_hopper.py`` have left in ``sums``.

    Args:
        metadata: counts, number of sequences and least tokens, as of that launch.
        programs: see ``share_of_block``. At most half as many blocks have parts.
        tile: columns of a tile of values, tokens of a block, and keys of a tile.
    """
    q, _, v_cache, batch, _, out, _, v_scale, _ = call
    kv_heads, value_dim = v_cache.shape[2:]
    (counts, num_seqs, least_tokens), (v_dim, tokens, keys) = metadata, tile
    _merge_parts_kernel[(kv_heads, programs // 2, _MERGE_PROGRAMS)](
        *sums, batch.page_table, batch.seq_lens, batch.cu_seqlens_q, q if v_scale is None else v_scale, out, counts,
        q.shape[0], num_seqs, least_tokens, programs, out.stride(0), batch.page_table.stride(0),
        VALUE=value_dim, V_DIM=v_dim, GROUP=q.shape[1] // kv_heads, TOKENS=tokens, KEYS=keys,
        SCALED=v_scale is not None, num_warps=4, **early_launch(q.device),
    )  # fmt: skip
