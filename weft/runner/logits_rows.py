"""Rows of a step from which logits may be computed: the last token of each of its sequences (``LogitsRows``)."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from weft.forward_context import Batch, LogitsRows, MixedBatch
from weft.graph.batch_descriptor import BatchDescriptor
from weft.runner.buffers import StepBuffers
from weft.runner.step_layout import StepLayout

PER_SEQUENCE = ("logits_indices", "logits_positions", "logits_slots")
COUNTS = "logits_counts"


def fill(host: Mapping[str, np.ndarray], layout: StepLayout, size: int) -> None:
    """Fill in the rows of a step whose tokens are in the buffers already, and padding up to ``size`` rows.

    Results are stored by these indices, so padding has the index of a token that is no sequence's last.
    """
    count, last, indices = layout.shape.num_seqs, layout.bounds[1:] - 1, host["logits_indices"]
    indices[:count] = last
    host["logits_positions"][:count] = host["positions"][last]
    host["logits_slots"][:count] = host["slot_mapping"][last]
    host[COUNTS][:] = count
    if count < size:
        differ = (last != np.arange(count)).nonzero()[0]  # up to the first, every row is a last one
        indices[count:size] = differ[0] if len(differ) else count
        host["logits_positions"][count:size] = host["logits_slots"][count:size] = 0


def rows_of(batch: Batch, shape: BatchDescriptor, buffers: StepBuffers, one_each: Tensor) -> LogitsRows:
    """The rows of a batch, with device work only.

    Args:
        one_each: ``[S + 1]`` int32 or longer: 0, 1, 2, …
    """
    size = shape.num_seqs
    indices, positions, slots = (buffers.device(name, size) for name in PER_SEQUENCE)
    counts = buffers.device(COUNTS, 3)
    mixed = MixedBatch(counts, batch.mixed.decode_slots, max_prefills=0) if batch.mixed is not None else None
    alone = replace(
        batch,
        num_tokens=size,
        num_seqs=size,
        num_decodes=size,
        max_query_len=1,
        positions=positions,
        slot_mapping=slots,
        cu_seqlens_q=one_each[: size + 1],
        chunks=None,
        token_count=counts[:1] if batch.token_count is not None else None,
        mixed=mixed,
        may_have_media=False,
        num_prefill_keys=None,
        least_chunk=None,
    )
    return LogitsRows(indices, alone)


def spread(hidden_states: Tensor, rows: LogitsRows, num_tokens: int) -> Tensor:
    """``[S, hidden_size]`` of ``rows`` at their places in ``[num_tokens, hidden_size]``; what else stands there is
    arbitrary."""
    out = torch.empty(num_tokens, hidden_states.shape[1], dtype=hidden_states.dtype, device=hidden_states.device)
    return out.index_copy_(0, rows.indices, hidden_states)
