"""Launching a verification step before the acceptance of the one before is known on the host.

Its layout takes all drafts for accepted, and is corrected by what the rows hold on the device.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from weft.ops.backend import Backend
from weft.ops.drafts import follow_step
from weft.runner.rows import RowTable
from weft.runner.step_inputs import StepInputs


def following_inputs(
    inputs: StepInputs, follows: Tensor, rows: RowTable, page_size: int, backend: Backend
) -> StepInputs:
    """The step of sequences that verify equally many drafts, moved back by the rejected drafts where ``follows`` says
    so. Device work only.

    Args:
        inputs: as the host has laid them out; S sequences of Q tokens.
        follows: ``[S]`` int64, 1 for a sequence that follows its step before (``ScheduledRequest.follows``), else 0.
    """
    batch, samples, verification = inputs.batch, inputs.samples, inputs.batch.verification
    assert verification is not None
    step = follow_step(
        inputs.input_ids,
        batch.positions,
        samples.positions,
        batch.seq_lens,
        inputs.rows,
        follows,
        verification.slots,
        rows.device_page_table,
        page_size,
        rows.state,
        backend=backend,
    )
    return replace(
        inputs,
        input_ids=step.input_ids,
        batch=replace(
            batch,
            positions=step.positions,
            slot_mapping=step.slot_mapping,
            seq_lens=step.seq_lens,
            state_slots=step.state_slots,
        ),
        samples=replace(samples, positions=step.sample_positions),
    )
