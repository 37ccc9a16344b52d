"""The device tensors of one step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weft.forward_context import Batch


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
