"""What describes a step on its way to tensors: where its requests lie (``Layout``), its sizes (``StepShape``), and its
input tensors (``StepInputs``)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import msgspec
import numpy as np
from torch import Tensor

from weft.config.graph_modes import BatchDescriptor
from weft.forward_context import Batch
from weft.graph.capture_sizes import chunk_capacity
from weft.messages import ScheduledRequest


@dataclass(slots=True)
class Layout:
    """Where the requests of a step lie, ``[S]`` int64 each.

    Attributes:
        rows: of the runner's tables.
        first: position of the first token to run.
        counts: tokens to run.
        seq_lens: tokens after this step.
        bounds: ``[S + 1]``, where each request begins on the flat token axis, and the end.
    """

    rows: np.ndarray
    first: np.ndarray
    counts: np.ndarray
    seq_lens: np.ndarray
    bounds: np.ndarray

    @staticmethod
    def of(requests: list[ScheduledRequest]) -> Layout:
        columns = [r.row for r in requests], [r.start for r in requests], [r.num_tokens for r in requests]
        rows, first, counts = np.array(columns, dtype=np.int64)
        bounds = np.zeros(len(requests) + 1, dtype=np.int64)
        np.add.accumulate(counts, out=bounds[1:])
        return Layout(rows, first, counts, first + counts, bounds)


class StepShape(msgspec.Struct, frozen=True):
    """Sizes of one step, all known on the host. Padded sizes make another ``StepShape``.

    Attributes:
        num_tokens, num_seqs, num_decodes, max_query_len, max_seq_len: as in ``Batch``.
        num_chunks: rows of the chunk table; 0 where every sequence decodes, and without recurrent layers.
        num_samples: sequences that sample a token.
        padded: True if rows beyond the real ones are present; their number is then known to the device only.
        query_len: tokens of every sequence where all of them verify as many drafts, 0 otherwise.
        may_have_media: as in ``Batch``.
        any_mixture: True if also how many sequences decode is known to the device only.
    """

    num_tokens: int
    num_seqs: int
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    num_chunks: int
    num_samples: int
    padded: bool = False
    any_mixture: bool = False
    query_len: int = 0
    may_have_media: bool = False

    @property
    def is_decode(self) -> bool:
        """Every sequence brings one token, of text, and samples one."""
        return self.num_decodes == self.num_seqs == self.num_samples and not self.may_have_media

    def descriptor(self) -> BatchDescriptor:
        """What chooses the graph."""
        return BatchDescriptor(
            self.num_tokens,
            uniform_decode=self.is_decode,
            num_prefills=self.num_seqs - self.num_decodes,
            num_chunks=self.num_chunks,
            num_decodes=self.num_decodes,
        )

    @staticmethod
    def decodes(size: int, max_seq_len: int) -> StepShape:
        """What a graph of ``size`` decodes computes."""
        return StepShape(size, size, size, 1, max_seq_len, 0, size, padded=True)

    @staticmethod
    def verification(size: int, query_len: int, max_seq_len: int) -> StepShape:
        """What a graph of ``size`` sequences computes that verify ``query_len - 1`` drafts each."""
        tokens = size * query_len
        return StepShape(tokens, size, 0, query_len, max_seq_len, 0, tokens, padded=True, query_len=query_len)

    @staticmethod
    @functools.cache
    def mixture(
        num_tokens: int, max_num_seqs: int, max_seq_len: int, keeps_states: bool, may_have_media: bool = False
    ) -> StepShape:
        """What a graph of ``num_tokens`` tokens computes, whatever sequences they belong to."""
        num_seqs, chunks = min(num_tokens, max_num_seqs), chunk_capacity(num_tokens) if keeps_states else 0
        return StepShape(
            num_tokens, num_seqs, 0, num_tokens, max_seq_len, chunks, num_seqs, padded=True, any_mixture=True,
            may_have_media=may_have_media,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Sampling parameters of the sequences that sample, ``[N]`` each, from the static buffers.

    ``indices``: flat index of the last token; ``rows``: where the token is remembered; the others as in the sampler.
    """

    indices: Tensor
    rows: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor

    def select(self, places: Tensor) -> SampleRows:
        """Some of them: ``places [M]`` int64."""
        return SampleRows(*(getattr(self, name).index_select(0, places) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Device tensors of one step; ``rows [S]`` int64, those of its sequences."""

    input_ids: Tensor
    batch: Batch
    samples: SampleRows
    rows: Tensor
