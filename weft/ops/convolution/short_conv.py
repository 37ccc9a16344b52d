"""The double-gated short convolution of LFM2: ``c * conv(b * x)``, per channel.

Job: chunks for prefill and one step for decoding rows, from the merged projection ``b | c | x``. Owns: that order on
the reading side. Does not know: the projections themselves, or slots' owners.
"""

from __future__ import annotations

from torch import Tensor

from weft.forward_context import Batch
from weft.ops.backend import Backend, with_kernel
from weft.ops.convolution import causal_conv1d, causal_conv1d_update_reference
from weft.ops.padding import clear_padding, settle_padding


def short_conv(
    projected: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    batch: Batch,
    *,
    backend: Backend,
) -> Tensor:
    """The sequences from ``batch.num_decodes`` on; reads and updates their states.

    Args:
        projected: ``[T, 3 * C]``: ``b | c | x``.
        weight, bias, conv_state: as in ``causal_conv1d``.

    Returns:
        ``[T, C]`` in the dtype of ``projected``; rows outside those sequences are zero.
    """
    gate_in, gate_out, x = projected.chunk(3, dim=-1)
    y = causal_conv1d(gate_in * x, weight, bias, conv_state, batch, silu=False, backend=backend)
    return clear_padding(y.mul_(gate_out), batch.num_tokens)


@with_kernel("weft.ops.convolution.decode")
def short_conv_decode(
    projected: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    state_slots: Tensor,
    *,
    backend: Backend,
    out: Tensor | None = None,
) -> Tensor:
    """One step for N rows that continue a state; the states advance in place.

    Args:
        projected: ``[N, 3 * C]``: ``b | c | x``.
        weight: ``[C, W]``, W at least 2.
        bias: ``[C]`` or None.
        conv_state: ``[num_slots, C, W - 1]``.
        state_slots: ``[N]`` integers; only slot 0 (padding) may occur more than once; its state may change.
        out: ``[N, C]`` to write to; rows of slot 0 are left as they are.

    Returns:
        ``[N, C]`` in the dtype of ``projected``; without ``out`` rows of slot 0 are zero.
    """
    gate_in, gate_out, x = projected.chunk(3, dim=-1)
    y = causal_conv1d_update_reference(gate_in * x, weight, conv_state, state_slots, bias=bias, silu=False)
    return settle_padding(y * gate_out, state_slots, out)
