"""Rows that may decode, in a captured mixed batch: all that the engine may ever have, of which few or none do.

Job: a grid that such a batch fills, and a program's share of the rows: one, the row as many further on as there are
programs side by side, and so on. Does not know: what is done with a row.

A grid with programs for every row would spend its time on starting programs that find nothing to do.
"""

import triton
import triton.language as tl

from weft.ops.triton.early_launch import wait
from weft.ops.triton.sizes import MULTIPROCESSORS, cdiv

_MOST_ROWS = tl.constexpr(64)
"""Upper bound on the rows of a program."""
_PROGRAMS = 64 * MULTIPROCESSORS
"""They start within microseconds. With a quarter of them a program has dozens of rows, and steps in which most rows
decode take up to 8% more time (``recurrent-shapes-graph-16-h200.json``)."""


def row_programs(num_rows: int, per_row: int, *, keep: bool) -> tuple[int, int | None]:
    """Programs side by side over rows, and ``num_rows``, which a kernel takes.

    Args:
        per_row: programs that a row needs.
        keep: the output of a row without a slot stays as it is. Otherwise every row has programs of its own, which
            clear it, and the kernel takes None.
    """
    if not keep:
        return num_rows, None
    programs = max(cdiv(_PROGRAMS, per_row), cdiv(num_rows, _MOST_ROWS.value))
    return min(num_rows, programs), num_rows


@triton.jit
def last_row(state_slots, num_rows, i_program, programs, EARLY: tl.constexpr):
    """The number of rows that a program has to look at: up to the last of its rows whose slot is not 0. One without
    such a row waits here."""
    o_row = tl.arange(0, _MOST_ROWS)
    rows = i_program + o_row * programs
    slots = tl.load(state_slots + rows, mask=rows < num_rows, other=0)
    count = tl.max(tl.where(slots != 0, o_row + 1, 0), 0)
    if count == 0:
        wait(EARLY)
    return count
