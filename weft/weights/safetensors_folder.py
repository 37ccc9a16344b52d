"""The safetensors files of a checkpoint folder as one collection of named tensors."""

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.errors import WeftError, WeightsError
from weft.layers.weight import E4M3, E8M0, INT32, INT64, UINT8

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth")
FLOATS = ("F64", "F32", "F16", "BF16")
_DTYPES = (*FLOATS, *E4M3, *E8M0, *INT32, *INT64, *UINT8)


class SafetensorsFolder:
    """The open files of one checkpoint; a context manager.

    Attributes:
        folder: where the files are.
        names: every tensor in them, file by file in the order in which the file lists them.

    Raises:
        WeightsError: on entry. The folder has no files or only pickle files, the index names absent files or tensors,
            or a tensor is in two files. A file is truncated or is not safetensors.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._tensors: dict[str, Any] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            listed = self._find()
            for path in listed:
                self._open(path, stack)
            self._check_index(listed)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tensors.clear()
        self._stack.close()

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].get_shape())

    def dtype(self, name: str) -> str:
        """The dtype as safetensors writes it: ``BF16``, ``F8_E4M3``."""
        return str(self._tensors[name].get_dtype())

    def check_dtype(self, name: str) -> None:
        """Raise WeightsError if Weft reads no tensors of this dtype. Tensors that nobody reads may have any dtype."""
        if self.dtype(name) not in _DTYPES:
            raise WeightsError(
                f"{self.folder}: tensor {name} has dtype {self.dtype(name)}; supported are {', '.join(_DTYPES)} "
                "(those of one byte and the integers in quantised checkpoints alone)"
            )

    def read(self, name: str, source: tuple[slice, ...]) -> Tensor:
        """Read ``tensor[source]`` to the CPU. Only these bytes are read."""
        return self._tensors[name][source]

    def _find(self) -> dict[Path, set[str]]:
        """Map each file to the tensors that the index expects in it; empty without an index."""
        if not self.folder.is_dir():
            raise WeightsError(
                f"{self.folder} is not a folder; give the folder that holds config.json and *.safetensors"
            )
        if (self.folder / _SINGLE).is_file():
            return {self.folder / _SINGLE: set()}
        if (self.folder / _INDEX).is_file():
            return self._read_index()
        files = sorted(self.folder.glob("*.safetensors"))
        if files:
            return {path: set() for path in files}
        pickles = sorted(path.name for pattern in _PICKLES for path in self.folder.glob(pattern))
        if pickles:
            raise WeightsError(
                f"{self.folder}: {', '.join(pickles)} are pickle files, which can run code when opened and are not "
                "read; convert them: load the model with transformers and call save_pretrained(folder)"
            )
        raise WeightsError(
            f"{self.folder} holds no *.safetensors files; copy the weights there, or use load_format='dummy' "
            "for random ones"
        )

    def _read_index(self) -> dict[Path, set[str]]:
        index = self.folder / _INDEX
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files: dict[Path, set[str]] = {}
            for name, file in weight_map.items():
                files.setdefault(self.folder / file, set()).add(name)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise WeightsError(
                f"{index} is not a safetensors index (a JSON object with 'weight_map': tensor name -> file name); "
                "copy it again"
            ) from None
        absent = sorted(path.name for path in files if not path.is_file())
        if absent:
            raise WeightsError(f"{index} names files that are not there: {', '.join(absent)}; copy or download them")
        return files

    def _open(self, path: Path, stack: ExitStack) -> None:
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
            tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        except OSError as error:  # a property of the machine, perhaps a temporary one
            raise WeftError(f"{path} cannot be read: {error}; see to its folder, and start again") from None
        except SafetensorError as error:
            raise WeightsError(
                f"{path} is truncated or not a safetensors file ({error}); copy or download it again"
            ) from None
        for name, tensor in tensors.items():
            if name in self._tensors:
                raise WeightsError(
                    f"{self.folder}: tensor {name} is in {path.name} and in another file; remove one of them"
                )
            self._tensors[name] = tensor

    def _check_index(self, listed: dict[Path, set[str]]) -> None:
        absent = sorted(name for names in listed.values() for name in names if name not in self._tensors)
        if absent:
            raise WeightsError(
                f"{self.folder / _INDEX} names tensors that its files do not hold: {', '.join(absent[:12])}"
                f"{'' if len(absent) <= 12 else f', and {len(absent) - 12} more'}; copy or download the files again"
            )
