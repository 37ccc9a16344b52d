"""Tensors of coded weights in checkpoints, and how each becomes rows of a ``CodedMatrix``.

Job: names, shapes and bit orders of compressed-tensors, GPTQ, AWQ, ModelOpt, MXFP8 and of weights that are quantised
while they load. Owns: the errors about groups that a row or a rank does not hold whole. Does not know: layers, kernels.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.config.quantization import Scheme
from weft.errors import ConfigError, WeightsError
from weft.layers.weight import (
    E4M3,
    E8M0,
    INT32,
    INT64,
    UINT8,
    MatrixShard,
    RowMap,
    RowRun,
    Slices,
    WeightLayout,
    WeightPiece,
)
from weft.ops.codes import CodedMatrix, pack_words, quantize_groups

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place of each of eight neighbouring outputs in a word of AWQ."""


class Converted:
    """A target that receives ``convert(source)``. The conversion runs on the target's device."""

    def __init__(self, target: Tensor, convert: Callable[[Tensor], Tensor]) -> None:
        self._target, self._convert = target, convert

    def copy_(self, source: Tensor) -> None:
        self._target.copy_(self._convert(source.to(self._target.device)))


class Expected:
    """A target that keeps nothing and raises WeightsError if ``convert(source)`` differs from ``value``."""

    def __init__(self, value: Tensor | int, convert: Callable[[Tensor], Tensor], message: str) -> None:
        self._value, self._convert, self._message = value, convert, message

    def copy_(self, source: Tensor) -> None:
        if not (self._convert(source.cpu()) == self._value).all():
            raise WeightsError(self._message)


def unpacked(stored: Tensor, bits: int) -> Tensor:
    """``[..., M]`` words or bytes -> uint8 codes in the order of their bits, along the last dimension."""
    octets = stored.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack([octets & 15, octets >> 4], dim=-1).flatten(-2)


class Arrangement(ABC):
    """The tensors of one part of a coded matrix.

    Args:
        scheme: as the checkpoint's config says.
    """

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme

    @abstractmethod
    def layout(self, matrix: CodedMatrix, shard: MatrixShard, rows: RowMap, name: str) -> WeightLayout:
        """Checkpoint tensors of one part, by their names after the part's.

        Args:
            rows: the rows of the part in ``matrix``, which is this rank's.
            name: name of the part, for errors.

        Raises:
            ConfigError: groups do not divide rows, or this rank's share of them.
        """

    def _columns(self, shard: MatrixShard, per_word: int) -> slice:
        """The columns of this rank, counted in words of ``per_word`` codes."""
        first, last = shard.first_column, shard.first_column + shard.columns
        return slice(first // per_word, -(-last // per_word))

    def _groups(self, shard: MatrixShard, name: str) -> slice:
        """The groups of a row that this rank holds."""
        group, first, total = self.scheme.group or shard.total_columns, shard.first_column, shard.total_columns
        if total % group:
            raise ConfigError(
                f"{name}: group_size={group} does not divide its rows of {total} weights; quantise with a group size "
                "that does, or leave the module out (ignore)"
            )
        if not self.scheme.group:
            return slice(0, 1)
        if first % group or shard.columns % group:
            raise ConfigError(
                f"{name}: this rank's {shard.columns} of {total} columns do not fall on the boundaries of the groups "
                f"of {group} that share a scale; use a tensor_parallel_size that leaves a multiple of {group}"
            )
        return slice(first // group, (first + shard.columns) // group)


def _rows_of(matrix: CodedMatrix, run: RowRun) -> CodedMatrix:
    """The target's rows of a run."""
    rows = run.target_rows
    zeros = None if matrix.zeros is None else matrix.zeros[..., rows]
    row_scale = None if matrix.row_scale is None else matrix.row_scale[..., rows]
    return matrix._replace(
        words=matrix.words[..., rows, :], scales=matrix.scales[..., rows], zeros=zeros, row_scale=row_scale
    )


def _filled(
    rows: RowMap, shape: tuple[int, ...], copy: Callable[[RowRun], tuple[Slices, Any]], **kind: Any
) -> WeightPiece:
    return WeightPiece(shape, tuple(copy(run) for run in rows.runs), **kind)


class CompressedTensors(Arrangement):
    """``weight_packed [N, K / 8]``, ``weight_scale [N, G]``, ``weight_shape`` and, if there are zeros,
    ``weight_zero_point [N / 8, G]``. FP4 has ``weight_packed [N, K / 2]`` in bytes; NVFP4 also has
    ``weight_global_scale``, by which scales are divided."""

    packed, scale, global_scale = "weight_packed", "weight_scale", "weight_global_scale"
    float_codes = UINT8

    def layout(self, matrix: CodedMatrix, shard: MatrixShard, rows: RowMap, name: str) -> WeightLayout:
        groups = self._groups(shard, name)
        found = {self.packed: self._codes(matrix, shard, rows), self.scale: self._scales(matrix, shard, rows, groups)}
        if matrix.row_scale is not None:
            found[self.global_scale] = self._globals(matrix, rows)
            found["input_global_scale"] = WeightPiece((1,), (), optional=True)
            return found
        if matrix.is_float:
            return found | {"input_global_scale": WeightPiece((1,), (), optional=True)}
        shape = torch.tensor([rows.total, shard.total_columns])
        wrong = f"{name}.weight_shape is not {shape.tolist()}, which the config needs"
        found["weight_shape"] = WeightPiece((2,), (((slice(0, 2),), Expected(shape, lambda s: s, wrong)),), INT64)
        if matrix.zeros is not None:
            found["weight_zero_point"] = self._zeros(matrix, shard, rows, groups)
        return found

    def _codes(self, matrix: CodedMatrix, shard: MatrixShard, rows: RowMap) -> WeightPiece:
        per_word = (8 if matrix.is_float else 32) // matrix.bits

        def read(stored: Tensor) -> Tensor:
            return pack_words(unpacked(stored, matrix.bits)[:, : matrix.columns], matrix.packing)

        return _filled(
            rows,
            (rows.total, -(-shard.total_columns // per_word)),
            lambda run: (
                (run.source_rows, self._columns(shard, per_word)),
                Converted(_rows_of(matrix, run).words, read),
            ),
            stored=self.float_codes if matrix.is_float else INT32,
        )

    def _scales(self, matrix: CodedMatrix, shard: MatrixShard, rows: RowMap, groups: slice) -> WeightPiece:
        stored = {"float": (), "e4m3": E4M3, "e8m0": UINT8 + E8M0}[self.scheme.scales]
        read = partial(torch.Tensor.view, dtype=torch.uint8) if stored else torch.Tensor.clone
        return _filled(
            rows,
            (rows.total, shard.total_columns // (self.scheme.group or shard.total_columns)),
            lambda run: ((run.source_rows, groups), Converted(_rows_of(matrix, run).scales.t(), read)),
            stored=stored,
        )

    def _zeros(self, matrix: CodedMatrix, shard: MatrixShard, rows: RowMap, groups: slice) -> WeightPiece:
        def copy(run: RowRun) -> tuple[Slices, Any]:
            words, inside = _words(run, per_word)
            target = _rows_of(matrix, run).zeros
            assert target is not None
            return (words, groups), Converted(target, lambda stored: unpacked(stored.t(), matrix.bits)[:, inside])

        per_word = 32 // matrix.bits
        num_groups = shard.total_columns // (self.scheme.group or shard.total_columns)
        return _filled(rows, (-(-rows.total // per_word), num_groups), copy, stored=INT32)

    def _globals(self, matrix: CodedMatrix, rows: RowMap) -> WeightPiece:
        def copy(run: RowRun) -> tuple[Slices, Any]:
            target = _rows_of(matrix, run).row_scale
            assert target is not None
            return (), Converted(target, self._global)

        return _filled(rows, (1,), copy)

    @staticmethod
    def _global(stored: Tensor) -> Tensor:
        return 1.0 / stored.float()


class ModelOpt(CompressedTensors):
    """NVFP4 of ModelOpt: ``weight [N, K / 2]``, ``weight_scale [N, G]``, ``weight_scale_2``, which is a factor, and
    ``input_scale``, which weights alone do not need."""

    packed, global_scale = "weight", "weight_scale_2"

    def layout(self, matrix: CodedMatrix, shard: MatrixShard, rows: RowMap, name: str) -> WeightLayout:
        found = super().layout(matrix, shard, rows, name)
        found["input_scale"] = found.pop("input_global_scale")
        return found

    @staticmethod
    def _global(stored: Tensor) -> Tensor:
        return stored.float()


class Mxfp8(CompressedTensors):
    """``weight [N, K]`` in e4m3 and ``weight_scale [N, G]``, which ``quant_method: fp8`` calls ``weight_scale_inv``."""

    packed, float_codes = "weight", E4M3

    def layout(self, matrix: CodedMatrix, shard: MatrixShard, rows: RowMap, name: str) -> WeightLayout:
        scale = "weight_scale_inv" if self.scheme.source == "fp8" else "weight_scale"
        scales = self._scales(matrix, shard, rows, self._groups(shard, name))
        return {"weight": self._codes(matrix, shard, rows), scale: scales}


def _words(run: RowRun, per_word: int) -> tuple[slice, slice]:
    """The words that hold a run's rows, and the rows among their codes."""
    first = run.source // per_word
    words = slice(first, -(-(run.source + run.count) // per_word))
    inside = slice(run.source - first * per_word, run.source - first * per_word + run.count)
    return words, inside


class Gptq(Arrangement):
    """``qweight [K / 8, N]``, ``scales [G, N]``, ``qzeros [G, N / 8]`` and, in some files, ``g_idx [K]``.

    Zeros are stored less one (``gptq``), or as they are (``gptq_v2``).
    """

    def layout(self, matrix: CodedMatrix, shard: MatrixShard, rows: RowMap, name: str) -> WeightLayout:
        groups, total = self._groups(shard, name), shard.total_columns
        group = self.scheme.group or total
        found = {
            "qweight": self._codes(matrix, shard, rows),
            "qzeros": self._zeros(matrix, shard, rows, groups, name),
            "scales": _filled(
                rows,
                (total // group, rows.total),
                lambda run: ((groups, run.source_rows), _rows_of(matrix, run).scales),
            ),
        }
        if self.scheme.source != "awq":
            indices = torch.arange(total)[shard.source_columns] // group
            wrong = (
                f"{name}.g_idx: weights of one group are not neighbours (desc_act=True); quantise with desc_act=False"
            )
            copies = (((shard.source_columns,), Expected(indices, lambda stored: stored, wrong)),)
            found["g_idx"] = WeightPiece((total,), copies, INT32, optional=True)
        return found

    def _codes(self, matrix: CodedMatrix, shard: MatrixShard, rows: RowMap) -> WeightPiece:
        per_word = 32 // matrix.bits

        def read(stored: Tensor) -> Tensor:
            return pack_words(unpacked(stored.t(), matrix.bits), matrix.packing)

        return _filled(
            rows,
            (shard.total_columns // per_word, rows.total),
            lambda run: (
                (self._columns(shard, per_word), run.source_rows),
                Converted(_rows_of(matrix, run).words, read),
            ),
            stored=INT32,
        )

    def _zeros(self, matrix: CodedMatrix, shard: MatrixShard, rows: RowMap, groups: slice, name: str) -> WeightPiece:
        per_word, middle = 32 // matrix.bits, 1 << matrix.bits - 1
        overwritten = (
            f"{name}.qzeros: four zeros of a word are -1: an old AutoGPTQ stored a zero of 0 over its neighbours; "
            "quantise again with a later version"
        )

        def copy(run: RowRun) -> tuple[Slices, Any]:
            words, inside = _words(run, per_word)
            target = _rows_of(matrix, run).zeros

            def read(stored: Tensor) -> Tensor:
                if self.scheme.source == "gptq" and matrix.bits == 4 and (stored >> 16 == -1).any():
                    raise WeightsError(overwritten)
                return self._read_zeros(stored, matrix.bits)[:, inside]

            wrong = f"{name}.qzeros: a zero is not {middle}, but the config says that weights are symmetric"
            return (groups, words), Expected(middle, read, wrong) if target is None else Converted(target, read)

        num_groups = shard.total_columns // (self.scheme.group or shard.total_columns)
        optional = self.scheme.source == "awq" and self.scheme.symmetric
        return _filled(rows, (num_groups, rows.total // per_word), copy, stored=INT32, optional=optional)

    def _read_zeros(self, stored: Tensor, bits: int) -> Tensor:
        zeros = unpacked(stored, bits)
        return zeros + 1 & (1 << bits) - 1 if self.scheme.source == "gptq" else zeros


class Awq(Gptq):
    """``qweight [K, N / 8]``, ``scales [G, N]``, ``qzeros [G, N / 8]``; eight outputs in a word, in AWQ's order."""

    def _codes(self, matrix: CodedMatrix, shard: MatrixShard, rows: RowMap) -> WeightPiece:
        def copy(run: RowRun) -> tuple[Slices, Any]:
            words, inside = _words(run, 8)

            def read(stored: Tensor) -> Tensor:
                return pack_words(_awq_unpacked(stored)[:, inside].t().contiguous(), matrix.packing)

            return (shard.source_columns, words), Converted(_rows_of(matrix, run).words, read)

        return _filled(rows, (shard.total_columns, rows.total // 8), copy, stored=INT32)

    def _read_zeros(self, stored: Tensor, bits: int) -> Tensor:
        return _awq_unpacked(stored)


def _awq_unpacked(stored: Tensor) -> Tensor:
    """``[M, N / 8]`` words of AWQ -> ``[M, N]`` codes."""
    codes = unpacked(stored, 4)
    return codes.unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1)


class Online(Arrangement):
    """An unquantised ``weight [N, K]``, rounded while it is copied."""

    def layout(self, matrix: CodedMatrix, shard: MatrixShard, rows: RowMap, name: str) -> WeightLayout:
        return {
            "weight": _filled(
                rows,
                (rows.total, shard.total_columns),
                lambda run: ((run.source_rows, shard.source_columns), RoundedRows(_rows_of(matrix, run))),
            )
        }


class RoundedRows:
    """Rows of a coded matrix, or of one for each expert. Values copied into it are quantised.

    Args:
        transposed: values come as ``[..., columns, rows]``.
    """

    def __init__(self, matrix: CodedMatrix, *, transposed: bool = False) -> None:
        self._matrix, self._transposed = matrix, transposed

    def copy_(self, source: Tensor) -> None:
        matrix = self._matrix
        if source.dim() == 3:
            for expert, values in enumerate(source):
                RoundedRows(matrix.expert(expert), transposed=self._transposed).copy_(values)
            return
        values = source.to(matrix.words.device)
        values = values.t().contiguous() if self._transposed else values
        codes, scales = quantize_groups(values, matrix.group, matrix.scales.dtype)
        matrix.words.copy_(pack_words(codes, matrix.packing))
        matrix.scales.copy_(scales)


_ARRANGEMENTS: dict[str, type[Arrangement]] = {
    "compressed-tensors": CompressedTensors,
    "modelopt": ModelOpt,
    "gptq": Gptq,
    "gptq_v2": Gptq,
    "awq": Awq,
    "online": Online,
}
"""Arrangement by the source of a scheme. gpt-oss has one for experts alone (``gpt_oss.py``)."""


def arrangement(scheme: Scheme) -> Arrangement:
    """The arrangement of a scheme's tensors."""
    return Mxfp8(scheme) if scheme.form == "mxfp8" else _ARRANGEMENTS[scheme.source](scheme)
