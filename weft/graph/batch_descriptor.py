"""The sizes of a batch, by which its graph is chosen, and the room that a graph of mixed batches has."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import msgspec

from weft.config.chunks import CHUNK_SIZE
from weft.config.graph_modes import GraphMode

MAX_PREFILLS = 16
"""Prefilling sequences that a graph takes besides any number of decodes. Room for more would cost idle programs in
every step; a step that starts more sequences at once has enough work to run without a graph."""

_CHUNKS_PER_PREFILL = 3
"""Upper bound on partial chunks of a sequence: the first, the last, and one that ends at a checkpoint."""


def chunk_capacity(num_tokens: int) -> int:
    """Return how many chunks a graph of ``num_tokens`` tokens takes (none is empty, most are full)."""
    return min(num_tokens, num_tokens // CHUNK_SIZE + _CHUNKS_PER_PREFILL * MAX_PREFILLS)


class BatchDescriptor(msgspec.Struct, frozen=True):
    """Sizes of one batch, all known on the host. A padded batch has a ``BatchDescriptor`` of its own.

    Attributes:
        num_chunks: rows of the chunk table; 0 where every sequence decodes, and without recurrent layers.
        num_samples: positions at which a token is sampled.
        padded: True if rows beyond the real ones are present; their number is then known to the device only.
        is_mixed: True if also the number of decodes is known to the device only.
        query_len: tokens of every sequence where all verify equally many drafts, 0 otherwise.
        may_have_media, num_prefill_keys, least_chunk: as in ``Batch``.
    """

    num_tokens: int
    num_seqs: int
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    num_chunks: int
    num_samples: int
    padded: bool = False
    is_mixed: bool = False
    query_len: int = 0
    may_have_media: bool = False
    num_prefill_keys: int | None = None
    least_chunk: int | None = None

    @property
    def is_decode(self) -> bool:
        """True if every sequence brings one token, of text, and samples one."""
        return self.num_decodes == self.num_seqs == self.num_samples and not self.may_have_media

    @property
    def is_uniform(self) -> bool:
        """True if every sequence decodes, or verifies equally many drafts: the step runs as one function."""
        return self.query_len > 0 or self.is_decode

    @property
    def num_prefills(self) -> int:
        """Sequences that do not decode."""
        return self.num_seqs - self.num_decodes

    @staticmethod
    def decodes(size: int, max_seq_len: int) -> BatchDescriptor:
        """Describe a graph of ``size`` decodes."""
        return BatchDescriptor(size, size, size, 1, max_seq_len, 0, size, padded=True)

    @staticmethod
    def verification(size: int, query_len: int, max_seq_len: int) -> BatchDescriptor:
        """Describe a graph of ``size`` sequences that verify ``query_len - 1`` drafts each."""
        tokens = size * query_len
        return BatchDescriptor(tokens, size, 0, query_len, max_seq_len, 0, tokens, padded=True, query_len=query_len)

    @staticmethod
    @functools.cache
    def mixed(
        num_tokens: int, max_num_seqs: int, max_seq_len: int, keeps_states: bool, may_have_media: bool = False
    ) -> BatchDescriptor:
        """Describe a graph of ``num_tokens`` tokens of any sequences."""
        num_seqs, chunks = min(num_tokens, max_num_seqs), chunk_capacity(num_tokens) if keeps_states else 0
        return BatchDescriptor(
            num_tokens, num_seqs, 0, num_tokens, max_seq_len, chunks, num_seqs, padded=True, is_mixed=True,
            may_have_media=may_have_media,
        )  # fmt: skip


class MeasuredModes(Protocol):
    """Graph modes that a profile of ``weft tune`` chooses (``pieces/mode_table.py``)."""

    def mode(self, batch: BatchDescriptor) -> GraphMode | None:
        """Return the fastest mode; None for a batch larger than the measured ones."""
        ...

    def decode_sizes(self, sizes: Sequence[int]) -> list[int]:
        """Return those of the ascending ``sizes`` of full decode graphs that some batch runs in."""
        ...

    def token_sizes(self, mode: GraphMode, sizes: Sequence[int]) -> list[int]:
        """Return those of the ascending token counts captured for ``mode`` that some batch runs in."""
        ...
