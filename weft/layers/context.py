"""``ModelContext``: what a layer's constructor gets of dtype, device, ranks and backend; one frozen value for all."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.config.rope import RopeConfig
from weft.layers.table import LayerTable
from weft.ops.backend import Backend
from weft.ops.rotary import rotary_table
from weft.parallel.tensor_parallel import TensorParallel


class RotaryTables:
    """The cos/sin tables that attention layers share: one per rotary setting, made when the first layer asks for it."""

    def __init__(self) -> None:
        self._tables: list[tuple[RopeConfig | None, Tensor]] = []

    @property
    def only(self) -> Tensor | None:
        """Return the table of a model with at most one rotary setting; None if nothing is rotated."""
        assert len(self._tables) < 2
        return next((table for _, table in self._tables), None)

    def get(self, rope: RopeConfig | None, max_position_embeddings: int, num_rows: int, device: torch.device) -> Tensor:
        """The table for positions below ``num_rows``; see ``rotary_table``. None: two dimensions stand still."""
        for known, table in self._tables:
            if known == rope:
                return table
        if rope is None:
            table = torch.tensor([1.0, 0.0], device=device).repeat(num_rows, 1)
        else:
            table = rotary_table(rope, max_position_embeddings, num_rows, device)
        self._tables.append((rope, table))
        return table


@dataclass(frozen=True, slots=True)
class ModelContext:
    """Surroundings of one model instance on one rank.

    Attributes:
        dtype: of weights and activations.
        device: where parameters are allocated.
        tp: the tensor-parallel group.
        backend: which implementation of the operations runs.
        layers: filled while the model is built.
        custom_all_reduce: sum few rows over ranks through peer memory, where there is any.
        expert_parallel: ranks hold whole experts, not a share of each.
        max_model_len: longest sequence that will be run, in tokens.
        num_media_rows: image tokens that a step may have; each has a row of its own after those of the embedding and
            of the rotary table (``models/vision_language.py``). 0: the model reads no images.
        rotary: tables that layers share.
    """

    dtype: torch.dtype
    device: torch.device
    tp: TensorParallel
    backend: Backend
    layers: LayerTable
    max_model_len: int
    expert_parallel: bool = False
    rotary: RotaryTables = field(default_factory=RotaryTables)
    custom_all_reduce: bool = False
    num_media_rows: int = 0

    @property
    def num_rotary_rows(self) -> int:
        return self.max_model_len + self.num_media_rows
