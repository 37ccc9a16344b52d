"""Helpers for measurements of FP8 products and of experts: weights, outputs that hold NaN first, lists of trials."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.kernels.measure import DEVICE, ON_GPU
from weft.ops.fp8 import E4M3

DTYPE = torch.bfloat16 if ON_GPU else torch.float32
FP8_FLOP_PER_S = 2 * 785e12
"""Twice the bf16 ceiling of an H200; ``ceiling`` in the output is what the matrix library reached."""


def fp8_weight(rows: int, inner: int, block: int, *lead: int, device: str = DEVICE) -> tuple[Tensor, Tensor]:
    weight = torch.empty(*lead, rows, inner, dtype=torch.uint8, device=device)
    for part in weight.view(-1).split(1 << 26):
        part.view(E4M3).copy_(torch.randn(part.shape, device=device))
    shape = (rows // 128, inner // 128) if block else (rows, 1)
    return weight.view(E4M3), (torch.rand(*lead, *shape, device=device) + 0.5) * inner**-0.5


@contextmanager
def poisoned() -> Iterator[None]:
    """``torch.empty`` returns NaN where there is one."""
    empty = torch.empty

    def poison(*size: Any, **options: Any) -> Tensor:
        tensor = empty(*size, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    with mock.patch.object(torch, "empty", poison):
        yield


def listed(tried: list[tuple[float, float, Any]]) -> list[list[Any]]:
    return [[round(us, 2), f"{wrong:.1e}", str(config)] for us, wrong, config in sorted(tried, key=lambda e: e[0])]
