"""Steps that verify drafts and were laid out before it was known how many drafts of the step before were accepted.

Job: from a layout that takes all of them for accepted to the step as it is, with what the rows hold on the device.
Does not know: who follows, graphs.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from weft.runner.rows import RowTable
from weft.runner.step_shape import StepInputs


def following_inputs(
    inputs: StepInputs, batch_rows: Tensor, follows: Tensor, rows: RowTable, page_size: int
) -> StepInputs:
    """The step of sequences that verify equally many drafts, moved back by the rejected drafts where ``follows`` says
    so. Device work only.

    Args:
        inputs: as the host has laid them out; S sequences of Q tokens.
        batch_rows: ``[S]`` int64, their rows.
        follows: ``[S]`` int64, 1 for a sequence that follows its step before (``ScheduledRequest.follows``), else 0.
    """
    batch, verification = inputs.batch, inputs.batch.verification
    assert verification is not None
    query_len = verification.query_len
    rejected = rows.num_rejected.index_select(0, batch_rows) * follows
    behind = rejected[:, None]
    last, drafts = rows.last_token.index_select(0, batch_rows), rows.drafts.index_select(0, batch_rows)
    token_ids = torch.cat([last[:, None], drafts[:, : query_len - 1]], dim=1)
    input_ids = torch.where(follows[:, None] > 0, token_ids, inputs.input_ids.view(-1, query_len)).flatten()
    seq_lens = batch.seq_lens - rejected.int()
    places = torch.arange(-query_len, 0, device=rejected.device) + seq_lens[:, None]
    pages = batch.page_table.gather(1, places // page_size)
    moved = replace(
        batch,
        positions=(batch.positions.view(-1, query_len) - behind).flatten(),
        slot_mapping=(pages * page_size + places % page_size).flatten(),
        seq_lens=seq_lens,
        state_slots=verification.slots.gather(1, query_len - 1 - behind)[:, 0],
    )
    sample_positions = (inputs.samples.positions.view(-1, query_len) - behind).flatten()
    return replace(
        inputs, input_ids=input_ids, batch=moved, samples=replace(inputs.samples, positions=sample_positions)
    )
