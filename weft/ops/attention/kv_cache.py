"""Writing keys and values into the paged KV cache, and copying whole pages.

Job: the two writes to the cache. Owns: the meaning of a slot (``page * page_size + offset``). Does not know: who owns
a page. Page 0 is reserved: padding tokens write there, nobody reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.ops.fp8 import E4M3, E4M3_MAX


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write one key and one value per token, in place, as torch operations. Part of ``qk_norm_rope``.

    Args:
        k, v: ``[T, Hkv, D]``.
        k_cache, v_cache: ``[num_pages, page_size, Hkv, D]``, contiguous, in k's dtype or e4m3 (saturating).
        slot_mapping: ``[T]`` int64. Only slots of page 0 may occur more than once.
    """
    for x, cache in ((k, k_cache), (v, v_cache)):
        if cache.dtype is E4M3:
            x = x.clamp(-E4M3_MAX, E4M3_MAX)
        as_bytes(cache).flatten(0, 1).index_copy_(0, slot_mapping, as_bytes(x.to(cache.dtype)))


def copy_pages(caches: Sequence[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy page ``src[i]`` to page ``dst[i]`` in every cache tensor (any tensor indexed by page or by slot), in place.

    Args:
        caches: tensors ``[num_pages, ...]``.
        src, dst: ``[N]`` integer tensors. All reads happen before any write; ``dst`` has no duplicates.
    """
    src, dst = src.long(), dst.long()
    for cache in caches:
        cache = as_bytes(cache)
        cache.index_copy_(0, dst, cache.index_select(0, src))


def as_bytes(x: Tensor) -> Tensor:
    """e4m3 as bytes, which torch can copy by index on every device; other dtypes as they are."""
    return x.view(torch.uint8) if x.dtype is E4M3 else x
