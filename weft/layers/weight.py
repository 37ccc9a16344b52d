"""Weight loading per parameter: the checkpoint tensors, and their rows, that fill a parameter.

Job: the contract of three parties. Layers own parameters and know their sharding, models own a table of names, the
loader owns files. Owns: ``WeightPiece``, ``WeightModule``, ``WeightTable``. Does not know: file formats or checkpoint
folders.

A layer offers one or more *layouts*. A layout names every tensor that the layer needs, relative to the layer. In a
merged layer the name starts with the number of the part (``"0.weight"``); the model's table turns the number into the
checkpoint's name of the part (``q_proj.weight``).
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from weft.config.sharding import divide
from weft.parallel.tensor_parallel import TensorParallel

Slices = tuple[slice, ...]
E4M3, E8M0, INT32, INT64, UINT8 = ("F8_E4M3",), ("F8_E8M0",), ("I32",), ("I64",), ("U8",)
"""Dtypes of quantised tensors as safetensors writes them, as values of ``WeightPiece.stored``."""


class CopyTarget(Protocol):
    """The target of a part of a checkpoint's tensor: a view of a parameter, or a converter that fills one."""

    def copy_(self, source: Tensor, /) -> Any:
        """Copy the values of ``source``, which is on the CPU in the checkpoint's dtype."""


class Interleaved:
    """Receives columns that belong to several tensors in turn."""

    def __init__(self, *targets: CopyTarget) -> None:
        self._targets = targets

    def copy_(self, source: Tensor) -> None:
        for i, target in enumerate(self._targets):
            target.copy_(source[..., i :: len(self._targets)])


class RowsInTurn:
    """Receives rows that belong to several targets in turn."""

    def __init__(self, *targets: CopyTarget) -> None:
        self._targets = targets

    def copy_(self, source: Tensor) -> None:
        for i, target in enumerate(self._targets):
            target.copy_(source[i :: len(self._targets)])


class OnlyOne:
    """Receives one of several tensors that a checkpoint stacks: ``[1, *]``."""

    def __init__(self, target: CopyTarget) -> None:
        self._target = target

    def copy_(self, source: Tensor) -> None:
        self._target.copy_(source[0])


@dataclass(frozen=True, slots=True)
class WeightPiece:
    """One tensor of a checkpoint: its whole shape, and this rank's copies ``target.copy_(tensor[source])``.

    Attributes:
        shape: ``(1,)`` for a single number, which files also store without dimensions.
        stored: the dtypes that the file may have, as safetensors writes them. Empty: any float of two or more bytes.
        optional: the checkpoint may lack the tensor.
        transposable: ``[E, rows, columns]``, which files may also store as ``[E, columns, rows]`` (Qwen3-VL-MoE).
    """

    shape: tuple[int, ...]
    copies: tuple[tuple[Slices, CopyTarget], ...]
    stored: tuple[str, ...] = ()
    transposable: bool = False
    optional: bool = False

    def is_transposed(self, stored: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape is the piece with its last dimensions exchanged."""
        return self.transposable and stored != self.shape and stored == (*self.shape[:-2], *self.shape[:-3:-1])


WeightLayout = dict[str, WeightPiece]
"""Every tensor that a layer needs of a checkpoint, by its name relative to the layer."""


@dataclass(frozen=True, slots=True)
class RowRun:
    """``count`` consecutive rows, from row ``source`` of the checkpoint's tensor to row ``target`` of the parameter."""

    source: int
    target: int
    count: int

    @property
    def source_rows(self) -> slice:
        return slice(self.source, self.source + self.count)

    @property
    def target_rows(self) -> slice:
        return slice(self.target, self.target + self.count)


@dataclass(frozen=True, slots=True)
class RowMap:
    """Where the rows of a checkpoint tensor with ``total`` rows go on this rank; rows of other ranks are in no run."""

    total: int
    runs: tuple[RowRun, ...]

    @property
    def count(self) -> int:
        """Rows of this rank."""
        return sum(run.count for run in self.runs)

    def moved(self, rows: int) -> RowMap:
        """The same rows, ``rows`` further down in the parameter."""
        return RowMap(self.total, tuple(RowRun(run.source, run.target + rows, run.count) for run in self.runs))

    def piece(self, parameter: Tensor, middle: tuple[int, ...] = ()) -> WeightPiece:
        """The piece that fills ``parameter`` row by row.

        Args:
            parameter: ``[rows, ...]``.
            middle: dimensions of size 1 that the checkpoint has after the rows and the parameter does not.
        """
        rest = tuple(parameter.shape[1:])
        copies = tuple(
            ((run.source_rows,), parameter[run.target_rows].view(run.count, *middle, *rest)) for run in self.runs
        )
        return WeightPiece((self.total, *middle, *rest), copies)


def whole_rows(total: int) -> RowMap:
    return RowMap(total, (RowRun(0, 0, total),))


def split_rows(sizes: Sequence[int], tp: TensorParallel, what: str) -> RowMap:
    """Map the rows of consecutive parts, each part split over the ranks.

    Args:
        what: named in the error.

    Raises:
        ConfigError: a size is not divisible by the number of ranks.
    """
    if tp.size == 1:
        return whole_rows(sum(sizes))
    runs, source, target = [], 0, 0
    for size in sizes:
        local = divide(size, tp.size, what)
        runs.append(RowRun(source + tp.rank * local, target, local))
        source, target = source + size, target + local
    return RowMap(source, tuple(runs))


def stacked(*parts: RowMap) -> dict[str, RowMap]:
    """The parts of a merged matrix, ``"0."``, ``"1."``, …: the rows of each, given from row 0 on, below those of the
    one before."""
    placed, rows = {}, 0
    for i, part in enumerate(parts):
        placed[f"{i}."] = part.moved(rows)
        rows += part.count
    return placed


@dataclass(frozen=True, slots=True)
class MatrixShard:
    """One rank's share of a matrix ``[rows, columns]`` that is merged from parts.

    Attributes:
        rows, columns: of this rank.
        parts: the prefix of each part's tensors -> where its rows go. Rows at the end that no part fills are zero.
        first_column, total_columns: which of the checkpoint's columns these are.
    """

    rows: int
    columns: int
    parts: dict[str, RowMap]
    first_column: int
    total_columns: int

    @property
    def num_filled(self) -> int:
        """Rows that some part fills."""
        return sum(rows.count for rows in self.parts.values())

    @property
    def source_columns(self) -> slice:
        return slice(self.first_column, self.first_column + self.columns)

    def piece(self, rows: RowMap, parameter: Tensor, *, stored: tuple[str, ...] = ()) -> WeightPiece:
        """The piece that fills the rows of one part of ``parameter [rows, columns]``."""
        columns = self.source_columns
        copies = tuple(((run.source_rows, columns), parameter[run.target_rows]) for run in rows.runs)
        return WeightPiece((rows.total, self.total_columns), copies, stored)


def concatenated(pieces: Sequence[WeightPiece]) -> WeightPiece:
    """Join pieces to the piece of one tensor: all rows in order, or the single number that all pieces share."""
    if pieces[0].shape == (1,) and not any(source for piece in pieces for source, _ in piece.copies):
        return WeightPiece((1,), tuple(copy for piece in pieces for copy in piece.copies))
    copies: list[tuple[Slices, CopyTarget]] = []
    rows = 0
    for piece in pieces:
        for (first, *rest), target in piece.copies:
            copies.append(((slice(rows + first.start, rows + first.stop), *rest), target))
        rows += piece.shape[0]
    return WeightPiece((rows, *pieces[0].shape[1:]), tuple(copies), pieces[0].stored)


def in_turn(pieces: Sequence[WeightPiece]) -> WeightPiece:
    """Join pieces of equal shape, of which a rank takes the same rows, to the piece of one tensor that holds a row of
    each in turn."""
    count, copies = len(pieces), list[tuple[Slices, CopyTarget]]()
    for parts in zip(*(piece.copies for piece in pieces), strict=True):
        sources, targets = zip(*parts, strict=True)
        (rows, *rest), *others = sources
        assert all(other == sources[0] for other in others)
        copies.append(((slice(count * rows.start, count * rows.stop), *rest), RowsInTurn(*targets)))
    return WeightPiece((count * pieces[0].shape[0], *pieces[0].shape[1:]), tuple(copies), pieces[0].stored)


def one_tensor(pieces: Sequence[WeightPiece]) -> WeightPiece:
    """Join pieces of equal shape to the piece of one tensor with one more dimension, the first."""
    copies = tuple(
        ((slice(i, i + 1), *source), OnlyOne(target)) for i, p in enumerate(pieces) for source, target in p.copies
    )
    return WeightPiece((len(pieces), *pieces[0].shape), copies, pieces[0].stored)


def whole(parameter: Tensor) -> WeightPiece:
    return WeightPiece(tuple(parameter.shape), (((slice(None),) * parameter.dim(), parameter),))


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device, place: Tensor | None = None) -> nn.Parameter:
    """An uninitialised parameter without gradient; its memory is ``place`` where that is given."""
    memory = torch.empty(shape, dtype=dtype, device=device) if place is None else place
    assert memory.shape == shape and memory.dtype == dtype
    return nn.Parameter(memory, requires_grad=False)


RECURRENCE_RANGES = {
    "A_log": (0.0, math.log(16.0)), "dt_bias": (math.log(1e-3), math.log(1e-1)), "D": (0.9, 1.1),
}  # fmt: skip
"""Bounds of random decays as in training: A in [1, 16], time steps in [0.001, 0.1] (through softplus, near its log)."""


def uniform_range(fan_in: int) -> tuple[float, float]:
    """Bounds of a uniform distribution with a standard deviation of ``fan_in ** -0.5``."""
    return -math.sqrt(3.0 / fan_in), math.sqrt(3.0 / fan_in)


class WeightModule(nn.Module):
    """A layer that owns parameters and can say how they are filled."""

    @abstractmethod
    def layouts(self) -> tuple[WeightLayout, ...]:
        """Every form in which a checkpoint may hold this layer's tensors; each is complete in itself."""

    def initial_range(self, name: str) -> tuple[float, float]:
        """Bounds of the uniform distribution of parameter ``name`` when weights are random.

        Linear maps get a standard deviation of ``fan_in ** -0.5`` (the last dimension), which keeps activations of
        order one.
        """
        return uniform_range(self.get_parameter(name).shape[-1])


_KV_SCALE = re.compile(r"\.([kv])_proj\.(?=\1_scale$)")
"""ModelOpt gives the scales of a KV cache to the projections; others give them to the attention layer."""


@dataclass(frozen=True, slots=True)
class WeightTable:
    """How one model's published tensor names relate to its modules.

    Attributes:
        packed: module name -> checkpoint names of its parts, in order (``qkv_proj``: q_proj, k_proj, v_proj). Where two
            kinds of layers have a module of the same name, its parent stands before it (``average.in_proj``).
        renames: leading part of a tensor name in the checkpoint -> leading part of the module name.
        modules: one component of a module's path, or of the name of an expert's part, -> what checkpoints call it
            (``mlp``: feed_forward).
        fused: module name -> the checkpoint's name of the one tensor that holds the rows of all its parts, in order.
        patterns: regular expression -> replacement, for whole names in a checkpoint, before all else.
        aliases: one component of a stored name -> the component that is meant, where checkpoints have several names
            for one module.
        ignorable: patterns (``fnmatch``) of checkpoint names that are left out where the model has no such module.
    """

    packed: dict[str, tuple[str, ...]]
    renames: dict[str, str] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    fused: dict[str, str] = field(default_factory=dict)
    patterns: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    ignorable: tuple[str, ...] = ()

    def module_name(self, stored: str) -> str:
        """Convert the name of a tensor in a checkpoint to the form of ``checkpoint_name``."""
        name = _KV_SCALE.sub(".", stored)
        for pattern, replacement in self.patterns.items():
            name = re.sub(pattern, replacement, name)
        prefix = next((p for p in self.renames if name.startswith(p)), None)
        name = name if prefix is None else self.renames[prefix] + name.removeprefix(prefix)
        return ".".join(self.aliases.get(component, component) for component in name.split("."))

    def checkpoint_name(self, module_name: str, part: str) -> str:
        """``model.layers.0.self_attn.qkv_proj`` and ``1.weight`` -> ``model.layers.0.self_attn.k_proj.weight``."""
        *parents, leaf = module_name.split(".")
        parent = ".".join(self.modules.get(component, component) for component in parents)
        parts = self.packed.get(f"{parents[-1]}.{leaf}" if parents else leaf) or self.packed.get(leaf)
        if parts is None or not part[0].isdigit():
            inside = part
            if part.count(".") > 1:  # 7.gate_proj.weight, of an expert
                inside = ".".join(self.modules.get(component, component) for component in part.split("."))
            return f"{parent}.{self.modules.get(leaf, leaf)}.{inside}".removeprefix(".")
        index, _, parameter = part.partition(".")
        return f"{parent}.{parts[int(index)]}.{parameter}"

    def named(self, module_name: str, layout: WeightLayout) -> WeightLayout:
        """A module's layout under the checkpoint's names."""
        parent, _, leaf = module_name.rpartition(".")
        if leaf not in self.fused or not layout or not all(part[0].isdigit() for part in layout):
            return {self.checkpoint_name(module_name, part): piece for part, piece in layout.items()}
        together: dict[str, list[WeightPiece]] = {}
        for part, piece in sorted(layout.items()):
            together.setdefault(part.partition(".")[2], []).append(piece)
        name = self.checkpoint_name(f"{parent}.{self.fused[leaf]}", "")
        return {f"{name}{parameter}": concatenated(pieces) for parameter, pieces in together.items()}

    def part_name(self, module_name: str, parameter: str) -> str:
        """Return the checkpoint's name of the module with a parameter: ``...self_attn.k_proj`` for ``1.weight``."""
        parent, _, leaf = module_name.rpartition(".")
        if leaf in self.fused and parameter[0].isdigit():
            module_name, parameter = f"{parent}.{self.fused[leaf]}", parameter.partition(".")[2]
        return self.checkpoint_name(module_name, parameter).rpartition(".")[0]

    def published_names(self, name: str) -> tuple[str, ...]:
        """``name``, and what a checkpoint may call it before ``aliases`` and ``renames``."""
        names = [name]
        for stored, component in self.aliases.items():
            parts = [other.split(".") for other in names]
            names += [".".join(stored if p == component else p for p in path) for path in parts if component in path]
        for old, new in self.renames.items():
            names += [old + other.removeprefix(new) for other in names if other.startswith(new)]
        return tuple(names)


class LoadableModel(nn.Module):
    """A model that the loader can fill: a tree of ``WeightModule`` and the table of its names."""

    weight_table: WeightTable
