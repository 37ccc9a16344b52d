"""Gate and up projections of many rows with SiLU, behind a norm: Weft's kernel beside the matrix library.

    python -m benchmarks.kernels.gated_linear --json FILE

``filled`` is the part of the tiles' rows and columns, over all waves of programs, that there is work for: what
``takes_gated`` decides by.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.kernels.measure import DEVICE, L2_BYTES, MATRIX_FLOP_PER_S, ON_GPU, error, time_us  # isort: split

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.bench import report
from weft.ops.activation.kernels import silu_and_mul_triton
from weft.ops.linear.gated_hopper import filled, gated_linear_hopper
from weft.ops.norm.kernels import rms_norm_triton

# inner dimension and width: of Qwen3 0.6B, 1.7B, 4B, 8B and 14B, of Llama 3B and 8B, and halves of the wide ones
SIZES = [(1024, 3072), (2048, 6144), (2560, 9728), (4096, 12288), (5120, 17408), (3072, 8192), (4096, 14336),
         (4096, 6144), (5120, 8704), (4096, 7168)]  # fmt: skip
ROWS = [16, 64, 128, 192, 256, 320, 384, 512, 640, 768, 896, 1024, 1280, 1536, 2048, 3072, 4096, 8192]


def _library(x: Tensor, weight: Tensor) -> Tensor:
    return silu_and_mul_triton(F.linear(x, weight))


def _behind_norm(x: Tensor, scale: Tensor, weight: Tensor, product: Any) -> None:
    product(rms_norm_triton(x, scale, 1e-6), weight)


def measure(inner: int, width: int, rows: int, weights: list[Tensor]) -> dict[str, Any]:
    x = torch.randn(rows, inner, dtype=torch.bfloat16, device=DEVICE)
    scale = torch.ones(inner, dtype=torch.bfloat16, device=DEVICE)
    gate, up = (x.double() @ weights[0].double().t()).chunk(2, -1)
    worst = error(gated_linear_hopper(x, weights[0]), F.silu(gate) * up)
    assert worst < 4e-3, (inner, width, rows, worst)
    us = {
        name: time_us([partial(_behind_norm, x, scale, weight, product) for weight in weights])
        for name, product in (("library_us", _library), ("kernel_us", gated_linear_hopper))
    }
    floor = 4 * rows * width * inner / MATRIX_FLOP_PER_S * 1e6
    return {
        "inner": inner,
        "width": width,
        "rows": rows,
        "filled": round(filled(rows, width), 3),
        **us,
        "flop_us": floor,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    assert ON_GPU, "the kernel needs a GPU of compute capability 9.0"
    rows = []
    for inner, width in SIZES:
        count = max(1, -(-2 * L2_BYTES // (4 * inner * width)))
        weights = [
            torch.randn(2 * width, inner, dtype=torch.bfloat16, device=DEVICE) / inner**0.5 for _ in range(count)
        ]
        for tokens in ROWS:
            rows.append(measure(inner, width, tokens, weights))
        del weights
        print(
            inner,
            width,
            *(
                f"{r['rows']}: {r['library_us']:.1f} {r['kernel_us']:.1f} ({r['filled']})"
                for r in rows
                if (r["inner"], r["width"]) == (inner, width)
            ),
            sep="  ",
            flush=True,
        )
    args.json.write_text(json.dumps(report.provenance(DEVICE) | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
