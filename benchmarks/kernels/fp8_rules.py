"""FP8 products of few rows by configuration, of weights that no table has: what the rule of such shapes rests on.

Usage: ``python -m benchmarks.kernels.fp8_rules [--seconds 130]`` on a GPU writes ``$OUT/fp8-rules-h200.json``: for each
weight and number of tokens the time of the rule's choice, of the candidates, and of the matrix library. Kernels are
compiled first, in several processes. Without a GPU nothing is measured.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.fp8_weights import fp8_weight
from benchmarks.kernels.measure import COPY_BYTES_PER_S, DEVICE, ON_GPU, time_us, write_json
from weft.ops.fp8 import Fp8Matrix
from weft.ops.linear import fp8_few_rows_hopper as hopper
from weft.ops.linear.fp8 import fp8_product_triton
from weft.ops.linear.fp8_few_rows import FewRows, HopperRows

WEIGHTS = {
    "27b.gate_up": (34816, 5120, True),
    "27b.down": (5120, 17408, False),
    "27b.qkv": (14336, 5120, False),
    "27b.out": (5120, 6144, False),
    "70b.gate_up": (57344, 8192, True),
    "70b.down": (8192, 28672, False),
    "8b.down": (4096, 14336, False),
    "8b.qkv": (6144, 4096, False),
    "8b.out": (4096, 4096, False),
    "4b.gate_up": (19456, 2560, True),
    "4b.out": (2560, 4096, False),
    "1.7b.down": (2048, 6144, False),
    "1b.out": (2048, 2048, False),
}
"""Output rows, inner size, and whether SiLU and a product follow."""
TOKENS = (1, 8, 16, 32, 64)
ROTATED_BYTES = 160 << 20
Case = tuple[str, int, int, FewRows | HopperRows]


def candidates(rows: int, inner: int, tokens: int) -> list[FewRows | HopperRows]:
    """Return ``HopperRows`` that hold the weight, and pipelines with one to eight programs per multiprocessor."""
    steps = -(-inner // 128)
    held = [HopperRows(*shape, None) for shape in ((32, 4), (16, 8), (16, 4), (16, 16))]
    found: dict[FewRows | HopperRows, None] = dict.fromkeys(
        [each for each in held if tokens <= 8 and hopper.registers_hold(each.rows, each.warps, inner)][:2]
    )
    for height, stages in ((16, 6), (32, 4), (64, 3), (64, 4), (128, 3)):
        blocks = -(-rows // height)
        for programs in (132, 264, 528, 1056) if tokens <= 16 or height >= 32 else ():
            splits = max(1, min(steps // 2, round(programs / blocks)))
            splits = -(-steps // -(-steps // splits))
            if splits == 1 or blocks <= 4096:
                found[FewRows(False, height, 4, stages, splits)] = None
    return list(found)


def cases() -> Iterator[Case]:
    for name, (rows, inner, _) in WEIGHTS.items():
        for block in (0, 128) if name in ("27b.gate_up", "27b.qkv", "8b.down") else (0,):
            for tokens in TOKENS:
                yield from ((name, block, tokens, config) for config in candidates(rows, inner, tokens))


def prepare(name: str, block: int, tokens: int, count: int) -> tuple[torch.Tensor, list[Fp8Matrix], torch.Tensor]:
    """Inputs, ``count`` weights, and room for the outputs."""
    rows, inner, gated = WEIGHTS[name]
    matrices = [Fp8Matrix(*fp8_weight(rows, inner, block), None, block) for _ in range(count)]
    x = torch.randn(tokens, inner, device=DEVICE).bfloat16()
    return x, matrices, torch.empty(tokens, rows // 2 if gated else rows, device=DEVICE, dtype=x.dtype)


def compile_case(case: Case) -> None:
    name, block, tokens, config = case
    x, (matrix,), out = prepare(name, block, tokens, 1)
    fp8_product_triton(x, matrix, None, out, silu_mul=WEIGHTS[name][2], config=config)
    torch.cuda.synchronize()


def measure(name: str, block: int, tokens: int) -> dict[str, Any]:
    """Microseconds of one weight for one number of tokens."""
    rows, inner, gated = WEIGHTS[name]
    x, matrices, out = prepare(name, block, tokens, max(2, ROTATED_BYTES // (rows * inner)))

    def time_of(config: FewRows | HopperRows | None) -> float:
        options: dict[str, Any] = {"silu_mul": gated, "config": config}
        return round(time_us([partial(fp8_product_triton, x, m, None, out, **options) for m in matrices]), 1)

    found = sorted((time_of(config), str(config)) for config in candidates(rows, inner, tokens))
    plain = [torch.randn(rows, inner, device=DEVICE).bfloat16() for _ in range(2)]
    return {
        "weight": name, "out": rows, "inner": inner, "gated": gated, "block": block, "tokens": tokens,
        "floor_us": round(rows * inner / COPY_BYTES_PER_S * 1e6, 1), "rule_us": time_of(None),
        "bf16_library_us": round(time_us([partial(torch.mm, x, weight.t()) for weight in plain]), 1), "found": found,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=130.0, help="begin no measurement after this time")
    args = parser.parse_args()
    if not ON_GPU:
        print(f"{len(list(cases()))} kernels on a GPU; there is none here")
        return
    with ProcessPoolExecutor(12, mp_context=multiprocessing.get_context("spawn")) as processes:
        list(processes.map(compile_case, cases()))
    end, rows = time.monotonic() + args.seconds, []
    for key in dict.fromkeys(case[:3] for case in cases()):
        if time.monotonic() < end:
            rows.append(measure(*key))
            print({key: rows[-1][key] for key in ("weight", "tokens", "rule_us")}, rows[-1]["found"][0], flush=True)
            write_json("fp8-rules-h200.json", rows)


if __name__ == "__main__":
    main()
