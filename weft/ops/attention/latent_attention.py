"""Causal softmax attention of all heads over one latent per token, in pages (MLA, arXiv 2405.04434, absorbed).

Job: attend, and write latents. Owns: the layout ``[num_pages, page_size, P]``: of an entry, the first R columns are
both key and value, those up to E key alone, the others padding. Does not know: how queries are absorbed, or who
filled the pages. Unwritten entries may hold anything, NaN included; they are never read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.forward_context import Batch
from weft.ops.attention import paged_attention
from weft.ops.backend import Backend, with_kernel
from weft.ops.device_work import device_work


@with_kernel("weft.ops.attention.latent")
def latent_attention(
    q: Tensor, latents: Tensor, batch: Batch, *, rank: int, scale: float, backend: Backend
) -> Tensor:  # fmt: skip
    """``softmax(scale * q c^T) c[:rank]`` of each token over its sequence up to and including itself.

    Args:
        q: ``[T, H, E]``, absorbed queries.
        latents: ``[num_pages, page_size, P]`` in q's dtype, P a multiple of 8 and at least E; this step's are written.
        batch: says which tokens form which sequence and where their pages are.
        rank: columns of an entry that are its value.

    Returns:
        ``[T, H, rank]`` in q's dtype; padding rows are zero.
    """
    # Attention with one key head, whose values are its keys.
    if batch.mixture is not None:
        out = torch.empty(*q.shape[:2], rank, dtype=q.dtype, device=q.device)
        return device_work(
            latent_attention.reference, batch, out, {"q": q, "latents": latents, "rank": rank, "scale": scale}
        )
    cache = latents[..., : q.shape[2]].unsqueeze(2)
    return paged_attention.reference(q, cache, cache, batch, scale=scale)[..., :rank].contiguous()


def store_latents(entries: Tensor, latents: Tensor, slot_mapping: Tensor) -> None:
    """Write one entry per token, in place.

    Args:
        entries: ``[T, E]``.
        latents: ``[num_pages, page_size, P]``; columns from E on stay as they are.
        slot_mapping: ``[T]`` int64. Only slots of page 0 may occur more than once.
    """
    latents.flatten(0, 1)[:, : entries.shape[1]].index_copy_(0, slot_mapping, entries.to(latents.dtype))
