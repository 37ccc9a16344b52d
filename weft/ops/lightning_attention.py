"""One step of lightning attention (arXiv 2401.04658): linear attention whose heads decay at fixed rates."""

from __future__ import annotations

from torch import Tensor

from weft.ops.backend import Backend
from weft.ops.linear_attention import linear_attention_step_reference
from weft.ops.padding import settle_padding


def lightning_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor,
    state_slots: Tensor,
    *,
    backend: Backend,
    out: Tensor | None = None,
) -> Tensor:
    """One token for each of N rows that continue a state, which advances in place.

    Args:
        q, k, v: ``[N, H, D]``; rows may be strided.
        log_decay: ``[H]`` float32, at most 0.
        state: ``[num_slots, H, D, D]``.
        state_slots: ``[N]`` int32; rows with slot 0 are padding: zero, or left as they are in a given ``out``.
        out: ``[N, H, D]`` to write to.

    Returns:
        ``[N, H, D]`` in q's dtype.
    """
    if backend is not Backend.TORCH:
        from weft.ops.triton.linear_attention_step import linear_attention_step

        keep = out is not None
        return linear_attention_step(q, k, v, log_decay, state, state_slots, out=out, keep_padding=keep)
    g = log_decay.expand(q.shape[0], -1)
    y = linear_attention_step_reference(q, k, v, g, None, None, state, state_slots)
    return settle_padding(y, state_slots, out)
