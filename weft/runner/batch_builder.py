"""From a scheduler output to the tensors of a forward pass.

Job: lay the scheduled requests out on one flat token axis and compute everything the layers and the sampler look up.
Owns: the packed step buffers. Does not know: models, what the caches hold, graphs.

Two halves, so that the second can be captured. On the host (numpy): ``fill`` lays the step out, ``pad_...`` fill up to
the sizes of the graph that it is to run in, ``send`` brings all to the device. ``materialise`` makes tensors from the
static device buffers for given, possibly padded sizes, with device work only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from weft.cache.lease import MAX_CHECKPOINTS
from weft.config.chunks import CHUNK_SIZE
from weft.forward_context import Batch, ChunkTable, MixedBatch, Verification
from weft.graph.batch_descriptor import MAX_PREFILLS, BatchDescriptor, chunk_capacity
from weft.messages import ScheduledRequest, SchedulerOutput
from weft.ops.backend import Backend
from weft.ops.drafts.types import FROM_LAST_TOKEN
from weft.runner import logits_rows
from weft.runner.buffers import PAGE_UPDATES, StepBuffers
from weft.runner.media_inputs import place_media
from weft.runner.padding import CHUNK_COLUMNS, Padding
from weft.runner.rows import RowTable
from weft.runner.step_inputs import Layout, SamplingTensors, StepInputs


class BatchBuilder:
    """Builds batches in buffers that are allocated once, for the largest step.

    Args:
        rows: the runner's rows (read only, but for the device's page table).
        page_size: tokens per page.
        max_num_tokens, max_num_seqs: the largest step.
        keeps_states: the model has recurrent layers, which read a chunk table.
        num_drafts: most drafts of a request in a step.
        num_drafts_at: from the requests of a step to the drafts that each of them should have.
        verifies: steps of sequences with equally many drafts get a ``Verification``.
        ends_sparse: the model's last layer has experts.
        first_media_id, first_media_position: token id and position of the first token of a step, if it is one of an
            image; the next tokens have the next ones (``models/vision_language.py``). None: the model reads no images.
        device, backend: where and how the forward pass runs.
    """

    def __init__(
        self,
        rows: RowTable,
        *,
        page_size: int,
        max_num_tokens: int,
        max_num_seqs: int,
        keeps_states: bool,
        num_drafts: int,
        num_drafts_at: Callable[[int], int],
        verifies: bool,
        ends_sparse: bool,
        device: torch.device,
        backend: Backend = Backend.TORCH,
        first_media_id: int | None = None,
        first_media_position: int = 0,
    ) -> None:
        self._first_media_id, self._first_media_position = first_media_id, first_media_position
        self._rows, self._padding = rows, Padding(rows.padding_row)
        self.page_size, self._backend = page_size, backend
        self._max_num_seqs = max_num_seqs
        self.num_drafts, self.num_drafts_at = num_drafts, num_drafts_at
        self.verifies, self._keeps_states, self._ends_sparse = verifies, keeps_states, ends_sparse
        arrays = _arrays(max_num_tokens, max_num_seqs, num_drafts, has_chunks=keeps_states)
        # As many new pages as the table has places: a cache hit can bring thousands.
        self._buffers = StepBuffers(arrays, len(PER_TOKEN), max_num_seqs * rows.max_pages, device, backend)
        self.one_each = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._places = np.arange(max_num_tokens)
        self._host: dict[str, np.ndarray] = {}
        self._num_tokens = self._num_updates = 0

    # -- host ----------------------------------------------------------------------------------------------------

    def fill(self, scheduler_output: SchedulerOutput) -> BatchDescriptor:
        """Lay out one step on the host. Returns the real sizes."""
        requests = scheduler_output.requests
        self._host = self._buffers.begin()
        self._num_updates = self._fill_page_updates(requests)
        num_decodes = scheduler_output.num_decodes
        layout = Layout.of(requests)
        self._fill_tokens(requests, layout)
        self._fill_sequences(requests, layout)
        num_samples = self._fill_samples(requests, layout)
        num_chunks = 0
        query_len = self._query_len(requests) if self.num_drafts else 0
        if query_len:
            slots = [slot for r in requests for slot in self._verify_slots(r)]
            self._host["verify_slots"][: len(slots)] = slots
            self._host["follows"][: len(requests)] = [r.follows for r in requests]
        elif self._keeps_states and num_decodes < len(requests):
            num_chunks = self._fill_chunks(requests, layout.bounds.tolist(), num_decodes)
        self._num_tokens = num_tokens = int(layout.bounds[-1])
        self._host["counts"][:] = num_tokens, len(requests), num_decodes
        shape = BatchDescriptor(
            num_tokens=num_tokens,
            num_seqs=len(requests),
            num_decodes=num_decodes,
            max_query_len=int(layout.counts.max()),
            max_seq_len=int(layout.seq_lens.max()),
            num_chunks=num_chunks,
            num_samples=num_samples,
            query_len=query_len,
            may_have_media=bool(self._rows.rope_positions) and any(r.media for r in requests),
        )
        if not shape.is_decode:
            logits_rows.fill(self._host, layout)
        return shape

    def _query_len(self, requests: list[ScheduledRequest]) -> int:
        """Tokens of each request where all verify as many drafts as they should, and store no other states; otherwise
        0: for fewer drafts no kernels are compiled at start."""
        count = self.num_drafts_at(len(requests))
        if not (self.verifies and count and len(requests[0].draft_token_ids) == count):
            return 0
        states = count if self._keeps_states else 0
        alike = all(len(r.draft_token_ids) == count and len(r.checkpoints) == states for r in requests)
        return 1 + count if alike else 0

    def _verify_slots(self, request: ScheduledRequest) -> list[int]:
        """The slots of the states after each token; 0 where the model has none."""
        if not self._keeps_states:
            return [0] * request.num_tokens
        return [*(slot for _, slot in request.checkpoints), request.state_slot]

    def send(self) -> None:
        """Copy the step to the device, where its new pages enter the page table."""
        self._buffers.upload(self._num_tokens, self._num_updates, self._rows.device_page_table)

    def mark_sent(self) -> None:
        """The step's work is queued: see ``StepBuffers.mark``."""
        self._buffers.mark()

    def _fill_page_updates(self, requests: list[ScheduledRequest]) -> int:
        updates = self._host[PAGE_UPDATES]
        at = 0
        for r in requests:
            if r.new_pages:
                first, pages = self._rows.append_pages(r)
                end = at + 2 * len(pages)
                updates[at:end:2] = np.arange(first, first + len(pages))
                updates[at + 1 : end : 2] = pages
                at = end
        return at // 2

    def _fill_tokens(self, requests: list[ScheduledRequest], layout: Layout) -> None:
        """Token ids, rows, positions and cache slots on the flat axis."""
        end, counts, starts = int(layout.bounds[-1]), layout.counts, layout.bounds[:-1]
        ids, slots, table = self._host["input_ids"], self._host["slot_mapping"], self._rows
        token_rows, positions = self._host["token_rows"][:end], self._host["positions"][:end]
        token_rows[:] = layout.rows.repeat(counts)
        np.add(self._places[:end], (layout.first - starts).repeat(counts), out=positions)
        ids[:end] = FROM_LAST_TOKEN
        for i in (layout.first < table.num_known_tokens[layout.rows]).nonzero()[0].tolist():
            r, at = requests[i], int(starts[i])
            known = table.known_tokens(r.row, r.start, r.start + r.num_tokens)
            ids[at : at + len(known)] = known
        for end, r in zip(layout.bounds[1:].tolist(), requests, strict=True) if self.num_drafts else ():
            if r.draft_token_ids:
                ids[end - len(r.draft_token_ids) : end] = r.draft_token_ids
        places = positions // self.page_size
        pages = table.page_table.ravel().take(token_rows * table.max_pages + places)
        slots[:end] = (pages - places) * self.page_size + positions
        for at, r in zip(starts.tolist(), requests, strict=True):
            if r.start < r.write_start:  # to page 0: what is stored here belongs to others
                slots[at : at + min(r.num_tokens, r.write_start - r.start)] = 0
        if table.rope_positions:
            place_media(self._host, requests, layout, table, self._first_media_id, self._first_media_position)

    def _fill_sequences(self, requests: list[ScheduledRequest], layout: Layout) -> None:
        count = len(requests)
        self._host["cu_seqlens_q"][: count + 1] = layout.bounds
        self._host["seq_lens"][:count] = layout.seq_lens
        self._host["state_slots"][:count] = [r.state_slot for r in requests]
        self._host["rows"][:count] = layout.rows

    def _fill_samples(self, requests: list[ScheduledRequest], layout: Layout) -> int:
        counts = np.array([r.num_samples for r in requests] if self.num_drafts else [r.samples for r in requests], int)
        rows, host, table = layout.rows.repeat(counts), self._host, self._rows
        n = len(rows)
        from_end = np.add.accumulate(counts).repeat(counts) - self._places[:n]
        host["sample_indices"][:n] = layout.bounds[1:].repeat(counts) - from_end
        host["sample_rows"][:n] = rows
        host["sample_positions"][:n] = layout.seq_lens.repeat(counts) + 1 - from_end - table.num_prompt_tokens[rows]
        for name, values in (
            ("temperature", table.temperature), ("top_p", table.top_p), ("min_p", table.min_p), ("top_k", table.top_k),
            ("seeds", table.seed),
        ):  # fmt: skip
            host[name][:n] = values[rows]
        return n

    def _fill_chunks(self, requests: list[ScheduledRequest], starts: list[int], num_decodes: int) -> int:
        """A chunk table of the sequences from ``num_decodes`` on. Returns the number of chunks."""
        seq, start, length, checkpoint = (self._host[column] for column in CHUNK_COLUMNS)
        first = self._host["chunk_first"]
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

    def pad_uniform(self, real: BatchDescriptor, size: int) -> None:
        """Fill a step in which every sequence decodes, or verifies equally many drafts, up to ``size`` sequences."""
        self._padding.uniform(self._host, real, size)
        self._num_tokens = size * (real.query_len or 1)

    def pad_mixed(self, real: BatchDescriptor, size: int, num_samples: int | None = None) -> None:
        """Fill any step up to ``size`` tokens, and up to ``num_samples`` positions that sample if it is given."""
        padded = self.mixed_shape(size, 0)
        self._padding.mixed(self._host, real, padded)
        self._num_tokens = size
        logits_rows.pad(self._host, real.num_seqs, padded.num_seqs)
        if num_samples is not None:
            self._padding.samples(self._host, real, num_samples)

    def send_padding(self, shape: BatchDescriptor) -> None:
        """Send padding of the given sizes and nothing else to the device, to run while graphs are captured."""
        nothing = BatchDescriptor(0, 0, 0, 0, 0, 0, 0, query_len=shape.query_len)
        self._host, self._num_updates = self._buffers.begin(), 0
        self._host["counts"][:] = self._host[logits_rows.COUNTS][:] = self._host["cu_seqlens_q"][0] = 0
        if shape.is_mixed:
            self.pad_mixed(nothing, shape.num_tokens, shape.num_samples)
        else:
            self.pad_uniform(nothing, shape.num_seqs)
        self.send()

    @property
    def device_block(self) -> Tensor:
        """The static memory from which ``materialise`` makes its tensors."""
        return self._buffers.block

    def mixed_shape(self, num_tokens: int, max_seq_len: int) -> BatchDescriptor:
        """Sizes of a graph of ``num_tokens`` tokens of any sequences."""
        has_media = self._first_media_id is not None
        return BatchDescriptor.mixed(num_tokens, self._max_num_seqs, max_seq_len, self._keeps_states, has_media)

    # -- device --------------------------------------------------------------------------------------------------

    def selects_rows(self, shape: BatchDescriptor) -> bool:
        """Whether the last layer should compute only the rows from which a token may be sampled. It saves work if these
        are fewer than the tokens, or if the layer has experts: padding rows choose none, so fewer weights are read.
        Drafts need all rows."""
        return not self.num_drafts and (self._ends_sparse or shape.num_seqs < shape.num_tokens)

    def materialise(self, shape: BatchDescriptor, *, selects_rows: bool = False) -> StepInputs:
        """Tensors of a step of the given sizes; static buffers in, no host synchronisation, capturable.

        ``selects_rows``: the batch has ``logits_rows``; one that is no step of decodes alone."""
        device = self._buffers.device
        rows = device("rows", shape.num_seqs)
        num_pages = -(-shape.max_seq_len // self.page_size)
        batch = Batch(
            num_tokens=shape.num_tokens,
            num_seqs=shape.num_seqs,
            num_decodes=shape.num_decodes,
            max_query_len=shape.max_query_len,
            max_seq_len=shape.max_seq_len,
            positions=device("positions", shape.num_tokens),
            slot_mapping=device("slot_mapping", shape.num_tokens),
            cu_seqlens_q=device("cu_seqlens_q", shape.num_seqs + 1),
            seq_lens=device("seq_lens", shape.num_seqs),
            page_table=self._rows.device_page_table[:, :num_pages].index_select(0, rows),
            state_slots=device("state_slots", shape.num_seqs),
            chunks=self._chunk_table(shape) if shape.num_chunks else None,
            token_count=device("counts", 1) if shape.padded else None,
            verification=self._verification(shape) if shape.query_len else None,
            may_have_media=shape.may_have_media,
            mixed=MixedBatch(device("counts", 3), device("decode_slots", shape.num_seqs), MAX_PREFILLS)
            if shape.is_mixed
            else None,
        )
        if selects_rows:
            batch = replace(batch, logits_rows=logits_rows.rows_of(batch, shape, self._buffers, self.one_each))
        samples = self.sampling_tensors(shape.num_samples)
        if not shape.query_len:
            return StepInputs(self._input_ids(shape.num_tokens), batch, samples, rows)
        inputs = StepInputs(device("input_ids", shape.num_tokens), batch, samples, rows)
        return inputs.after_rejections(device("follows", shape.num_seqs), self._rows, self.page_size, self._backend)

    def _verification(self, shape: BatchDescriptor) -> Verification:
        slots = self._buffers.device("verify_slots", shape.num_seqs * shape.query_len)
        return Verification(shape.query_len, slots.view(shape.num_seqs, shape.query_len))

    def _chunk_table(self, shape: BatchDescriptor) -> ChunkTable:
        device = self._buffers.device
        seq, start, length, checkpoint_slot = (device(column, shape.num_chunks) for column in CHUNK_COLUMNS)
        max_seqs = MAX_PREFILLS if shape.is_mixed else shape.num_seqs - shape.num_decodes
        return ChunkTable(seq, start, length, checkpoint_slot, device("chunk_first", shape.num_seqs + 1), max_seqs)

    def sampling_tensors(self, count: int) -> SamplingTensors:
        """Sampling parameters of the first ``count`` sequences that sample."""
        device = self._buffers.device
        return SamplingTensors(
            indices=device("sample_indices", count),
            rows=device("sample_rows", count),
            temperature=device("temperature", count),
            top_k=device("top_k", count),
            top_p=device("top_p", count),
            min_p=device("min_p", count),
            seeds=device("seeds", count),
            positions=device("sample_positions", count),
        )

    def _input_ids(self, num_tokens: int) -> Tensor:
        """Known tokens from the host, the others from the device's last sampled ones."""
        ids = self._buffers.device("input_ids", num_tokens)
        last = self._rows.last_token.index_select(0, self._buffers.device("token_rows", num_tokens))
        return torch.where(ids == FROM_LAST_TOKEN, last, ids)


PER_TOKEN = ("input_ids", "token_rows", "positions", "slot_mapping")
"""Arrays with a value for every token of a step."""


def _arrays(
    max_num_tokens: int, max_num_seqs: int, num_drafts: int, *, has_chunks: bool
) -> dict[str, tuple[torch.dtype, int]]:
    """Dtype and length of every array of the step buffers, for the largest step."""
    max_num_samples = max_num_seqs * (1 + num_drafts)
    groups: list[tuple[torch.dtype, int, tuple[str, ...]]] = [
        (torch.int64, max_num_tokens, PER_TOKEN),
        (torch.int64, max_num_seqs, ("rows", "follows")),
        (torch.int64, max_num_samples, ("sample_indices", "sample_rows", "top_k", "seeds", "sample_positions")),
        (torch.float32, max_num_samples, ("temperature", "top_p", "min_p")),
        (torch.int32, max_num_seqs, ("seq_lens", "state_slots", "decode_slots")),
        (torch.int32, max_num_seqs + 1, ("cu_seqlens_q",)),
        (torch.int32, max_num_samples, ("verify_slots",)),
        (torch.int32, 3, ("counts", logits_rows.COUNTS)),
        (torch.int64, max_num_seqs, logits_rows.PER_SEQUENCE),
    ]
    if has_chunks:
        # Besides its full chunks, a sequence has at most two broken ones, and one per checkpoint or draft.
        max_chunks = max_num_tokens // CHUNK_SIZE + (2 + max(MAX_CHECKPOINTS, num_drafts)) * max_num_seqs
        groups.append((torch.int32, max(max_chunks, chunk_capacity(max_num_tokens)), CHUNK_COLUMNS))
        groups.append((torch.int32, max_num_seqs + 1, ("chunk_first",)))
    return {name: (dtype, size) for dtype, size, names in groups for name in names}


def chunk_bounds(start: int, num_tokens: int, checkpoints: list[int]) -> list[int]:
    """Ascending chunk boundaries of positions ``start`` to ``start + num_tokens``, both ends included.

    Boundaries stand at absolute multiples of ``CHUNK_SIZE``, so that a prompt is cut alike however its prefill is
    split, and at every checkpoint position, so that a state can be stored there.
    """
    end = start + num_tokens
    grid = range((start // CHUNK_SIZE + 1) * CHUNK_SIZE, end, CHUNK_SIZE)
    return sorted({start, end, *grid, *checkpoints})
