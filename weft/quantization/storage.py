"""Scales and other tensors of FP8 weights, in memory and in a checkpoint.

Job: shapes and checkpoint names of weights and scales, and the map from rows of a merged or sharded matrix to scales.
Owns: the errors about widths that blocks do not divide. Does not know: layers, kernels.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from weft.config.quantization import BLOCK
from weft.errors import ConfigError
from weft.layers.weight import E4M3, MatrixShard, RowMap, RowRun, Slices, WeightLayout, WeightPiece
from weft.ops.fp8 import E4M3_MAX, quantize_rows


class Storage(ABC):
    """A form of storing an FP8 matrix ``[rows, columns]``.

    Attributes:
        block: number of rows, and of columns, that share a scale; 0: a scale per row.
        static: the checkpoint has the divisor of inputs.
    """

    block = 0
    static = False

    @abstractmethod
    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of the float32 scales of a matrix."""

    @abstractmethod
    def layout(
        self, shard: MatrixShard, rows: RowMap, weight: Tensor, scale: Tensor, input_scale: Tensor | None, name: str
    ) -> WeightLayout:
        """Checkpoint tensors of one part, by their names after the part's.

        Args:
            rows: the rows of the part in ``weight [rows, columns]`` and, with their scales, in ``scale``.
            input_scale: ``[1]``, if ``static``; the largest of all parts.
            name: name of the part, for errors.

        Raises:
            ConfigError: the part's rows or columns do not fall on block boundaries.
        """


class BlockStorage(Storage):
    """A scale for each block of 128 x 128: ``weight``, ``weight_scale_inv [rows / 128, columns / 128]``."""

    block = BLOCK

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return _blocks(rows), _blocks(columns)

    def layout(
        self, shard: MatrixShard, rows: RowMap, weight: Tensor, scale: Tensor, input_scale: Tensor | None, name: str
    ) -> WeightLayout:
        last_column = shard.first_column + shard.columns
        if shard.first_column % BLOCK or (shard.columns % BLOCK and last_column != shard.total_columns):
            raise ConfigError(_indivisible(name, f"{shard.columns} of {shard.total_columns} columns"))
        for run in rows.runs:
            is_end = run.source + run.count == rows.total and run.target + run.count == weight.shape[0]
            if run.source % BLOCK or run.target % BLOCK or (run.count % BLOCK and not is_end):
                raise ConfigError(_indivisible(name, f"{run.count} of {rows.total} rows, from row {run.source} on,"))
        runs = tuple(RowRun(r.source // BLOCK, r.target // BLOCK, _blocks(r.count)) for r in rows.runs)
        blocks = MatrixShard(
            scale.shape[0],
            scale.shape[1],
            shard.parts,
            shard.first_column // BLOCK,
            _blocks(shard.total_columns),
        )
        return {
            "weight": shard.piece(rows, weight, stored=E4M3),
            "weight_scale_inv": blocks.piece(RowMap(_blocks(rows.total), runs), scale),
        }


class ChannelStorage(Storage):
    """A scale for each row: ``weight``, ``weight_scale`` (``[rows, 1]``, or one number for all rows of the part), and
    ``input_scale`` if static.

    Args:
        per_tensor: the checkpoint has one number for each part.
    """

    def __init__(self, *, per_tensor: bool, static: bool) -> None:
        self._per_tensor, self.static = per_tensor, static

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return rows, 1

    def layout(
        self, shard: MatrixShard, rows: RowMap, weight: Tensor, scale: Tensor, input_scale: Tensor | None, name: str
    ) -> WeightLayout:
        layout = {"weight": shard.piece(rows, weight, stored=E4M3)}
        if self._per_tensor:
            everything: Slices = ()
            copies = tuple((everything, scale[run.target_rows]) for run in rows.runs)
            layout["weight_scale"] = WeightPiece((1,), copies)
        else:
            layout["weight_scale"] = rows.piece(scale)
        if input_scale is not None:
            layout["input_scale"] = WeightPiece((1,), (((), Largest(input_scale)),))
        return layout


class OnlineStorage(ChannelStorage):
    """A scale for each row, computed while unquantised rows are copied. The checkpoint has a ``weight`` alone."""

    def __init__(self) -> None:
        super().__init__(per_tensor=False, static=False)

    def layout(
        self, shard: MatrixShard, rows: RowMap, weight: Tensor, scale: Tensor, input_scale: Tensor | None, name: str
    ) -> WeightLayout:
        piece = shard.piece(rows, weight)
        copies = tuple(
            (source, QuantizedRows(weight[run.target_rows], scale[run.target_rows]))
            for run, (source, _) in zip(rows.runs, piece.copies, strict=True)
        )
        return {"weight": WeightPiece(piece.shape, copies)}


class QuantizedRows:
    """Rows of an FP8 matrix (or of several, ``[E, rows, columns]``). Values copied into it are quantised."""

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        self._weight, self._scale = weight, scale

    def copy_(self, source: Tensor) -> None:
        if source.dim() == 3:
            for one, weight, scale in zip(source, self._weight, self._scale, strict=True):
                QuantizedRows(weight, scale).copy_(one)
            return
        values, scale = quantize_rows(source.to(self._weight.device))
        self._weight.copy_(values)
        self._scale.copy_(scale)


class Largest:
    """A number that keeps the largest value copied into it since ``reset``, which is NaN before the first.

    Attributes:
        value: the number; several targets may share it.
    """

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def reset(self) -> None:
        self.value.fill_(float("nan"))

    def copy_(self, source: Tensor) -> None:
        new = source.to(self.value.device, self.value.dtype).reshape(1)
        torch.fmax(self.value, new, out=self.value)


def random_ranges(fan_in: int) -> dict[str, tuple[float, float]]:
    """Bounds of random parameters, for scaled weights with a standard deviation of ``fan_in ** -0.5``."""
    largest, bound = E4M3_MAX / 2, (3.0 / fan_in) ** 0.5
    return {
        "weight": (-largest, largest),
        "scale": (0.8 * bound / largest, 1.2 * bound / largest),
        "input_scale": (0.01, 0.02),
    }


def _blocks(size: int) -> int:
    return -(-size // BLOCK)


def _indivisible(name: str, share: str) -> str:
    return (
        f"{name}: this rank's {share} do not fall on the boundaries of the blocks of {BLOCK} x {BLOCK} that share a "
        f"scale; use a tensor_parallel_size that leaves multiples of {BLOCK}, or a checkpoint with scales by channel"
    )
