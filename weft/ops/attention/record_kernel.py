"""Copies between records and the caches of all layers, in one launch: ``Records`` on the GPU."""

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv

_WORDS = 2048


@jit(
    do_not_specialize=["num_words"],
    do_not_specialize_on_alignment=["table", "entries", "records"],
)
def _record_kernel(table, entries, records, num_words, BLOCK: tl.constexpr, TO_CACHES: tl.constexpr):
    """Program (part, record, cache) copies a part of one entry of one cache, as 32-bit words. ``num_words``: distance
    between two records."""
    place = table + 3 * tl.program_id(2)
    cache = tl.load(place).to(tl.pointer_type(tl.int32))
    first, size = tl.load(place + 1), tl.load(place + 2)
    words = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = words < size
    entry = cache + tl.load(entries + tl.program_id(1)).to(tl.int64) * size + words
    record = records + tl.program_id(1).to(tl.int64) * num_words + first + words
    if TO_CACHES:
        tl.store(entry, tl.load(record, mask=mask), mask=mask)
    else:
        tl.store(record, tl.load(entry, mask=mask), mask=mask)


class RecordCopier:
    """Copies whole records with one launch.

    Args:
        rows: the caches as bytes, ``[num_entries, bytes]`` each, a multiple of 4.
        spans: begin and end of each cache's bytes in a record.
    """

    def __init__(self, rows: Sequence[Tensor], spans: Sequence[tuple[int, int]]) -> None:
        assert all(cache.is_contiguous() for cache in rows)
        entries = zip(rows, spans, strict=True)
        table = [[cache.data_ptr(), begin // 4, (end - begin) // 4] for cache, (begin, end) in entries]
        self._caches = tuple(rows)
        self._largest = max(cache.shape[1] for cache in rows) // 4
        self._table = torch.tensor(table, dtype=torch.int64, device=rows[0].device)

    def __call__(self, entries: Tensor, records: Tensor, *, to_caches: bool) -> None:
        """``records``: ``[N, bytes]``, whose rows may be longer than a record."""
        words = records.view(torch.int32)
        grid = (cdiv(self._largest, _WORDS), entries.shape[0], len(self._caches))
        _record_kernel[grid](
            self._table, entries, words, words.stride(0), BLOCK=_WORDS, TO_CACHES=to_caches, num_warps=4
        )
