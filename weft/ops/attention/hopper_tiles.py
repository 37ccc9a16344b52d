"""Parts of prefill programs on Hopper, in Gluon: the work of the copy engine and of four warps on one tile.

Job: the parts below ``prefill_hopper.py``. Owns: the layout of tiles in shared memory, the arithmetic of a tile, and
which block of which sequence a program has. Does not know: the order of tiles, who waits for whom.

In shared memory a tile ``[keys, head_dim]`` consists of *boxes* of one page and 64 dims, since 128 bytes are the widest
swizzled row. All pages of dims 0 to 63 come first, then all pages of the next 64. The matrix units read this layout,
and the copy engine fetches a box at a time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from weft.ops.attention.tiles import sequence_of_block
from weft.ops.triton.gluon import async_load, reinterpret, thread_barrier
from weft.ops.triton.hopper import BOX


@gluon.jit
def fetch(desc, tile, ready, slots, column, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Order one tile from the copy engine: pages that begin at the given slots, from the given column of the cache."""
    PAGES: gl.constexpr = KEYS // PAGE_SIZE
    mbarrier.expect(ready, KEYS * HEAD_DIM * 2)
    for p in gl.static_range(PAGES):
        for panel in gl.static_range(HEAD_DIM // 64):
            box = tile.slice((panel * PAGES + p) * PAGE_SIZE, PAGE_SIZE, dim=0)
            async_load(desc, [slots[p], column + panel * 64], ready, box)


@gluon.jit
def widen(narrow, tile, LAYOUT: gl.constexpr, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Copy a tile of e4m3 into one of float16, which holds all its numbers, for the matrix units to read."""
    for first in gl.static_range(0, KEYS * HEAD_DIM // 64, 64):
        numbers = narrow.slice(first, 64, dim=0).load(LAYOUT)
        tile.slice(first, 64, dim=0).store(numbers.to(gl.float16))
    hopper.fence_async_shared()  # the matrix units read by another path than stores take
    thread_barrier()


@gluon.jit
def wait_tile(ring, n, STAGES: gl.constexpr):
    """Wait until the barrier of tile ``n`` has completed the phase of that tile."""
    mbarrier.wait(ring.index(n % STAGES), n // STAGES & 1)


@gluon.jit
def start_scores(queries, tile, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, SCORES: gl.constexpr):
    """Start ``queries @ keys^T``."""
    k = reinterpret(tile, tile.dtype, [KEYS, HEAD_DIM], BOX)
    zeros = gl.full([64, KEYS], 0.0, gl.float32, layout=SCORES)
    return hopper.warpgroup_mma(queries, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def softmax(scores, row_max, row_sum, scale_log2):
    """Compute one step of the online softmax: weights, maximum, sum, and what earlier weights have to be multiplied
    by."""
    new_max = gl.maximum(row_max, gl.max(scores, 1))
    shift = new_max * scale_log2
    shrink = gl.exp2(row_max * scale_log2 - shift)
    p = gl.exp2(scores * scale_log2 - shift[:, None])
    return p, new_max, row_sum * shrink + gl.sum(p, 1), shrink


@gluon.jit
def start_values(acc, p, tile, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, OUT: gl.constexpr):
    """Start ``acc + p @ values``. Until here ``p`` is float32: carried in 16 bits it would be repacked each step."""
    weights = gl.convert_layout(p.to(tile.dtype), gl.DotOperandLayout(0, OUT, 2))
    v = reinterpret(tile, tile.dtype, [KEYS, HEAD_DIM], BOX)
    return hopper.warpgroup_mma(weights, v, acc, is_async=True)


@gluon.jit
def zero_unwritten(tile, keys, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Zero the last page's values from ``keys`` on. Slots that nobody has written may hold NaN, and the product weighs
    them with 0. Both consumers do this: the same bits, so neither has to wait for the other."""
    PAGES: gl.constexpr = KEYS // PAGE_SIZE
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    written = keys % PAGE_SIZE
    if written > 0:
        boxes = reinterpret(tile, tile.dtype, [HEAD_DIM // 64 * PAGES, PAGE_SIZE, 64], BOX)
        kept = gl.arange(0, PAGE_SIZE, layout=gl.SliceLayout(1, LAYOUT)) < written
        for panel in gl.static_range(HEAD_DIM // 64):
            box = boxes.index(panel * PAGES + keys % KEYS // PAGE_SIZE)
            box.store(gl.where(kept[:, None], box.load(LAYOUT), 0.0))
        hopper.fence_async_shared()  # the matrix units read by another path than stores take
        thread_barrier()


@gluon.jit
def count_blocks(cu_seqlens_q, counts, num_seqs, TOKENS: gl.constexpr):
    """The first sequence that prefills and its first token, the numbers of sequences and of tokens, and how many blocks
    the prefilling sequences have. ``num_seqs`` and ``counts``: see ``place_of_block``."""
    first_seq = 0
    first_token = 0
    if num_seqs < 0:
        first_token = gl.load(counts + 2)
        first_seq = first_token
        num_seqs = gl.load(counts + 1)
    total = gl.load(cu_seqlens_q + num_seqs)
    blocks = (total - first_token) // TOKENS + num_seqs - first_seq
    return first_seq, first_token, num_seqs, total, blocks


@gluon.jit
def place_of_block(
    block, page_table, seq_lens, cu_seqlens_q, counts, num_rows, num_seqs, least_tokens, stride_table,
    TOKENS: gl.constexpr,
):  # fmt: skip
    """Find a block.

    Returns the first row, the number of tokens, and the number of padding rows (one of the two is 0 or less). Then the
    position of the first token, the number of keys, and the pages of the sequence.

    Sequences with fewer than ``least_tokens`` query tokens have none; nor, if ``num_seqs`` is negative, those that
    ``counts`` says decode."""
    first_seq, first_token, num_seqs, total, blocks = count_blocks(cu_seqlens_q, counts, num_seqs, TOKENS)
    beyond = block - blocks  # a graph's blocks without a sequence go last: each takes a multiprocessor for a while
    if beyond < 0:
        block = -1 - beyond  # the last blocks of a sequence see most keys: they go first
    row = total + beyond * TOKENS
    num_padding = gl.minimum(num_rows - row, TOKENS)
    num_tokens = 0
    position = 0
    keys = 0
    if beyond < 0:
        seq = sequence_of_block(cu_seqlens_q, block, first_seq, first_token, num_seqs, TOKENS)
        begin = gl.load(cu_seqlens_q + seq)
        query_len = gl.load(cu_seqlens_q + seq + 1) - begin
        first = (block - ((begin - first_token) // TOKENS + seq - first_seq)) * TOKENS
        row = begin + first
        num_padding = 0
        if (first < query_len) & (query_len >= least_tokens):
            num_tokens = gl.minimum(query_len - first, TOKENS)
            position = gl.load(seq_lens + seq) - query_len + first
            keys = position + num_tokens
            page_table += seq.to(gl.int64) * stride_table
    return (row, num_tokens, num_padding, position, keys), page_table


@gluon.jit
def row_offsets(
    row, num_tokens, kv_head, stride,
    FIRST: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, HEAD_DIM: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Compute offsets in ``q`` or ``out`` of 64 rows in a layout, and which of them are of the block's first
    ``num_tokens`` tokens. Rows behind those of whole tokens are of none."""
    lanes = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LAYOUT))
    tokens = FIRST + lanes // GROUP
    if 64 % GROUP != 0:
        tokens = gl.where(lanes < 64 // GROUP * GROUP, tokens, 1 << 30)
    heads = kv_head * GROUP + lanes % GROUP
    mask = (tokens < num_tokens)[:, None]
    if DIM < HEAD_DIM:
        mask = mask & (dims < DIM)[None, :]
    return ((row + tokens).to(gl.int64) * stride + heads * DIM)[:, None] + dims[None, :], mask


@gluon.jit
def merge_consumers(acc, row_max, row_sum, sums, merged, scale_log2, OUT: gl.constexpr):
    """The first consumer: its sums and the second's."""
    other_acc, other_max, other_sum = sums
    mbarrier.wait(merged.index(0), 0)
    theirs = other_max.load(gl.SliceLayout(1, OUT))
    new_max = gl.maximum(row_max, theirs)
    mine = gl.exp2((row_max - new_max) * scale_log2)
    theirs = gl.exp2((theirs - new_max) * scale_log2)
    row_sum = row_sum * mine + other_sum.load(gl.SliceLayout(1, OUT)) * theirs
    return acc * mine[:, None] + other_acc.load(OUT) * theirs[:, None], new_max, row_sum
