"""The layout of quantised linear layers and experts, in every form.

Job: the parameters and tensors of a linear layer that is quantised in parts, and the tensors of single experts. Does
not know: how a form stores a part (``fp8.py``, ``coded.py``).
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace

import torch

from weft.layers.context import ModelContext
from weft.layers.linear import LinearBase, LinearMethod
from weft.layers.moe import Experts
from weft.layers.weight import MatrixShard, RowMap, WeightLayout, empty_parameter

Parameters = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes of parameters, by name."""


class QuantizedLinear(LinearMethod):
    """A matrix that is quantised, but for some parts. These parts come last: ``plain_weight [N - M, K]`` in the model's
    dtype.

    Args:
        names: prefix of each part's tensors -> its name in the checkpoint, for errors.
        plain: prefixes of the unquantised parts.
    """

    def __init__(self, context: ModelContext, names: dict[str, str], plain: frozenset[str]) -> None:
        self._context, self._names, self._plain = context, names, plain

    @abstractmethod
    def parameters(self, layer: LinearBase, rows: int) -> Parameters:
        """The parameters of the quantised rows."""

    @abstractmethod
    def part(self, layer: LinearBase, rows: RowMap, name: str) -> WeightLayout:
        """The tensors of one quantised part."""

    def create(self, layer: LinearBase) -> None:
        shard, device = layer.shard, self._context.device
        plain = [run.target for part in self._plain for run in shard.parts[part].runs]
        rows = min(plain, default=shard.rows)
        for name, (shape, dtype) in self.parameters(layer, rows).items():
            place = layer.places.get(name)
            layer.register_parameter(name, empty_parameter(*shape, dtype=dtype, device=device, place=place))
        if plain:
            dtype = self._context.dtype
            layer.plain_weight = empty_parameter(shard.rows - rows, shard.columns, dtype=dtype, device=device)
        self.layouts(layer)  # raises if blocks or groups do not fit

    def layouts(self, layer: LinearBase) -> tuple[WeightLayout, ...]:
        shard, layout = layer.shard, WeightLayout()
        for part, rows in shard.parts.items():
            if part in self._plain:
                weight = layer.get_parameter("plain_weight")
                layout[f"{part}weight"] = shard.piece(rows.moved(weight.shape[0] - shard.rows), weight)
                continue
            found = self.part(layer, rows, self._names[part])
            layout |= {f"{part}{tensor}": piece for tensor, piece in found.items()}
        return (layout,)


FindPart = Callable[[str, int, MatrixShard, RowMap, str], WeightLayout]
"""``(matrix, place, shard, rows, name)``: the tensors of one part of the matrix of the expert at a place. ``name`` is
the part's name, for errors."""


def expert_layout(layer: Experts, place: int, name: str, find: FindPart) -> WeightLayout:
    """Tensors of one of this rank's experts, by their names after the expert's number. ``name``: of the layer."""
    layout = WeightLayout()
    for matrix, shard in shards(layer).items():
        for part, rows in shard.parts.items():
            where = f"{name}.{layer.local_experts[place]}.{part}".removesuffix(".")
            found = find(matrix, place, shard, rows, where)
            layout |= {f"{part}{tensor}": piece for tensor, piece in found.items()}
    return layout


def one_by_one(layer: Experts, name: str, find: FindPart) -> WeightLayout:
    """Tensors of single experts (``7.gate_proj.weight``), those of other ranks' experts included."""
    layout, first = WeightLayout(), layer.local_experts.start
    elsewhere = {n: replace(piece, copies=()) for n, piece in expert_layout(layer, 0, name, find).items()}
    for expert in range(layer.num_experts):
        is_here = expert in layer.local_experts
        found = expert_layout(layer, expert - first, name, find) if is_here else elsewhere
        layout |= {f"{expert}.{tensor}": piece for tensor, piece in found.items()}
    return layout


def shards(layer: Experts) -> dict[str, MatrixShard]:
    """The share of this rank in each matrix of an expert, by name."""
    return {"gate_up": layer.gate_up_shard, "down": layer.down_shard}
