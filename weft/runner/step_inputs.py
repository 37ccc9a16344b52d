"""The device tensors of one step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from weft.forward_context import Batch
from weft.ops.backend import Backend
from weft.ops.drafts import follow_step
from weft.runner.rows import RowTable
from weft.runner.sampling.tensors import SamplingTensors


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Device tensors of one step; ``rows [S]`` int64, those of its sequences."""

    input_ids: Tensor
    batch: Batch
    samples: SamplingTensors
    rows: Tensor

    def after_rejections(self, follows: Tensor, table: RowTable, page_size: int, backend: Backend) -> StepInputs:
        """Move a verification step back by the drafts that the step before rejected. Device work only.

        The host lays such a step out before it knows the acceptance: as if all drafts were accepted.

        Args:
            follows: ``[S]`` int64, 1 for a sequence that follows its step before (``ScheduledRequest.follows``), else
                0. All sequences verify equally many drafts.
            table: the rows, which hold the rejections.
        """
        batch, samples, verification = self.batch, self.samples, self.batch.verification
        assert verification is not None
        step = follow_step(
            self.input_ids,
            batch.positions,
            samples.positions,
            batch.seq_lens,
            self.rows,
            follows,
            verification.slots,
            table.device_page_table,
            page_size,
            table.state,
            backend=backend,
        )
        moved = replace(
            batch,
            positions=step.positions,
            slot_mapping=step.slot_mapping,
            seq_lens=step.seq_lens,
            state_slots=step.state_slots,
        )
        return StepInputs(step.input_ids, moved, replace(samples, positions=step.sample_positions), self.rows)
