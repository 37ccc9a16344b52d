"""A tile of e4m3 keys and values on Hopper, in Gluon, where a program says which thread holds which number.

Job: the parts below ``decode_hopper.py``. Owns: the layouts of a tile, and its arithmetic. Does not know:
sequences, splits, grids.

Heads have 128 dims, and up to 8 rows (query token, head) see the same keys. A warp has blocks of 16 keys to itself. A
thread loads 16 bytes at a time, and these are the numbers that the instruction ``mma.m16n8k16`` wants from it, if dims
are counted in another order:

- *scores*, ``keys @ queries^T``: lane ``4 * g + t`` holds dims ``16 * t`` to ``16 * t + 15`` of both halves, of keys
  ``g`` and ``g + 8``. A product adds up over the dims, so that their order is free, if the queries have the same.
- *weights* come out transposed; one instruction per 8 x 8 of them (``movmatrix``) makes them the next operand.
- *outputs*, ``values^T @ weights``: the lane holds dims ``16 * g`` to ``16 * g + 15`` of keys ``2 * t``, ``2 * t + 1``,
  and the two that are 8 further. The bytes of two keys are interleaved as they are widened. Row ``n`` of the outputs is
  dim ``n % 8 * 16 + n // 8``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

HEAD_DIM, ROWS = gl.constexpr(128), gl.constexpr(8)
WORDS = gl.constexpr(32)
"""Words of a head, of four e4m3 numbers each."""

_FOUR, _EIGHT = gl.constexpr((gl.float16,) * 4), gl.constexpr((gl.float16,) * 8)


@gluon.constexpr_function
def products_layout(warps):
    """``[warps, ...]``: every warp multiplies for itself."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def _linear(registers, lanes, shape):
    """A layout whose bits of registers and lanes stand for such steps; those of warps count the first axis."""
    warps = [[1 << bit] + [0] * (len(shape) - 1) for bit in range((shape[0] - 1).bit_length())]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], shape)


@gluon.constexpr_function
def key_layout(warps, blocks):
    """The layout of ``[warps, blocks, 16 keys, words]``."""
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 16], [0, 0, 8, 0]]
    registers += [[0, 1 << bit, 0, 0] for bit in range((blocks - 1).bit_length())]
    lanes = [[0, 0, 0, 4], [0, 0, 0, 8], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]]
    return _linear(registers, lanes, [warps, blocks, 16, 32])


@gluon.constexpr_function
def value_layout(warps, blocks):
    """The layout of ``[warps, blocks, 8 pairs of keys, words]``."""
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 4, 0]]
    registers += [[0, 1 << bit, 0, 0] for bit in range((blocks - 1).bit_length())]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 0, 4], [0, 0, 0, 8], [0, 0, 0, 16]]
    return _linear(registers, lanes, [warps, blocks, 8, 32])


@gluon.constexpr_function
def _query_layout(warps):
    """``[warps, rows, dims]``: every warp has all queries."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 0, 64]]
    lanes = [[0, 0, 16], [0, 0, 32], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return _linear(registers, lanes, [warps, 8, 128])


@gluon.jit
def along(axis: gl.constexpr, size: gl.constexpr, LAYOUT: gl.constexpr):
    """0 to ``size - 1`` along one axis of three."""
    FIRST: gl.constexpr = 0 if axis > 0 else 1
    LAST: gl.constexpr = 2 if axis < 2 else 1
    ids = gl.arange(0, size, layout=gl.SliceLayout(FIRST, gl.SliceLayout(LAST, LAYOUT)))
    return gl.expand_dims(gl.expand_dims(ids, FIRST), LAST)


@gluon.jit
def places_of(stride_word, KEYS: gl.constexpr, STEP: gl.constexpr, LAYOUT: gl.constexpr):
    """Compute the places of words ``[warps, blocks, keys, words]``, where keys are ``STEP`` apart: the first key of
    each block, the keys, and where in a page words are."""
    WARPS: gl.constexpr = gl.num_warps()
    BLOCKS: gl.constexpr = KEYS // (16 * WARPS)
    LEFT: gl.constexpr = gl.SliceLayout(3, LAYOUT)
    warps = gl.expand_dims(along(0, WARPS, LEFT), 3)
    blocks = (warps * BLOCKS + gl.expand_dims(along(1, BLOCKS, LEFT), 3)) * 16
    keys = gl.expand_dims(along(2, 16 // STEP, LEFT), 3) * STEP
    words = gl.expand_dims(along(2, WORDS, gl.SliceLayout(0, LAYOUT)), 0)
    return blocks, blocks + keys, keys * stride_word + words


@gluon.jit
def _widen(keys):
    """The four e4m3 numbers of each word, in float16."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        .reg .b32 pair;
        mov.b32 {low, high}, $4;
        cvt.rn.f16x2.e4m3x2 pair, low;
        mov.b32 {$0, $1}, pair;
        cvt.rn.f16x2.e4m3x2 pair, high;
        mov.b32 {$2, $3}, pair;
        }""",
        "=h,=h,=h,=h,r", [keys], dtype=_FOUR, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _widen_two(even, odd):
    """The same of two words, in turn: what stands side by side in a register is of two keys."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        .reg .b32 mixed, pair;
        prmt.b32 mixed, $8, $9, 0x5140;
        mov.b32 {low, high}, mixed;
        cvt.rn.f16x2.e4m3x2 pair, low;
        mov.b32 {$0, $1}, pair;
        cvt.rn.f16x2.e4m3x2 pair, high;
        mov.b32 {$2, $3}, pair;
        prmt.b32 mixed, $8, $9, 0x7362;
        mov.b32 {low, high}, mixed;
        cvt.rn.f16x2.e4m3x2 pair, low;
        mov.b32 {$4, $5}, pair;
        cvt.rn.f16x2.e4m3x2 pair, high;
        mov.b32 {$6, $7}, pair;
        }""",
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [even, odd], dtype=_EIGHT, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _transpose(weights):
    """Each block of 8 x 8 float16 numbers transposed. Not elementwise: two registers stand side by side in a block."""
    return gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [weights], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def load_queries(q_row, stride_q, kv_head, FIXED: gl.constexpr, PRODUCTS: gl.constexpr):
    """The right operand of the scores: ``[warps, dims, rows]``, dims in the order of the keys'."""
    WARPS: gl.constexpr = gl.num_warps()
    GROUP: gl.constexpr = FIXED.group
    LAYOUT: gl.constexpr = _query_layout(WARPS)
    rows = along(1, ROWS, LAYOUT)
    at = (rows // GROUP).to(gl.int64) * stride_q + (kv_head * GROUP + rows % GROUP) * HEAD_DIM
    at = at + along(2, HEAD_DIM, LAYOUT) + along(0, WARPS, LAYOUT) * 0
    q = gl.load(q_row + at, mask=rows < GROUP * FIXED.query_len, other=0.0).to(gl.float16)
    q = gl.reshape(q, [WARPS, ROWS, 2, 4, 4, 2, 2])
    q = gl.reshape(gl.permute(q, [0, 2, 4, 5, 3, 6, 1]), [WARPS, HEAD_DIM, ROWS])
    return gl.convert_layout(q, gl.DotOperandLayout(1, PRODUCTS, 2))


@gluon.jit
def scores_of(words, q, FIXED: gl.constexpr, PRODUCTS: gl.constexpr):
    """Scores ``[warps, keys, rows]``."""
    WARPS: gl.constexpr = gl.num_warps()
    KEYS: gl.constexpr = FIXED.keys // WARPS
    k0, k1, k2, k3 = _widen(words)
    k = gl.reshape(gl.join(gl.join(k0, k1), gl.join(k2, k3)), [WARPS, KEYS, 2, 4, 4, 2, 2])
    k = gl.reshape(gl.permute(k, [0, 1, 2, 4, 6, 3, 5]), [WARPS, KEYS, HEAD_DIM])
    k = gl.convert_layout(k, gl.DotOperandLayout(0, PRODUCTS, 2))
    return mma_v2(k, q, gl.full([WARPS, KEYS, ROWS], 0.0, gl.float32, layout=PRODUCTS))


@gluon.jit
def softmax(scores, row_sum, row_max, visible, scale_log2, FIXED: gl.constexpr, PRODUCTS: gl.constexpr):
    """Compute one step of each warp's online softmax: weights as the right operand of the outputs, sum, maximum, and
    what earlier weights have to be multiplied by."""
    WARPS: gl.constexpr = gl.num_warps()
    KEYS: gl.constexpr = FIXED.keys // WARPS
    scores = gl.where(visible, scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
    shrink = gl.exp2(row_max - new_max)
    p = gl.exp2(scores * scale_log2 - gl.expand_dims(new_max, 1))
    row_sum = row_sum * shrink + gl.sum(p, 1)
    p = gl.reshape(_transpose(p.to(gl.float16)), [WARPS, KEYS // 8, 8, ROWS])
    p = gl.reshape(gl.permute(p, [0, 1, 3, 2]), [WARPS, KEYS, ROWS])
    return gl.convert_layout(p, gl.DotOperandLayout(1, PRODUCTS, 2)), row_sum, new_max, shrink


@gluon.jit
def add_values(acc, even, odd, p, FIXED: gl.constexpr, PRODUCTS: gl.constexpr):
    """Compute ``acc [warps, dims, rows] + values^T @ p``."""
    WARPS: gl.constexpr = gl.num_warps()
    KEYS: gl.constexpr = FIXED.keys // WARPS
    e0, o0, e1, o1, e2, o2, e3, o3 = _widen_two(even, odd)
    v = gl.join(gl.join(gl.join(e0, o0), gl.join(e1, o1)), gl.join(gl.join(e2, o2), gl.join(e3, o3)))
    v = gl.reshape(v, [WARPS, KEYS // 2, 8, 4, 2, 2, 2])
    v = gl.reshape(gl.permute(v, [0, 3, 6, 5, 2, 1, 4]), [WARPS, HEAD_DIM, KEYS])
    return mma_v2(gl.convert_layout(v, gl.DotOperandLayout(0, PRODUCTS, 2)), p, acc)
