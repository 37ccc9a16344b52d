"""The experts of gpt-oss as published: MXFP4, with gate and up rows in turn.

Job: the tensors ``gate_up_proj_blocks [E, 2 * I, H / 32, 16]`` and ``down_proj_blocks [E, H, I / 32, 16]`` in bytes of
two codes, the lower one first, and their scales ``[E, rows, groups]``. Does not know: layers' arithmetic.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from weft.errors import ConfigError, UnsupportedModelError
from weft.layers.moe import Experts
from weft.layers.weight import UINT8, WeightLayout, WeightPiece
from weft.ops.codes import CodedMatrix, pack_words
from weft.quantization.arrangements import Converted, unpacked

_GROUP = 32


def gpt_oss_layout(layer: Experts, gate_up: CodedMatrix, down: CodedMatrix, name: str) -> WeightLayout:
    """The tensors of a layer's experts, by their names after the layer's.

    Raises:
        UnsupportedModelError: the model's experts are not those of gpt-oss.
        ConfigError: a rank's share does not hold whole groups.
    """
    if not layer.interleaved:
        raise UnsupportedModelError(
            f"{name}: quant_method='mxfp4' is read for gpt-oss alone; use a checkpoint of compressed-tensors "
            "(mxfp4-pack-quantized), or one without quantization"
        )
    shard, hidden = layer.down_shard, layer.gate_up_shard.columns
    if shard.columns % _GROUP or hidden % _GROUP:
        raise ConfigError(
            f"{name}: this rank's {shard.columns} of {shard.total_columns} columns are no multiple of the {_GROUP} "
            "weights that share a scale; use another tensor_parallel_size, or enable_expert_parallel"
        )
    experts, whole = slice(layer.local_experts.start, layer.local_experts.stop), slice(None)
    first, last, total = shard.first_column, shard.first_column + shard.columns, shard.total_columns
    both = slice(2 * first, 2 * last)
    groups = slice(first // _GROUP, last // _GROUP)
    shapes = {
        "gate_up_proj": ((layer.num_experts, 2 * total, hidden // _GROUP), (experts, both, whole)),
        "down_proj": ((layer.num_experts, hidden, total // _GROUP), (experts, whole, groups)),
    }
    layout = WeightLayout()
    for (part, (shape, source)), matrix in zip(shapes.items(), (gate_up, down), strict=True):
        order = _in_halves if part == "gate_up_proj" else _as_stored
        codes = _EachExpert(matrix.words, lambda blocks, order=order, m=matrix: _packed(order(blocks), m))  # type: ignore[misc]
        layout[f"{part}_blocks"] = WeightPiece((*shape, _GROUP // 2), (((*source, whole), codes),), UINT8)
        scales = Converted(matrix.scales, lambda s, order=order: order(s.transpose(0, 1)).permute(1, 2, 0))  # type: ignore[misc]
        layout[f"{part}_scales"] = WeightPiece(shape, ((source, scales),), UINT8)
    return layout


class _EachExpert:
    """A target of a tensor of all experts, converted expert by expert."""

    def __init__(self, target: Tensor, convert: Callable[[Tensor], Tensor]) -> None:
        self._target, self._convert = target, convert

    def copy_(self, source: Tensor) -> None:
        for target, values in zip(self._target, source, strict=True):
            Converted(target, self._convert).copy_(values)


def _packed(blocks: Tensor, matrix: CodedMatrix) -> Tensor:
    """``[N, G, 16]`` bytes -> words."""
    return pack_words(unpacked(blocks.flatten(1), matrix.bits), matrix.packing)


def _in_halves(rows: Tensor) -> Tensor:
    """Rows in turn -> gate rows, then up rows; along the first dimension."""
    return torch.cat([rows[0::2], rows[1::2]])


def _as_stored(rows: Tensor) -> Tensor:
    return rows
