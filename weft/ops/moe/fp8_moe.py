"""``fused_moe`` of ``weft/ops/moe`` for FP8 (e4m3) weights as ``weft/ops/linear/fp8_linear.py`` defines them.

Inputs and hidden values are quantised on the way in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.activation import silu_and_mul
from weft.ops.backend import Backend, with_kernel
from weft.ops.collectives.peer_buffers import PeerBuffers, SentRows
from weft.ops.fp8 import Fp8Matrix
from weft.ops.linear.fp8_linear import fp8_linear
from weft.ops.moe import add_shared, sum_over_experts
from weft.ops.traced import traced_op


@traced_op(fake=lambda x, *_, **__: torch.empty_like(x))
@with_kernel("weft.ops.moe.fp8_experts")
def fp8_fused_moe(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    weights: Tensor,
    ids: Tensor,
    *,
    gate_up_input_scale: Tensor | None = None,
    down_input_scale: Tensor | None = None,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    block: int,
    backend: Backend,
) -> Tensor:
    """``sum_j weights[t, j] * down[e] (silu(gate[e] x_t) * (up[e] x_t))`` with ``e = ids[t, j]``.

    Args:
        x: ``[T, H]``.
        gate_up, down: ``[E, 2 * I, H]`` (gate rows, then up rows) and ``[E, H, I]``, e4m3.
        gate_up_scale, down_scale: float32; ``[E, 2 * I / block, H / block]`` and ``[E, H / block, I / block]``, or
            ``[E, 2 * I, 1]`` and ``[E, H, 1]`` if ``block`` is 0.
        weights: ``[T, k]``.
        ids: ``[T, k]`` integers (int32 for the kernel); -1 means no expert.
        gate_up_input_scale, down_input_scale: ``[1]`` float32: the scale of all inputs of a product; None: found for
            each token (and group).
        shared: ``[T, H]``, output of a shared expert to add, times ``sigmoid(shared_gate)``.
        shared_gate: ``[T, 1]``, or None: the shared expert is added as it is.
        block: 128, or 0 for scales by row and token.

    Returns:
        ``[T, H]`` in x's dtype; rows without experts are zero (but for the shared expert).
    """
    # The experts are one operation to the dispatcher, as in ``fused_moe``.
    out = torch.ops.weft.fp8_experts_reference(
        x, gate_up, gate_up_scale, down, down_scale, weights, ids, gate_up_input_scale, down_input_scale, block
    )
    return add_shared(out, shared, shared_gate)


def send_fp8_fused_moe(
    x: Tensor,
    gate_up: Fp8Matrix,
    down: Fp8Matrix,
    weights: Tensor,
    ids: Tensor,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    *,
    peers: PeerBuffers,
) -> SentRows:
    """``fp8_fused_moe`` as ``weft.ops.moe.send_fused_moe``."""
    from weft.ops.moe.combine import send_experts
    from weft.ops.moe.fp8_experts import pair_outputs

    return send_experts(pair_outputs(x, ids, gate_up, down), weights, ids, shared, shared_gate, peers)


def _experts(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up_input_scale: Tensor | None,
    down_input_scale: Tensor | None,
    block: int,
) -> Tensor:
    def run(expert: int, rows: Tensor) -> Tensor:
        both = fp8_linear.reference(
            rows, gate_up[expert], gate_up_scale[expert], input_scale=gate_up_input_scale, block=block
        )
        hidden = silu_and_mul.reference(both)
        return fp8_linear.reference(hidden, down[expert], down_scale[expert], input_scale=down_input_scale, block=block)

    return sum_over_experts(x, weights, ids, gate_up.shape[0], run)


_LIBRARY = torch.library.Library("weft", "FRAGMENT")
_LIBRARY.define(
    "fp8_experts_reference(Tensor x, Tensor gate_up, Tensor gate_up_scale, Tensor down, Tensor down_scale, "
    "Tensor weights, Tensor ids, Tensor? gate_up_input_scale, Tensor? down_input_scale, int block) -> Tensor"
)
_LIBRARY.impl("fp8_experts_reference", _experts, "CompositeExplicitAutograd")
