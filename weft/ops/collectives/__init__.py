"""The sum over ranks, fused with what follows it in the residual stream: addition and RMSNorm.

One launch for a few rows. Does not know: process groups, who allocated the memory through which ranks exchange rows
(``parallel/peer_memory.py``).
"""

import torch
from torch import Tensor

from weft.ops.collectives.peer_buffers import PeerBuffers, SentRows
from weft.ops.norm import rms_norm_reference


def all_reduce_rms_norm_reference(
    parts: list[Tensor], residual: Tensor | None, weight: Tensor, eps: float, *, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """Torch reference of ``all_reduce_rms_norm``; ``parts`` are the ``x`` of all ranks."""
    total = torch.stack([part.float() for part in parts]).sum(0)
    if residual is not None:
        total = total + residual.float()
    total = total.to(parts[0].dtype)
    return rms_norm_reference(total, weight, eps, zero_centered=zero_centered), total


def all_reduce_rms_norm(
    x: Tensor | SentRows,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    peers: PeerBuffers,
    *,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """``(rms_norm(s), s)`` with ``s = sum of every rank's x + residual``. A GPU operation; every rank must launch it.

    Sums are formed in float32, in the same order on every rank, and rounded once, so every rank gets the same bits.

    Args:
        x: ``[T, width]``, T at most ``peers.max_rows``, the same on all ranks; or the partial sums ``[S, T, width]``
            of ``linear_parts``, which are added in order and rounded first; or rows that were sent already.
        residual: ``[T, width]``, the same on all ranks; None counts as zero.
        weight: ``[width]``, in the dtype of the rows.
    """
    from weft.ops.collectives.packed import fits_packed, packed_all_reduce_rms_norm
    from weft.ops.collectives.signalled import all_reduce_rms_norm_triton

    if isinstance(x, SentRows) or fits_packed(x, residual, weight, peers.size):
        return packed_all_reduce_rms_norm(x, residual, weight, eps, peers, zero_centered=zero_centered)
    return all_reduce_rms_norm_triton(x, residual, weight, eps, peers, zero_centered=zero_centered)
