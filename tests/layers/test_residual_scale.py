"""The scaled residual stream stays in float32 while blocks compute in bfloat16."""

from __future__ import annotations

import dataclasses

import torch

from tests.harness import model_context
from weft.layers.residual_scale import InputScale, ResidualScale


def test_sums_in_float32_over_blocks_in_bfloat16() -> None:
    context = dataclasses.replace(model_context(), dtype=torch.bfloat16)
    begin, scale = InputScale(24, context), ResidualScale(24, context)
    for module in (begin, scale):
        for parameter in module.parameters():
            parameter.copy_(torch.randn(24))
    x, residual = torch.randn(7, 24).bfloat16(), torch.randn(7, 24)
    got, b = scale(x, residual), {name: value.double() for name, value in scale.named_parameters()}
    kept = (residual.double() + b["residual_bias"]) * b["residual_scale"]
    added = ((x + scale.hidden_states_bias) * scale.hidden_states_scale).double()
    assert got.dtype == begin(x).dtype == torch.float32
    torch.testing.assert_close(got.double(), kept + added, rtol=1e-6, atol=1e-6)
