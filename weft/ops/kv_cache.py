"""Writing keys and values into the paged KV cache, and copying whole pages.

Job: the two writes to the cache. Owns: the meaning of a slot (``page * page_size + offset``). Does not know: who owns
a page. Page 0 is reserved: padding tokens write there, nobody reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write one key and one value per token, in place, as torch operations. Part of ``qk_norm_rope``.

    Args:
        k, v: ``[T, Hkv, D]``.
        k_cache, v_cache: ``[num_pages, page_size, Hkv, D]``, contiguous.
        slot_mapping: ``[T]`` int64. Only slots of page 0 may occur more than once.
    """
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping, k.to(k_cache.dtype))
    v_cache.flatten(0, 1).index_copy_(0, slot_mapping, v.to(v_cache.dtype))


def copy_pages(caches: Sequence[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy page ``src[i]`` to page ``dst[i]`` in every cache tensor (any tensor indexed by page or by slot), in place.

    Args:
        caches: tensors ``[num_pages, ...]``.
        src, dst: ``[N]`` integer tensors. All reads happen before any write; ``dst`` has no duplicates.
    """
    src, dst = src.long(), dst.long()
    for cache in caches:
        cache.index_copy_(0, dst, cache.index_select(0, src))
