"""How far rounding alone moves a model's logits: the bound where processors add one number after another."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

UNIT = 2.0**-24
"""Relative error of one float32 rounding."""

DRAWS = 8


def sums_in_order() -> bool:
    """Whether torch's own kernels add without vectors here (``ATEN_CPU_CAPABILITY=default``): a sum of n terms has n
    roundings in a row, where vectors of eight or sixteen have that fraction of them."""
    return torch.backends.cpu.get_cpu_capability() == "DEFAULT"


@torch.no_grad()
def exact_and_bound(reference: Any, tokens: list[int]) -> tuple[Tensor, float]:
    """Logits ``[len(tokens), V]`` in float64, and how far rounding may move the worst of them.

    A product of n terms that are added one after another is the exact product of other weights. The weights differ by
    about sqrt(n) roundings each, because the errors of n additions are independent. So the bound is what such
    weights do to the exact logits: the most of ``DRAWS`` random draws.
    """
    model = copy.deepcopy(reference).double()
    ids = torch.tensor([tokens])
    exact = model(input_ids=ids, use_cache=False).logits[0]
    kept = {name: p.clone() for name, p in model.named_parameters()}
    generator, worst = torch.Generator().manual_seed(0), 0.0
    for _ in range(DRAWS):
        for name, p in model.named_parameters():
            terms = p.shape[-1] if p.dim() > 1 else 1
            noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            p.copy_(kept[name] * (1 + UNIT * terms**0.5 * noise))
        moved = (model(input_ids=ids, use_cache=False).logits[0] - exact).abs().max().item()
        worst = max(worst, moved)
    return exact, worst
