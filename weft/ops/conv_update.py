"""One step of the short causal convolution with SiLU, for rows that continue a state, as an operation of its own."""

from __future__ import annotations

from torch import Tensor

from weft.ops.backend import Backend
from weft.ops.causal_conv1d import causal_conv1d_update_reference
from weft.ops.padding import settle_padding


def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    state_slots: Tensor,
    *,
    backend: Backend,
    out: Tensor | None = None,
) -> Tensor:
    """One token for each of N rows; the states advance in place.

    Args:
        x: ``[N, C]``; rows may be strided.
        weight: ``[C, W]``, W at least 2.
        bias: ``[C]`` or None.
        conv_state: ``[num_slots, C, W - 1]``.
        state_slots: ``[N]`` int32; rows with slot 0 are padding: zero, or left as they are in a given ``out [N, C]``.

    Returns:
        ``[N, C]`` in x's dtype.
    """
    if backend is not Backend.TORCH:
        from weft.ops.triton.conv_update import causal_conv1d_update_triton

        return causal_conv1d_update_triton(x, weight, conv_state, state_slots, bias=bias, out=out)
    y = causal_conv1d_update_reference(x, weight, conv_state, state_slots, bias=bias)
    return settle_padding(y, state_slots, out)
