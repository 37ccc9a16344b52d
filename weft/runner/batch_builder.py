"""From the layout of a step to the tensors of a forward pass.

Job: fill in everything that the layers and the sampler look up. Owns: the packed step buffers. Does not know: models,
what the caches hold, graphs.

Two halves, so that the second can be captured. On the host (numpy), ``build`` fills the buffers, up to the sizes of the
graph that the step is to run in, and sends them to the device. ``materialise`` makes tensors from the static device
buffers for given, possibly padded sizes, with device work only.
"""

from collections.abc import Sequence
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
from weft.runner.drafting.step_drafts import StepDrafts
from weft.runner.media_inputs import place_media
from weft.runner.rows import RowTable
from weft.runner.step_inputs import SamplingTensors, StepInputs
from weft.runner.step_layout import LayoutRules, StepLayout


class BatchBuilder:
    """Builds batches in buffers that are allocated once, for the largest step.

    Padding belongs to nobody. In a step in which every sequence decodes, or verifies equally many drafts, a padding
    sequence runs token 0 at the first positions of page 0 with state slot 0. In any other step, padding tokens belong
    to no sequence, and padding sequences have no token. Padding samples greedily.

    Args:
        rows: the runner's rows (read only, but for the device's page table).
        rules: how steps are laid out.
        drafts: drafts of the rows; None if the engine drafts nothing.
        max_num_tokens, max_num_seqs: the largest step.
        ends_sparse: the model's last layer has experts.
        first_media: token id and position of the first token of a step, if it is one of an image; the next tokens have
            the next ones (``models/vision_language.py``). None: the model reads no images.
        device, backend: where and how the forward pass runs.
    """

    def __init__(
        self,
        rows: RowTable,
        rules: LayoutRules,
        *,
        page_size: int,
        max_num_tokens: int,
        max_num_seqs: int,
        ends_sparse: bool,
        device: torch.device,
        drafts: StepDrafts | None = None,
        backend: Backend = Backend.TORCH,
        first_media: tuple[int, int] | None = None,
    ) -> None:
        self._first_media = first_media
        self._rows, self.rules, self._drafts, self._page_size = rows, rules, drafts, page_size
        self._max_num_seqs, self._ends_sparse = max_num_seqs, ends_sparse
        arrays = _arrays(max_num_tokens, max_num_seqs, rules)
        # As many new pages as the table has places: a cache hit can bring thousands.
        self._buffers = StepBuffers(arrays, len(PER_TOKEN), max_num_seqs * rows.max_pages, device, backend)
        self.one_each = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._places = np.arange(max_num_tokens + 1)
        self._host: dict[str, np.ndarray] = {}

    def inputs(self, layout: StepLayout, padded: BatchDescriptor, *, selects_rows: bool = False) -> StepInputs:
        """Build a step that runs without a graph, or in pieces. Returns its tensors, without padding."""
        self.build(layout, padded)
        return self.materialise(layout.shape, selects_rows=selects_rows)

    def build(self, layout: StepLayout, padded: BatchDescriptor) -> None:
        """Fill the buffers with a step and padding up to the sizes ``padded``, and send them to the device. The step's
        new pages enter the page table there."""
        real = layout.shape
        self._host = self._buffers.begin()
        num_updates = self._fill_page_updates(layout.requests)
        self._host["counts"][:] = real.num_tokens, real.num_seqs, real.num_decodes
        self._fill_tokens(layout, padded.num_tokens)
        self._fill_sequences(layout, padded)
        self._fill_samples(layout, padded.num_samples)
        if padded.query_len:
            self._fill_verification(layout.requests, padded)
        elif padded.num_chunks:
            self._fill_chunks(layout, padded)
        if not padded.is_uniform:
            logits_rows.fill(self._host, layout, padded.num_seqs)
        self._buffers.upload(padded.num_tokens, num_updates, self._rows.device_page_table)

    def send_padding(self, shape: BatchDescriptor) -> None:
        """Send padding of the given sizes and nothing else to the device, to run while graphs are captured."""
        self.build(self.rules.layout(SchedulerOutput(0, [])), shape)

    def mark_sent(self) -> None:
        """Note that the step's work is queued; see ``StepBuffers.mark``."""
        self._buffers.mark()

    def _put(self, name: str, values: Sequence[int] | np.ndarray, size: int, padding: int | np.ndarray = 0) -> None:
        """Store ``values`` at the beginning of an array, and ``padding`` after them up to ``size``."""
        array, count = self._host[name], len(values)
        array[:count] = values
        if count < size:
            array[count:size] = padding

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

    def _fill_tokens(self, layout: StepLayout, size: int) -> None:
        """Fill in token ids, rows, positions and cache slots on the flat axis."""
        requests, end, starts = layout.requests, layout.shape.num_tokens, layout.bounds[:-1]
        ids, slots, table = self._host["input_ids"], self._host["slot_mapping"], self._rows
        self._put("token_rows", layout.rows.repeat(layout.counts), size, table.padding_row)
        token_rows, positions = self._host["token_rows"][:end], self._host["positions"][:end]
        np.add(self._places[:end], (layout.first - starts).repeat(layout.counts), out=positions)
        ids[:end] = FROM_LAST_TOKEN
        for i in (layout.first < table.num_known_tokens[layout.rows]).nonzero()[0].tolist():
            r, at = requests[i], int(starts[i])
            known = table.known_tokens(r.row, r.start, r.start + r.num_tokens)
            ids[at : at + len(known)] = known
        for last, r in zip(layout.bounds[1:].tolist(), requests, strict=True) if self.rules.drafts is not None else ():
            if r.draft_token_ids:
                ids[last - len(r.draft_token_ids) : last] = r.draft_token_ids
        places = positions // self._page_size
        pages = table.page_table.ravel().take(token_rows * table.max_pages + places)
        slots[:end] = (pages - places) * self._page_size + positions
        for at, r in zip(starts.tolist(), requests, strict=True):
            if r.start < r.write_start:  # to page 0: what is stored here belongs to others
                slots[at : at + min(r.num_tokens, r.write_start - r.start)] = 0
        if table.rope_positions:
            place_media(self._host, layout, table, self._first_media)
        if end < size:
            ids[end:size] = slots[end:size] = self._host["positions"][end:size] = 0

    def _fill_sequences(self, layout: StepLayout, padded: BatchDescriptor) -> None:
        real, size = layout.shape, padded.num_seqs
        self._put("rows", layout.rows, size, self._rows.padding_row)
        self._put("state_slots", [r.state_slot for r in layout.requests], size)
        padding_len = padded.max_query_len if padded.is_uniform else 0
        self._put("seq_lens", layout.seq_lens, size, padding_len)
        ends_of_padding = real.num_tokens + padding_len * self._places[1 : size + 1 - real.num_seqs]
        self._put("cu_seqlens_q", layout.bounds, size + 1, ends_of_padding)
        if padded.is_mixed:
            self._put("decode_slots", self._host["state_slots"][: real.num_decodes], size)

    def _fill_verification(self, requests: list[ScheduledRequest], padded: BatchDescriptor) -> None:
        """Fill in the slots of the states after each token (0 in a model without states), and who follows a step."""
        if self.rules.keeps_states:
            slots = [slot for r in requests for slot in (*(slot for _, slot in r.checkpoints), r.state_slot)]
        else:
            slots = []
        self._put("verify_slots", slots, padded.num_tokens)
        self._put("follows", [r.follows for r in requests], padded.num_seqs)

    def _fill_samples(self, layout: StepLayout, size: int) -> None:
        counts, table = layout.samples, self._rows
        rows = layout.rows.repeat(counts)
        from_end = np.add.accumulate(counts).repeat(counts) - self._places[: len(rows)]
        positions = layout.seq_lens.repeat(counts) + 1 - from_end - table.num_prompt_tokens[rows]
        self._put("sample_indices", layout.bounds[1:].repeat(counts) - from_end, size)
        self._put("sample_rows", rows, size, table.padding_row)
        self._put("sample_positions", positions, size)
        for name, values, padding in (
            ("temperature", table.temperature, 0), ("top_p", table.top_p, 1), ("min_p", table.min_p, 0),
            ("top_k", table.top_k, 0), ("seeds", table.seed, 0),
        ):  # fmt: skip
            self._put(name, values[rows], size, padding)

    def _fill_chunks(self, layout: StepLayout, padded: BatchDescriptor) -> None:
        """Fill in the chunk table of the sequences that do not decode."""
        seq, start, length, checkpoint = (self._host[column] for column in CHUNK_COLUMNS)
        first, num_decodes = self._host["chunk_first"], layout.shape.num_decodes
        first[: num_decodes + 1] = 0
        at = 0
        for i, bounds in enumerate(layout.chunk_bounds, start=num_decodes):
            r, n = layout.requests[i], len(bounds) - 1
            slots = dict(r.checkpoints)
            seq[at : at + n] = i
            start[at : at + n] = np.asarray(bounds[:-1]) - r.start + layout.bounds[i]
            length[at : at + n] = np.diff(bounds)
            checkpoint[at : at + n] = [slots.get(bound, -1) for bound in bounds[1:]]
            at += n
            first[i + 1] = at
        first[layout.shape.num_seqs + 1 : padded.num_seqs + 1] = at
        seq[at : padded.num_chunks] = start[at : padded.num_chunks] = length[at : padded.num_chunks] = 0
        checkpoint[at : padded.num_chunks] = -1

    @property
    def device_block(self) -> Tensor:
        """The static memory from which ``materialise`` makes its tensors."""
        return self._buffers.block

    def mixed_shape(self, num_tokens: int, max_seq_len: int) -> BatchDescriptor:
        """Sizes of a graph of ``num_tokens`` tokens of any sequences."""
        rules = self.rules
        return BatchDescriptor.mixed(
            num_tokens, self._max_num_seqs, max_seq_len, rules.keeps_states, rules.reads_images
        )

    def selects_rows(self, shape: BatchDescriptor) -> bool:
        """Whether the last layer should compute only the rows from which a token may be sampled. It saves work if these
        are fewer than the tokens, or if the layer has experts: padding rows choose none, so fewer weights are read.
        Drafts need all rows."""
        return self.rules.drafts is None and (self._ends_sparse or shape.num_seqs < shape.num_tokens)

    def materialise(self, shape: BatchDescriptor, *, selects_rows: bool = False) -> StepInputs:
        """Tensors of a step of the given sizes; static buffers in, no host synchronisation, capturable.

        ``selects_rows``: the batch has ``logits_rows``; one that is no step of decodes alone."""
        device = self._buffers.device
        rows = device("rows", shape.num_seqs)
        num_pages = -(-shape.max_seq_len // self._page_size)
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
            num_prefill_keys=shape.num_prefill_keys,
            least_chunk=shape.least_chunk,
            mixed=MixedBatch(device("counts", 3), device("decode_slots", shape.num_seqs), MAX_PREFILLS)
            if shape.is_mixed
            else None,
        )
        if selects_rows:
            batch = replace(batch, logits_rows=logits_rows.rows_of(batch, shape, self._buffers, self.one_each))
        samples = self.sampling_tensors(shape.num_samples)
        if not shape.query_len:
            return StepInputs(self._input_ids(shape.num_tokens), batch, samples, rows)
        assert self._drafts is not None
        inputs = StepInputs(device("input_ids", shape.num_tokens), batch, samples, rows)
        return self._drafts.follow(inputs, device("follows", shape.num_seqs))

    def _verification(self, shape: BatchDescriptor) -> Verification:
        slots = self._buffers.device("verify_slots", shape.num_seqs * shape.query_len)
        return Verification(shape.query_len, slots.view(shape.num_seqs, shape.query_len))

    def _chunk_table(self, shape: BatchDescriptor) -> ChunkTable:
        device = self._buffers.device
        seq, start, length, checkpoint_slot = (device(column, shape.num_chunks) for column in CHUNK_COLUMNS)
        max_seqs = MAX_PREFILLS if shape.is_mixed else shape.num_seqs - shape.num_decodes
        return ChunkTable(seq, start, length, checkpoint_slot, device("chunk_first", shape.num_seqs + 1), max_seqs)

    def sampling_tensors(self, count: int) -> SamplingTensors:
        """Return the sampling parameters of the first ``count`` positions that sample."""
        return SamplingTensors(*(self._buffers.device(name, count) for name in SAMPLES))

    def _input_ids(self, num_tokens: int) -> Tensor:
        """Known tokens from the host, the others from the device's last sampled ones."""
        ids = self._buffers.device("input_ids", num_tokens)
        last = self._rows.last_token.index_select(0, self._buffers.device("token_rows", num_tokens))
        return torch.where(ids == FROM_LAST_TOKEN, last, ids)


PER_TOKEN = ("input_ids", "token_rows", "positions", "slot_mapping")
"""Arrays with a value for every token of a step."""


SAMPLES = (
    "sample_indices", "sample_rows", "temperature", "top_k", "top_p", "min_p", "seeds", "sample_positions",
)  # fmt: skip
"""Arrays with a value for every position that samples, as ``SamplingTensors`` has them."""


CHUNK_COLUMNS = ("chunk_seq", "chunk_start", "chunk_length", "chunk_checkpoint")
"""Arrays of the chunk table."""


def _arrays(max_num_tokens: int, max_num_seqs: int, rules: LayoutRules) -> dict[str, tuple[torch.dtype, int]]:
    """Dtype and length of every array of the step buffers, for the largest step."""
    most_drafts = rules.drafts.most if rules.drafts is not None else 0
    max_num_samples = max_num_seqs * (1 + most_drafts)
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
    if rules.keeps_states:
        # Besides its full chunks, a sequence has at most two broken ones, and one per checkpoint or draft.
        max_chunks = max_num_tokens // CHUNK_SIZE + (2 + max(MAX_CHECKPOINTS, most_drafts)) * max_num_seqs
        groups.append((torch.int32, max(max_chunks, chunk_capacity(max_num_tokens)), CHUNK_COLUMNS))
        groups.append((torch.int32, max_num_seqs + 1, ("chunk_first",)))
    return {name: (dtype, size) for dtype, size, names in groups for name in names}
