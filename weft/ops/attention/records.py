"""Records: the content of one page, or of one state slot, of all layers in one row of bytes.

A tier below the device stores records. ``gather`` reads them from the caches of a model, ``scatter`` writes them there.
The bytes of a record are those of its entry in each cache, in the order of the caches.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from weft.ops.backend import Backend


class Records:
    """The records of one kind, pages or states, of a model. The caches must stay where they are.

    Args:
        caches: contiguous tensors ``[num_entries, ...]``.

    Attributes:
        num_bytes: bytes of one record.
    """

    def __init__(self, caches: Sequence[Tensor], backend: Backend) -> None:
        self._rows = [cache.flatten(1).view(torch.uint8) for cache in caches]
        sizes = [rows.shape[1] for rows in self._rows]
        ends = list(accumulate(sizes))
        self._spans = list(zip([0, *ends[:-1]], ends, strict=True)) if sizes else []
        self.num_bytes = ends[-1] if ends else 0
        self._copier = None
        if backend is Backend.TRITON and sizes and all(size % 4 == 0 for size in sizes):
            from weft.ops.attention.record_kernel import RecordCopier

            self._copier = RecordCopier(self._rows, self._spans)

    def gather(self, entries: Tensor, records: Tensor) -> None:
        """Copy entries ``[N]`` into ``records``, ``[N, bytes]`` with at least ``num_bytes`` columns."""
        if self._copier is not None:
            self._copier(entries, records, to_caches=False)
            return
        for rows, (begin, end) in zip(self._rows, self._spans, strict=True):
            records[:, begin:end] = rows.index_select(0, entries)

    def scatter(self, records: Tensor, entries: Tensor) -> None:
        """Copy ``records`` into entries ``[N]``, without duplicates."""
        if self._copier is not None:
            self._copier(entries, records, to_caches=True)
            return
        for rows, (begin, end) in zip(self._rows, self._spans, strict=True):
            rows.index_copy_(0, entries, records[:, begin:end])
