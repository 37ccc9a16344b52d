"""The sampling parameters of a step, on the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weft.runner.buffers import StepBuffers


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

    @staticmethod
    def of(buffers: StepBuffers, count: int) -> SamplingTensors:
        """Return the parameters of the first ``count`` positions that sample."""
        device = buffers.device
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

    def select(self, places: Tensor) -> SamplingTensors:
        """Return the parameters at ``places [M]`` int64."""
        return SamplingTensors(*(getattr(self, name).index_select(0, places) for name in self.__slots__))
