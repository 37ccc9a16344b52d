"""The inputs of one step: where its requests are on the token axis (``Layout``), and its tensors (``StepInputs``)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from weft.forward_context import Batch
from weft.messages import ScheduledRequest
from weft.ops.backend import Backend
from weft.ops.drafts import follow_step
from weft.runner.rows import RowTable


@dataclass(slots=True)
class Layout:
    """The places of a step's requests on the token axis, ``[S]`` int64 each.

    Attributes:
        rows: rows of the runner's tables.
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


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling parameters of the sequences that sample, ``[N]`` each, from the static buffers.

    ``indices`` are flat indices of the tokens whose hidden states are sampled from, ``rows`` the rows of the row table.
    The others are as in ``SamplingMetadata``.
    """

    indices: Tensor
    rows: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor

    def select(self, places: Tensor) -> SamplingTensors:
        """Return the parameters at ``places [M]`` int64."""
        return SamplingTensors(*(getattr(self, name).index_select(0, places) for name in self.__slots__))


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
