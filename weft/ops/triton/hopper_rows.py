"""Rows of a product on Hopper, from the matrix units' registers to memory, in Gluon.

Job: the epilogue of products in bfloat16: SiLU and multiply, and stores of 16 bytes. Owns: how threads exchange their
numbers for that. Does not know: what was multiplied.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from weft.ops.triton.hopper import pack

_ROW_LANES = [[1, 0], [2, 0], [4, 0]]
_WARPS = [[16, 0], [32, 0]]
_PAIRS = gl.constexpr(
    gl.DistributedLinearLayout([[0, 4], [0, 8], [8, 0]], [[0, 1], [0, 2], *_ROW_LANES], _WARPS, [], [64, 16])
)
"""Pairs of columns as the matrix units leave them: neighbours are in neighbouring threads."""
STORED = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], *_ROW_LANES], _WARPS, [], [64, 16])
)
"""Pairs of columns as they are stored: 16 bytes of a row in one thread."""


@gluon.jit
def exchange(pairs):
    """``[64, 16]`` from ``_PAIRS`` to ``STORED``: threads by fours transpose their squares of four."""
    squares = gl.inline_asm_elementwise(
        """{
        .reg .pred odd, high;
        .reg .b32 lane, s, t, a, b, c, d;
        mov.u32 lane, %laneid;
        and.b32 t, lane, 1;
        setp.ne.u32 odd, t, 0;
        and.b32 t, lane, 2;
        setp.ne.u32 high, t, 0;
        selp.b32 s, $4, $5, odd;
        selp.b32 t, $6, $7, odd;
        shfl.sync.bfly.b32 s, s, 1, 31, -1;
        shfl.sync.bfly.b32 t, t, 1, 31, -1;
        selp.b32 a, s, $4, odd;
        selp.b32 b, $5, s, odd;
        selp.b32 c, t, $6, odd;
        selp.b32 d, $7, t, odd;
        selp.b32 s, a, c, high;
        selp.b32 t, b, d, high;
        shfl.sync.bfly.b32 s, s, 2, 31, -1;
        shfl.sync.bfly.b32 t, t, 2, 31, -1;
        selp.b32 $0, s, a, high;
        selp.b32 $1, t, b, high;
        selp.b32 $2, c, s, high;
        selp.b32 $3, d, t, high;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r,r", [gl.convert_layout(pairs, _PAIRS)], dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip
    turned = gl.reshape(gl.permute(gl.reshape(squares, [64, 4, 4]), (0, 2, 1)), [64, 16])
    return gl.convert_layout(turned, STORED)


@gluon.jit
def halves(x, HALF: gl.constexpr):
    """The first and the second columns of ``[64, 2 * HALF]``: no number moves."""
    return gl.split(gl.permute(gl.reshape(x, [64, 2, HALF]), (0, 2, 1)))


@gluon.jit
def _store(base, offsets, values, mask, COLUMNS: gl.constexpr):
    """``values [64, COLUMNS]``, a multiple of 32, in bfloat16, two in an int32, to ``base + offsets [64]``, of rows
    where ``mask``; both in a slice of ``STORED``."""
    if COLUMNS > 32:
        HALF: gl.constexpr = COLUMNS // 2
        first, second = halves(values, HALF)
        _store(base, offsets, first, mask, HALF)
        _store(base, offsets + HALF // 2, second, mask, HALF)
    else:
        first, second = gl.split(gl.reshape(values, [64, 16, 2]))
        columns = gl.arange(0, 16, layout=gl.SliceLayout(0, STORED))
        gl.store(base + offsets[:, None] + columns[None, :], exchange(pack(first, second)), mask=mask[:, None])


@gluon.jit
def silu_mul(gate, up):
    return gate / (1.0 + gl.exp(-gate)) * up


@gluon.jit
def silu_mul_halves(sums, HALF: gl.constexpr):
    """``[64, gate | up]`` to ``[64, HALF]``."""
    gate, up = halves(sums, HALF)
    return silu_mul(gate, up)


@gluon.jit
def store_inside(out, rows, values, inside, column, COLUMNS: gl.constexpr, WIDTH: gl.constexpr):
    """``COLUMNS`` outputs of some rows from ``column`` on, as far as there are so many: a multiple of 32."""
    if COLUMNS > 32:
        HALF: gl.constexpr = COLUMNS // 2
        first, second = halves(values, HALF)
        store_inside(out, rows, first, inside, column, HALF, WIDTH)
        store_inside(out, rows, second, inside, column + HALF, HALF, WIDTH)
    else:
        _store(out, (rows.to(gl.int64) * WIDTH + column) // 2, values, inside & (column < WIDTH), 32)
