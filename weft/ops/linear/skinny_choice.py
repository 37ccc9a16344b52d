"""The choice of a kernel for a linear layer of a few rows: tuned sizes, and rules for all others.

Job: from the sizes of a product to a configuration of ``skinny.py``, or to the matrix library. Owns: the table of tuned
sizes (``skinny_linear_h200.json``, written by ``benchmarks/kernels/linear.py --tune``). Does not know: the kernel.
"""

import functools
import json
import math
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from weft.ops.triton.sizes import MULTIPROCESSORS, cdiv, is_hopper, next_power_of_2
from weft.ops.triton.tile_table import has_table

MAX_TOKENS = 256
"""The kernel is for at most this many rows; beyond them the matrix library is close to the floor."""
_HELD_BYTES = 65536
"""Weights that four warps hold in registers: half of what they have. Much more would spill."""
_SMALL, _LARGE = 1 << 22, 1 << 25
"""Elements of a small weight at most, and of a large one at least: 8 and 67 MB."""
_NARROW = 512
"""Rows of a narrow weight at most, such as a router."""
_SUMS = ((8, 1024, 4), (4, 2048, 8), (2, 2048, 8))
"""Weight rows of a program, inner elements of a step and warps of ``sum``, in the order in which they are tried."""
TABLE_PATH = Path(__file__).with_name("skinny_linear_h200.json")


class Config(NamedTuple):
    """How one product is computed.

    Attributes:
        method: ``sum``, ``dot``, ``held`` or ``warps``.
        rows: weight rows per program (with ``silu_mul`` half of them gate rows, half up rows).
        inner: elements of the inner dimension per step.
        warps: per program.
        stages: of the software pipeline (``dot``).
        splits: programs that share the inner dimension.
        tokens: of a program at most.
    """

    method: str
    rows: int
    inner: int
    warps: int
    stages: int = 1
    splits: int = 1
    tokens: int = 64


@functools.cache
def load_table(leaves_sums: bool = False) -> dict[tuple[int, int, bool, int], Config | None]:
    """``(weight rows, inner size, gated, padded tokens)`` to what was fastest; None: the matrix library.

    ``leaves_sums``: where the norm that follows adds the sums of splits; some sizes have rows of their own for that.
    """
    table = dict(load_table()) if leaves_sums else {}
    for row in json.loads(TABLE_PATH.read_text())["rows"]:
        if row.get("leaves_sums", False) == leaves_sums:
            key = (row["rows"], row["inner"], row["silu_mul"], row["tokens"])
            table[key] = None if row["config"] is None else Config(*row["config"])
    return table


def heuristic_config(rows: int, inner: int, tokens: int, element_size: int, *, pipelines: bool) -> Config | None:
    """A configuration for sizes that were not tuned; None: the matrix library.

    Measured on an H200 for fourteen weights of 10 to 350 MB (``linear-rules-h200.json``), for weights of few rows
    (``linear-rules-narrow-h200.json``), and for routers (``linear-rules-routers-h200.json``). One row is fastest by
    ``sum`` without splits: 5 to 12% less time than with them. With three rows and more ``sum`` took up to twice as long
    as the matrix library, but for small weights half as long. ``dot`` takes 3 to 14% less than the library where the
    library has too few programs, and up to 40% less for routers. A large weight is left to the library where a last
    round of programs would leave many multiprocessors idle.

    Args:
        rows: of the weight.
        inner: its columns.
        tokens: a power of two.
        element_size: bytes per element of the weight.
        pipelines: whether the device has the shared memory of an H200, which ``dot`` fills.
    """
    is_small = rows * inner <= _SMALL and element_size == 2
    if tokens <= 2 or (tokens == 4 and is_small):
        for block, step, warps in _SUMS:
            block = block if rows >= 2 * MULTIPROCESSORS * block else min(block, 4)
            step = min(step, next_power_of_2(inner))
            if cdiv(inner, step) * step * block * element_size <= _HELD_BYTES * warps // 4:
                return Config("sum", block, step, warps)
    if pipelines and 4 < tokens <= 64 and element_size == 2 and rows <= _NARROW and 1024 <= inner < 4096:
        return Config("dot", 64, 128 if inner >= 2048 else 64, 4, 6, splits=4)
    few_programs = rows <= 35 * MULTIPROCESSORS and inner >= 4096
    if pipelines and 4 <= tokens <= 32 and element_size == 2 and few_programs:
        blocks, splits = cdiv(rows, 64), 4 if tokens <= 8 else 2
        while splits < 8 and blocks * splits < MULTIPROCESSORS // 2:
            splits *= 2
        rounds = blocks * splits / MULTIPROCESSORS
        if rows * inner <= _LARGE or rounds >= 0.75 * math.ceil(rounds):
            return Config("dot", 64, 128, 4, 6, splits=splits)
    return None


def choose_config(x: Tensor, weight: Tensor, silu_mul: bool, *, leaves_sums: bool = False) -> Config | None:
    """The configuration for ``x [T, K]`` and ``weight [N, K]``; None: the matrix library is faster, or has to do.
    ``leaves_sums``: see ``load_table``."""
    num_tokens, (rows, inner) = x.shape[0], weight.shape
    if not 0 < num_tokens <= MAX_TOKENS or inner < 64 or rows < 8:
        return None
    tokens = next_power_of_2(num_tokens)
    key = (rows, inner, silu_mul, tokens)
    if weight.element_size() == 2 and has_table(x.device) and key in load_table(leaves_sums):
        return load_table(leaves_sums)[key]
    return heuristic_config(rows, inner, tokens, weight.element_size(), pipelines=is_hopper(x.device))
