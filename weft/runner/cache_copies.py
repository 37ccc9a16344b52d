"""Copies inside the caches: partial pages for copy-on-write, and recurrent states for forks.

A step's copies become one launch per size of a page or state, over all layers.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from weft.config.layer_spec import LayerSpec
from weft.forward_context import LayerCache
from weft.ops.attention import copy_pages
from weft.ops.backend import Backend
from weft.runner.buffers import to_device

Copier = Callable[[Tensor, Tensor], None]
"""``(sources, targets)``, ``[N]`` integers each."""


class CacheCopier:
    """Copies entries of all caches of a model.

    Args:
        layers: what each layer keeps, by its name.
        caches: of these layers; they must stay where they are.
        backend: Triton copies all tensors whose pages or states have one size with one launch, torch tensor by tensor.
    """

    def __init__(
        self,
        layers: Mapping[str, LayerSpec],
        caches: Mapping[str, LayerCache],
        backend: Backend,
        device: torch.device,
    ) -> None:
        self._device, self._backend = device, backend
        self._pages = self._groups([caches[name][t.name] for name, spec in layers.items() for t in spec.paged])
        self._states = self._groups([caches[name][t.name] for name, spec in layers.items() for t in spec.states])

    def _groups(self, tensors: Sequence[Tensor]) -> list[tuple[list[Tensor], Copier]]:
        """The tensors by the bytes of one entry, each group with its copier."""
        groups: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            groups.setdefault(tensor[0].nbytes, []).append(tensor)
        return [(group, self._copier(group)) for group in groups.values()]

    def _copier(self, tensors: Sequence[Tensor]) -> Copier:
        if self._backend.is_torch:
            return lambda source, target: copy_pages(tensors, source, target)
        from weft.ops.attention.pages import PageCopier

        return PageCopier(tensors)

    def copy(self, pages: Sequence[tuple[int, int]] = (), states: Sequence[tuple[int, int]] = ()) -> None:
        """Copy KV pages, and recurrent states between slots, given as ``(source, target)``; of each kind, all are read
        before any is written."""
        if not (pages or states):
            return
        table = to_device(torch.tensor([*pages, *states], dtype=torch.int64).t().contiguous(), self._device)
        self._move(pages, table[:, : len(pages)], self._pages)
        self._move(states, table[:, len(pages) :], self._states)

    def _move(self, pairs: Sequence[tuple[int, int]], table: Tensor, groups: list[tuple[list[Tensor], Copier]]) -> None:
        """``table``: the pairs on the device, ``[2, N]``."""
        if not pairs:
            return
        source, target = table[0], table[1]
        # A launch reads and writes in any order, so sources and targets must be disjoint.
        chained = not {s for s, _ in pairs}.isdisjoint(t for s, t in pairs if s != t)
        for tensors, copier in groups:
            if chained:
                copy_pages(tensors, source, target)
            else:
                copier(source, target)
