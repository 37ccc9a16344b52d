"""New values for the parameters of a loaded model, copied to where the old ones are.

Job: find the parameters of each offered tensor, check names, shapes and dtypes, copy, and take copies back. Owns: the
accounting of one update. Does not know: where tensors come from, ranks, what else depends on weights.

Names, shapes and conversions are those of loading (``loader.py``), so quantised parameters are quantised as a load
does it. An update may hold any of a checkpoint's tensors, in any order and in any of a layer's layouts.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Self

import torch
from torch import Tensor

from weft.errors import WeightsError
from weft.layers.weight import LoadableModel, Slices, WeightModule, WeightPiece
from weft.quantization.storage import Largest
from weft.weights.loader import described, ignorable_patterns, wrong_dtype, wrong_shape

UNDO_BYTES = 2**30
"""Upper bound on old parameters that one update keeps in host memory, to take its copies back."""

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint8: "U8",
}
"""Names of dtypes in safetensors files."""

Reader = Callable[[Slices], Tensor]
"""Returns the values of a tensor in the given slices, on any device."""

_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Offered:
    """A tensor of an update. ``name`` is that of the checkpoint, ``dtype`` as safetensors writes it."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Self:
        return cls(name, tuple(tensor.shape), DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)))


class ModelTensors:
    """Every checkpoint tensor that a model can take, in every layout.

    Attributes:
        pieces: the parts of parameters that a tensor fills, by its name.
        owners: the layer of each tensor.
        ties_head: whether the model's head is its embedding.
    """

    def __init__(self, model: LoadableModel, *, ties_head: bool) -> None:
        self.pieces: dict[str, WeightPiece] = {}
        self.owners: dict[str, WeightModule] = {}
        self.ties_head = ties_head
        self._table, self._ignorable = model.weight_table, ignorable_patterns(model)
        self._layouts: list[list[set[str]]] = []
        for module_name, module in model.named_modules():
            if not isinstance(module, WeightModule):
                continue
            layouts = [self._table.named(module_name, layout) for layout in module.layouts()]
            for layout in layouts:
                self.pieces = layout | self.pieces
                self.owners |= dict.fromkeys(layout, module)
            self._layouts.append([{n for n, piece in layout.items() if not piece.optional} for layout in layouts])
        self.embedding = self._table.checkpoint_name("model.embed_tokens", "weight")

    def name(self, stored: str) -> str | None:
        """The name of a checkpoint's tensor in the text model; None if the model does not need the tensor."""
        if any(fnmatchcase(stored, pattern) for pattern in self._ignorable):
            return None
        return self._table.module_name(stored)

    def is_head(self, name: str) -> bool:
        """Whether this is the head of a checkpoint with tied embeddings, which may only repeat the embedding."""
        return self.ties_head and name == _HEAD

    def missing(self, names: set[str]) -> list[str]:
        """The tensors that ``names`` lack to fill every parameter."""
        gaps: list[str] = []
        for layouts in self._layouts:
            lacking = [sorted(layout - names) for layout in layouts]
            if all(lacking):
                shortest: list[str] = min(lacking, key=len)
                gaps += shortest
        return gaps


@dataclass(slots=True)
class WeightUpdate:
    """One update.

    Attributes:
        tensors: of the model.
        complete: every parameter must get a value, since the present ones are not valid.
        num_tensors: number of tensors copied.
    """

    tensors: ModelTensors
    complete: bool = False
    num_tensors: int = 0
    _seen: set[str] = field(default_factory=set)
    _reset: set[int] = field(default_factory=set)
    _old: list[tuple[Tensor, Tensor]] | None = field(default_factory=list)
    _saved: set[WeightModule] = field(default_factory=set)
    _old_bytes: int = 0
    _read_head: Reader | None = None

    def check(self, offered: Sequence[Offered]) -> None:
        """Check all tensors of the update before the first copy.

        Raises:
            WeightsError: names are unknown, given twice or missing, or shapes or dtypes are wrong (listed).
        """
        seen: set[str] = set()
        kinds: dict[str, list[str]] = {}
        for tensor in offered:
            for kind, problems in self._problems(tensor, seen).items():
                kinds[kind] = kinds.get(kind, []) + problems
        _refuse(kinds | self._lacking(seen))
        owners = {self.tensors.owners[name] for name in seen if name in self.tensors.owners}
        if sum(p.nbytes for owner in owners for p in owner.parameters(recurse=False)) > UNDO_BYTES:
            self._old = None  # keeping a part of them would help nobody

    def _problems(self, tensor: Offered, seen: set[str]) -> dict[str, list[str]]:
        """The problems of one tensor by their kind. Its name is added to ``seen``."""
        name = self.tensors.name(tensor.name)
        if name is None:
            return {}
        if name in seen:
            return {"given twice": [tensor.name]}
        seen.add(name)
        known = self.tensors.embedding if self.tensors.is_head(name) else name
        piece = self.tensors.pieces.get(known)
        if piece is None:
            return {"unexpected": [tensor.name]}
        return {
            "of the wrong shape": wrong_shape(tensor.name, tensor.shape, piece),
            "of the wrong dtype": wrong_dtype(tensor.name, tensor.dtype, piece),
        }

    def _lacking(self, seen: set[str]) -> dict[str, list[str]]:
        """The tensors that have to come with those in ``seen``."""
        shared = {id(value) for name in seen for value in self._shared_values(name)}
        with_shared = (
            [n for n in self.tensors.pieces if n not in seen and self._has_shared(n, shared)] if shared else []
        )
        missing = self.tensors.missing(seen) if self.complete else []
        return {"missing": missing, "missing, whose largest value counts": with_shared}

    def _shared_values(self, name: str) -> Iterable[Tensor]:
        piece = self.tensors.pieces.get(name)
        return [t.value for _, t in piece.copies if isinstance(t, Largest)] if piece is not None else []

    def _has_shared(self, name: str, shared: set[int]) -> bool:
        return any(id(value) in shared for value in self._shared_values(name))

    @torch.no_grad()
    def copy(self, tensor: Offered, read: Reader) -> None:
        """Copy one tensor to where it belongs. Raises WeightsError as ``check``."""
        name = self.tensors.name(tensor.name)
        _refuse(self._problems(tensor, self._seen))
        if name is None:
            return
        self.num_tensors += 1
        if self.tensors.is_head(name):
            self._read_head = read
            return
        piece, owner = self.tensors.pieces[name], self.tensors.owners[name]
        self._save(owner)
        is_transposed = piece.is_transposed(tensor.shape)
        for source, target in piece.copies:
            if isinstance(target, Largest) and id(target.value) not in self._reset:
                self._reset.add(id(target.value))
                target.reset()
            if is_transposed:
                experts, rows, columns = source
                target.copy_(read((experts, columns, rows)).transpose(1, 2))
            else:
                target.copy_(read(source))

    def _save(self, owner: WeightModule) -> None:
        """Keep a layer's parameters before the first copy to it, while there is room for them."""
        if self._old is None or owner in self._saved:
            return
        self._saved.add(owner)
        parameters = list(owner.parameters(recurse=False))
        self._old_bytes += sum(parameter.nbytes for parameter in parameters)
        if self._old_bytes > UNDO_BYTES:
            self._old = None
            return
        self._old += [(p, p.detach().to("cpu", copy=True)) for p in parameters]

    @torch.no_grad()
    def finish(self) -> None:
        """Check what only the whole update shows. Raises WeightsError."""
        _refuse(self._lacking(self._seen))
        if self._read_head is not None and not self._equals_embedding(self._read_head):
            raise WeightsError(
                f"the update's {_HEAD} differs from its embedding, but config.json has tie_word_embeddings=true; "
                "leave it out"
            )

    def _equals_embedding(self, read: Reader) -> bool:
        copies = self.tensors.pieces[self.tensors.embedding].copies
        return all(isinstance(t, Tensor) and torch.equal(read(source).to(t), t) for source, t in copies)

    @torch.no_grad()
    def roll_back(self) -> bool:
        """Write the old values back. Returns False if they were too many to keep."""
        if self._old is None:
            return False
        for parameter, old in self._old:
            parameter.copy_(old)
        return True


def _refuse(kinds: dict[str, list[str]]) -> None:
    if problems := described(kinds):
        raise WeightsError(
            f"the update does not match the model; {problems}. Use the names, shapes and dtypes of the "
            "checkpoint that the engine was started from"
        )
