"""Rotary position embedding: the cos/sin tables that the attention layers of a model share."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.config.rope import RopeConfig
from weft.ops.rotary import rotary_table


class RotaryTables:
    """One table per rotary setting, made when the first layer asks for it."""

    def __init__(self) -> None:
        self._tables: list[tuple[RopeConfig | None, Tensor]] = []

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
