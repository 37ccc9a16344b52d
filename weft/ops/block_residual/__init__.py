"""Attention of a block's input over the outputs of earlier blocks (Inkling 2).

Job: a learned query weighs the normalised residual states of earlier blocks and the latest one; an RMSNorm follows.
Owns: the arithmetic, float32 inside with one rounding at the end. Does not know: layers, which states are kept.
"""

import torch
from torch import Tensor

from weft.ops.backend import Backend, with_kernel
from weft.ops.traced import traced_op

STATE_EPS = 1e-6
"""Added to the mean square of a state. The reference has no key for it."""


@traced_op(fusible=True)
@with_kernel("weft.ops.block_residual.kernels")
def read_blocks(
    blocks: Tensor, latest: Tensor, queries: Tensor, weights: Tensor, eps: float, *, backend: Backend
) -> Tensor:
    """Read a token's residual states, once for each query.

    Every state is divided by its root mean square. A query's scores are its products with the states, divided by the
    root of H. The states are added with the scores' softmax as weights, and the sum is normalised.

    Args:
        blocks: ``[T, B, H]``, contiguous, B at least 1.
        latest: ``[T, H]``, of any float dtype.
        queries: ``[Q, H]`` float32.
        weights: ``[Q, H]``, of the norms.
        eps: of the norms.

    Returns:
        ``[Q, T, H]`` in the dtype of ``weights``.
    """
    states = torch.cat([blocks.float(), latest.float()[:, None]], dim=1)
    states = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + STATE_EPS)
    scores = torch.einsum("qh,tbh->qtb", queries, states) * states.shape[2] ** -0.5
    read = torch.einsum("qtb,tbh->qth", scores.softmax(-1), states)
    read = read * torch.rsqrt(read.square().mean(-1, keepdim=True) + eps) * weights.float()[:, None]
    return read.to(weights.dtype)
