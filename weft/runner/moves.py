"""Copies inside the caches: partial pages for copy-on-write, and recurrent states for forks.

Job: turn a step's orders of copies into as few launches as there are kinds of cache tensors. Owns: nothing but the
caches' addresses. Does not know: why something is copied, whose it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from weft.forward_context import KVCache, StateCache
from weft.ops.backend import Backend
from weft.ops.kv_cache import copy_pages
from weft.runner.buffers import to_device

Copier = Callable[[Tensor, Tensor], None]
"""``(sources, targets)``, ``[N]`` integers each."""


class CacheMover:
    """Copies entries of all caches of a model.

    Args:
        caches: by layer name; they must stay where they are.
        backend: Triton copies a whole kind of tensors with one launch, torch tensor by tensor.
    """

    def __init__(self, caches: Iterable[KVCache | StateCache], backend: Backend, device: torch.device) -> None:
        caches = list(caches)
        attention = [cache for cache in caches if isinstance(cache, KVCache)]
        linear = [cache for cache in caches if isinstance(cache, StateCache)]
        self._device, self._backend = device, backend
        self._pages = [t for cache in attention for t in (cache.k, cache.v)]
        self._states = [[cache.conv for cache in linear], [cache.recurrent for cache in linear]]
        self._copy_pages = self._copier(self._pages)
        self._copy_states = [self._copier(tensors) for tensors in self._states]

    def _copier(self, tensors: Sequence[Tensor]) -> Copier:
        if self._backend is Backend.TORCH or not tensors:
            return lambda source, target: copy_pages(tensors, source, target)
        from weft.ops.triton.pages import PageCopier

        return PageCopier(tensors)

    def copy_pages(self, orders: Sequence[tuple[int, int]]) -> None:
        """Copy KV pages, given as ``(source, target)``; all are read before any is written."""
        self._move(orders, [(self._pages, self._copy_pages)])

    def fork_states(self, orders: Sequence[tuple[int, int]]) -> None:
        """Copy recurrent states, given as ``(source, target)`` slots; all are read before any is written."""
        self._move(orders, list(zip(self._states, self._copy_states, strict=True)))

    def _move(self, orders: Sequence[tuple[int, int]], kinds: list[tuple[list[Tensor], Copier]]) -> None:
        if not orders:
            return
        table = to_device(torch.tensor(orders, dtype=torch.int64).t().contiguous(), self._device)
        source, target = table[0], table[1]
        # One launch reads and writes in any order, so it must not write what it reads.
        chained = not {s for s, _ in orders}.isdisjoint(t for s, t in orders if s != t)
        for tensors, copier in kinds:
            if chained:
                copy_pages(tensors, source, target)
            else:
                copier(source, target)
