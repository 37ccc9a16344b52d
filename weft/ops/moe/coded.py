"""Mixture of experts with coded weights (``weft.ops.codes``).

Job: ``fused_moe`` with integers of 4 or 8 bits, FP4 or FP8. Does not know: routing, kernels (``coded_experts.py``).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.ops.backend import Backend, with_kernel
from weft.ops.codes import CodedMatrix, dequantize_codes
from weft.ops.moe import NO_EXTRAS, ExpertExtras, add_shared, expert_activation, sum_over_experts
from weft.ops.traced import traced_op

_LIBRARY = torch.library.Library("weft", "FRAGMENT")


@traced_op(fake=lambda x, *_, **__: torch.empty_like(x))
@with_kernel("weft.ops.moe.coded_experts")
def coded_fused_moe(
    x: Tensor,
    gate_up: CodedMatrix,
    down: CodedMatrix,
    weights: Tensor,
    ids: Tensor,
    *,
    extras: ExpertExtras = NO_EXTRAS,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    backend: Backend,
) -> Tensor:
    """``fused_moe`` with coded matrices of all experts, ``[E, 2 * I, H]`` (or ``[E, I, H]``) and ``[E, H, I]``.

    Arguments and results as of ``fused_moe``.
    """
    # The experts are one operation to the dispatcher, as in ``fused_moe``.
    out = torch.ops.weft.coded_experts_reference(x, *gate_up, *down, weights, ids, *extras)
    return add_shared(out, shared, shared_gate)


def _coded_experts(x: Tensor, *parts: Any) -> Tensor:
    size = len(CodedMatrix._fields)
    up, down = CodedMatrix(*parts[:size]), CodedMatrix(*parts[size : 2 * size])
    weights, ids, *extras = parts[2 * size :]
    up_bias, down_bias = extras[:2]

    def run(expert: int, rows: Tensor) -> Tensor:
        hidden = F.linear(
            rows.float(), dequantize_codes(up.expert(expert)), None if up_bias is None else up_bias[expert].float()
        )
        hidden = expert_activation(hidden.to(x.dtype), up.words.shape[2] == 2 * down.columns, *extras[2:])
        bias = None if down_bias is None else down_bias[expert].float()
        return F.linear(hidden.float(), dequantize_codes(down.expert(expert)), bias).to(x.dtype)

    return sum_over_experts(x, weights, ids, up.words.shape[0], run)


def _fields(name: str) -> str:
    return (
        f"Tensor {name}_words, Tensor {name}_scales, Tensor? {name}_zeros, Tensor? {name}_row_scale, int {name}_bits, "
        f"bool {name}_is_float, int {name}_group, int {name}_columns"
    )


_LIBRARY.define(
    f"coded_experts_reference(Tensor x, {_fields('gate_up')}, {_fields('down')}, Tensor weights, Tensor ids, "
    "Tensor? gate_up_bias, Tensor? down_bias, float alpha, float? limit, float up_offset, float? gate_cap, "
    "float? up_cap) -> Tensor"
)
_LIBRARY.impl("coded_experts_reference", _coded_experts, "CompositeExplicitAutograd")
