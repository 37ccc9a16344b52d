"""From a step's orders to the tensors of a forward pass.

Job: lay the scheduled requests out on one flat token axis and compute everything the layers look up.
Owns: the packed step buffers. Does not know: models, caches' contents, how tokens are sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weft.forward_context import Batch, ChunkTable
from weft.messages import ScheduledRequest, SchedulerOutput
from weft.runner.buffers import StepBuffers
from weft.runner.rows import RowTable

CHUNK = 64
"""Longest chunk of the chunked gated delta rule, in tokens."""

FROM_LAST_TOKEN = -1
"""Stands in ``input_ids`` on the host where the token is the one sampled last, known to the device only."""


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """Inputs of one forward pass and where its results belong.

    Attributes:
        input_ids: ``[T]`` int64.
        batch: metadata for the layers.
        sampled: the orders that sample a token, in batch order.
        sample_indices: ``[N]`` int64, flat index of the last token of each of them.
        sample_rows: ``[N]`` int64, their rows.
        starts: flat index of each order's first token.
    """

    input_ids: Tensor
    batch: Batch
    sampled: list[ScheduledRequest]
    sample_indices: Tensor
    sample_rows: Tensor
    starts: list[int]


class BatchBuilder:
    """Builds batches into buffers that are allocated once, for the largest step.

    Args:
        rows: the runner's rows (read only).
        page_size: tokens per page.
        max_num_tokens, max_num_seqs: the largest step.
        has_recurrent_layers: whether chunk tables are needed.
        device: where the forward pass runs.
    """

    def __init__(
        self,
        rows: RowTable,
        *,
        page_size: int,
        max_num_tokens: int,
        max_num_seqs: int,
        has_recurrent_layers: bool,
        device: torch.device,
    ) -> None:
        self._rows = rows
        self._page_size = page_size
        self._has_recurrent_layers = has_recurrent_layers
        self._device = device
        # A sequence adds at most two chunks to those that its tokens fill, and one per checkpoint (at most 4).
        max_chunks = max_num_tokens // CHUNK + 6 * max_num_seqs
        per_token = ("input_ids", "token_rows", "positions", "slot_mapping")
        per_seq = ("seq_lens", "state_slots", "rows", "sample_indices", "sample_rows")
        per_chunk = ("chunk_seq", "chunk_start", "chunk_length", "chunk_checkpoint")
        sizes = dict.fromkeys(per_token, max_num_tokens) | dict.fromkeys(per_seq, max_num_seqs)
        sizes |= dict.fromkeys(per_chunk, max_chunks) | dict.fromkeys(("cu_seqlens_q", "chunk_first"), max_num_seqs + 1)
        self._buffers = StepBuffers(sizes, device)

    def build(self, orders: SchedulerOutput) -> PreparedStep:
        """Lay out one step. The returned tensors are valid until the next call."""
        requests = orders.requests
        num_decodes = _count_decodes(requests)
        starts = self._fill_tokens(requests)
        self._fill_sequences(requests, starts)
        sampled = [(i, r) for i, r in enumerate(requests) if r.samples]
        self._fill_samples(sampled, requests, starts)
        num_chunks = self._fill_chunks(requests, starts, num_decodes) if self._has_recurrent_layers else 0
        self._buffers.upload()
        num_tokens = starts[-1]
        batch = self._batch(requests, num_tokens, num_decodes, num_chunks)
        return PreparedStep(
            input_ids=self._input_ids(num_tokens),
            batch=batch,
            sampled=[r for _, r in sampled],
            sample_indices=self._buffers.device("sample_indices", len(sampled)).long(),
            sample_rows=self._buffers.device("sample_rows", len(sampled)).long(),
            starts=starts[:-1],
        )

    def _fill_tokens(self, requests: list[ScheduledRequest]) -> list[int]:
        """Token ids, rows, positions and cache slots on the flat axis. Returns each order's first index, and the end."""
        ids, token_rows = self._buffers.host("input_ids"), self._buffers.host("token_rows")
        positions, slots = self._buffers.host("positions"), self._buffers.host("slot_mapping")
        starts, at = [], 0
        for r in requests:
            end = at + r.num_tokens
            known = self._rows.known_tokens(r.row, r.start, r.start + r.num_tokens)
            ids[at : at + len(known)] = known
            ids[at + len(known) : end] = FROM_LAST_TOKEN
            token_rows[at:end] = r.row
            positions[at:end] = np.arange(r.start, r.start + r.num_tokens, dtype=np.int32)
            starts.append(at)
            at = end
        where = positions[:at]
        pages = self._rows.page_table[token_rows[:at], where // self._page_size]
        slots[:at] = pages * self._page_size + where % self._page_size
        return [*starts, at]

    def _fill_sequences(self, requests: list[ScheduledRequest], starts: list[int]) -> None:
        count = len(requests)
        self._buffers.host("cu_seqlens_q")[: count + 1] = starts
        self._buffers.host("seq_lens")[:count] = [r.start + r.num_tokens for r in requests]
        self._buffers.host("state_slots")[:count] = [r.state_slot for r in requests]
        self._buffers.host("rows")[:count] = [r.row for r in requests]

    def _fill_samples(
        self, sampled: list[tuple[int, ScheduledRequest]], requests: list[ScheduledRequest], starts: list[int]
    ) -> None:
        self._buffers.host("sample_indices")[: len(sampled)] = [starts[i + 1] - 1 for i, _ in sampled]
        self._buffers.host("sample_rows")[: len(sampled)] = [r.row for _, r in sampled]

    def _fill_chunks(self, requests: list[ScheduledRequest], starts: list[int], num_decodes: int) -> int:
        """The chunk table of the sequences from ``num_decodes`` on. Returns the number of chunks."""
        seq, start = self._buffers.host("chunk_seq"), self._buffers.host("chunk_start")
        length, checkpoint = self._buffers.host("chunk_length"), self._buffers.host("chunk_checkpoint")
        first = self._buffers.host("chunk_first")
        first[: num_decodes + 1] = 0
        at = 0
        for i, r in enumerate(requests[num_decodes:], start=num_decodes):
            bounds = chunk_bounds(r.start, r.num_tokens, [position for position, _ in r.checkpoints])
            slots = dict(r.checkpoints)
            n = len(bounds) - 1
            seq[at : at + n] = i
            start[at : at + n] = np.asarray(bounds[:-1]) - r.start + starts[i]
            length[at : at + n] = np.diff(bounds)
            checkpoint[at : at + n] = [slots.get(bound, -1) for bound in bounds[1:]]
            at += n
            first[i + 1] = at
        return at

    def _batch(self, requests: list[ScheduledRequest], num_tokens: int, num_decodes: int, num_chunks: int) -> Batch:
        count = len(requests)
        max_seq_len = max(r.start + r.num_tokens for r in requests)
        device = self._buffers.device
        return Batch(
            num_tokens=num_tokens,
            num_seqs=count,
            num_decodes=num_decodes,
            max_query_len=max(r.num_tokens for r in requests),
            max_seq_len=max_seq_len,
            positions=device("positions", num_tokens).long(),
            slot_mapping=device("slot_mapping", num_tokens).long(),
            cu_seqlens_q=device("cu_seqlens_q", count + 1),
            seq_lens=device("seq_lens", count),
            page_table=self._page_table(requests, max_seq_len),
            state_slots=device("state_slots", count),
            chunks=self._chunk_table(count, num_chunks) if num_chunks else None,
        )

    def _page_table(self, requests: list[ScheduledRequest], max_seq_len: int) -> Tensor:
        num_pages = -(-max_seq_len // self._page_size)
        table = self._rows.page_table[[r.row for r in requests], :num_pages]
        return torch.from_numpy(table).to(self._device)

    def _chunk_table(self, num_seqs: int, num_chunks: int) -> ChunkTable:
        device = self._buffers.device
        return ChunkTable(
            seq=device("chunk_seq", num_chunks),
            start=device("chunk_start", num_chunks),
            length=device("chunk_length", num_chunks),
            checkpoint_slot=device("chunk_checkpoint", num_chunks),
            first=device("chunk_first", num_seqs + 1),
        )

    def _input_ids(self, num_tokens: int) -> Tensor:
        """Known tokens from the host, the others from the device's last sampled ones."""
        ids = self._buffers.device("input_ids", num_tokens).long()
        last = self._rows.last_token[self._buffers.device("token_rows", num_tokens).long()]
        return torch.where(ids == FROM_LAST_TOKEN, last, ids)


def chunk_bounds(start: int, num_tokens: int, checkpoints: list[int]) -> list[int]:
    """Ascending chunk boundaries of positions ``start`` to ``start + num_tokens``, both ends included.

    Boundaries stand at absolute multiples of 64, so that a prompt is cut alike however its prefill is split, and at
    every checkpoint position, so that a state can be stored there.
    """
    end = start + num_tokens
    grid = range((start // CHUNK + 1) * CHUNK, end, CHUNK)
    return sorted({start, end, *grid, *checkpoints})


def _count_decodes(requests: list[ScheduledRequest]) -> int:
    """Leading orders that bring one token to an existing state and store no checkpoint."""
    for i, r in enumerate(requests):
        if r.num_tokens != 1 or r.start == 0 or r.checkpoints:
            return i
    return len(requests)
