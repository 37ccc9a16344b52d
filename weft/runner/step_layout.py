"""The layout of a step: where its requests are on the token axis, and the sizes by which its graph is chosen.

Job: derive both from a scheduler output, on the host. Does not know: buffers, devices, graphs.
"""

from dataclasses import dataclass

import numpy as np

from weft.config.chunks import CHUNK_SIZE
from weft.graph.batch_descriptor import BatchDescriptor
from weft.messages import ScheduledRequest, SchedulerOutput
from weft.runner.drafting.step_drafts import DraftRules


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The places of a step's requests on the token axis. Arrays are ``[S]`` int64.

    Attributes:
        shape: the step's real sizes.
        rows: rows of the runner's tables.
        first: position of the first token to run.
        counts: tokens to run.
        bounds: ``[S + 1]``, where each request begins on the flat token axis, and the end.
        chunk_bounds: positions at which chunks begin and end, for each request that has chunks. These requests are the
            last of the step.
    """

    requests: list[ScheduledRequest]
    shape: BatchDescriptor
    rows: np.ndarray
    first: np.ndarray
    counts: np.ndarray
    seq_lens: np.ndarray
    samples: np.ndarray
    bounds: np.ndarray
    chunk_bounds: list[list[int]]


@dataclass(frozen=True, slots=True)
class LayoutRules:
    """The properties of a model and its settings that decide how steps are laid out.

    Attributes:
        keeps_states: the model has recurrent layers, which read a chunk table.
        drafts: how drafts are laid out; None if the engine drafts nothing.
        reads_images: requests may have images.
    """

    keeps_states: bool
    drafts: DraftRules | None = None
    reads_images: bool = False

    def layout(self, scheduler_output: SchedulerOutput) -> StepLayout:
        """Lay out one step."""
        requests, num_decodes = scheduler_output.requests, scheduler_output.num_decodes
        samples = [r.num_samples for r in requests] if self.drafts is not None else [r.samples for r in requests]
        columns = [r.row for r in requests], [r.start for r in requests], [r.num_tokens for r in requests], samples
        rows, first, counts, sampled = np.array(columns, dtype=np.int64)
        bounds = np.zeros(len(requests) + 1, dtype=np.int64)
        np.add.accumulate(counts, out=bounds[1:])
        seq_lens = first + counts
        query_len = self.drafts.query_len_of(requests) if self.drafts is not None else 0
        has_chunks = self.keeps_states and not query_len
        chunks = [_chunk_bounds_of(r) for r in requests[num_decodes:]] if has_chunks else []
        prefill_keys, least_chunk = 0, int(bounds[-1])
        if num_decodes < len(requests):
            prefill_keys = int(seq_lens[num_decodes:].sum())
            least_chunk = int(counts[num_decodes:][first[num_decodes:] > 0].min(initial=least_chunk))
        shape = BatchDescriptor(
            num_tokens=int(bounds[-1]),
            num_seqs=len(requests),
            num_decodes=num_decodes,
            max_query_len=int(counts.max(initial=0)),
            max_seq_len=int(seq_lens.max(initial=0)),
            num_chunks=sum(map(len, chunks)) - len(chunks),
            num_samples=int(sampled.sum()),
            query_len=query_len,
            may_have_media=self.reads_images and any(r.media for r in requests),
            num_prefill_keys=prefill_keys,
            least_chunk=least_chunk,
        )
        return StepLayout(requests, shape, rows, first, counts, seq_lens, sampled, bounds, chunks)


def chunk_bounds(start: int, num_tokens: int, checkpoints: list[int]) -> list[int]:
    """Ascending chunk boundaries of positions ``start`` to ``start + num_tokens``, both ends included.

    Boundaries stand at absolute multiples of ``CHUNK_SIZE``, so that a prompt is cut alike however its prefill is
    split, and at every checkpoint position, so that a state can be stored there.
    """
    end = start + num_tokens
    grid = range((start // CHUNK_SIZE + 1) * CHUNK_SIZE, end, CHUNK_SIZE)
    return sorted({start, end, *grid, *checkpoints})


def _chunk_bounds_of(request: ScheduledRequest) -> list[int]:
    return chunk_bounds(request.start, request.num_tokens, [position for position, _ in request.checkpoints])
