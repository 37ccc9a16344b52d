"""Copying whole slots (states) or pages in the cache tensors of all layers at once: the fork of a recurrent state.

Job: ``dst[i] <- src[i]`` in every tensor, in as few launches as there are slot sizes. Owns: the tables of the tensors'
addresses. Does not know: what a slot holds, or who owns it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.ops.backend import Backend
from weft.ops.kv_cache import copy_pages


class SlotCopier:
    """Copies slots in a fixed set of cache tensors, bound once.

    Args:
        caches: contiguous tensors ``[num_slots, ...]`` on one device. They must stay where they are (the copier keeps
            their addresses, and a reference to them).
        backend: ``TORCH`` copies tensor by tensor; ``TRITON`` launches one kernel per distinct slot size.
    """

    def __init__(self, caches: Sequence[Tensor], *, backend: Backend) -> None:
        assert all(cache.is_contiguous() for cache in caches), "cache tensors must be contiguous"
        self._caches, self._backend = tuple(caches), backend
        by_size: dict[int, list[int]] = {}
        for cache in caches:
            by_size.setdefault(cache[0].numel() * cache.element_size(), []).append(cache.data_ptr())
        self._groups = {
            size: torch.tensor(addresses, dtype=torch.int64, device=caches[0].device)
            for size, addresses in by_size.items()
        }

    def copy(self, src: Tensor, dst: Tensor) -> None:
        """Copy slot ``src[i]`` to slot ``dst[i]`` in every tensor.

        Args:
            src, dst: ``[N]`` int32. No slot may be in both, ``dst`` has no duplicates; pairs with ``src[i] == dst[i]``
                (padding: 0 to 0) are skipped.
        """
        if self._backend is Backend.TORCH:
            copy_pages(self._caches, src, dst)
            return
        from weft.ops.triton.slot_copy import copy_slots_triton

        for slot_bytes, addresses in self._groups.items():
            copy_slots_triton(addresses, slot_bytes, src, dst)
