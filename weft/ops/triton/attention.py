"""Paged attention on the GPU: which of its two kernels a batch needs.

Job: ``paged_attention`` in Triton. Owns: nothing. Does not know: layers, or who filled the pages.

Graph-safe: grids depend on tensor shapes alone; which rows are real, and which sequences decode, is read on the
device. Only *whether* each kernel is launched depends on the batch's host fields: a graph of a mixture launches both,
and serves any batch of its size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.forward_context import Batch
from weft.ops.triton.attention_decode import decode_tile, launch_decode
from weft.ops.triton.attention_prefill import launch_prefill, prefill_tile


def paged_attention_triton(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, *, scale: float, out: Tensor | None = None
) -> Tensor:
    """``paged_attention`` of ``weft/ops/attention.py``; float32 inputs keep float32 accuracy."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    num_rows, num_seqs = q.shape[0], batch.seq_lens.shape[0]
    only_decodes = batch.max_query_len == 1 and batch.mixture is None
    decodes = only_decodes or batch.num_decodes > 0 or batch.mixture is not None
    if decodes:
        _decode(q, k_cache, v_cache, batch, scale, out)
    if not only_decodes or num_rows > num_seqs:
        group = q.shape[1] // k_cache.shape[2]
        tile = prefill_tile(num_rows, q.shape[1], q.shape[2], group, q.element_size())
        launch_prefill(q, k_cache, v_cache, batch, scale, out, tile, skip_decodes=decodes)
    return out


def _decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float, out: Tensor) -> None:
    num_kv_heads = k_cache.shape[2]
    group = q.shape[1] // num_kv_heads
    tile = decode_tile(batch.seq_lens.shape[0], num_kv_heads, q.shape[2], group, q.element_size())
    launch_decode(q, k_cache, v_cache, batch, scale, out, tile)
