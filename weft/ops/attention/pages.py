"""Copies of pages, or of states, over all layers at once: ``copy_pages`` on the GPU."""

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv

_WORDS = 2048


@jit(do_not_specialize=["num_words"], do_not_specialize_on_alignment=["src", "dst"])
def _copy_kernel(addresses, src, dst, num_words, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Program (part, copy, cache) copies a part of one page of one cache, as 32-bit words."""
    enter(EARLY)
    cache = tl.load(addresses + tl.program_id(2)).to(tl.pointer_type(tl.int32))
    begin = tl.load(src + tl.program_id(1)).to(tl.int64)
    end = tl.load(dst + tl.program_id(1)).to(tl.int64)
    words = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = words < num_words
    tl.store(cache + end * num_words + words, tl.load(cache + begin * num_words + words, mask=mask), mask=mask)


class PageCopier:
    """Copies pages in every cache of a model with one launch.

    Holds the caches' addresses on the device, so the caches must outlive it and stay where they are.

    Args:
        caches: contiguous tensors ``[num_pages, ...]``, all with pages of the same number of bytes, a multiple of 4.
    """

    def __init__(self, caches: Sequence[Tensor]) -> None:
        sizes = {cache.stride(0) * cache.element_size() for cache in caches}
        assert len(sizes) == 1 and all(cache.is_contiguous() for cache in caches)
        page_bytes = sizes.pop()
        assert page_bytes % 4 == 0
        self._num_words = page_bytes // 4
        self._caches = tuple(caches)
        addresses = [cache.data_ptr() for cache in caches]
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=caches[0].device)

    def __call__(self, src: Tensor, dst: Tensor) -> None:
        """Page ``src[i]`` to page ``dst[i]`` in every cache, ``[N]`` integers each.

        No page may be the source of one copy and the destination of another, except that page 0 may be copied to
        itself (padding).
        """
        grid = (cdiv(self._num_words, _WORDS), src.shape[0], len(self._caches))
        _copy_kernel[grid](
            self._addresses, src, dst, self._num_words, BLOCK=_WORDS, num_warps=4, **early_launch(src.device)
        )
