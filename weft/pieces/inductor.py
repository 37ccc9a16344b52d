"""Compiling pieces with Inductor, once for any number of tokens, with the results kept on disk.

Job: from a piece's graph to a function. Owns: the artefacts under the cache folder, and their keys. Does not know:
where graphs come from, who captures what is compiled.

An artefact is keyed by everything that it depends on: the code of the piece, the shapes, dtypes and strides of its
inputs, the versions and the device. Layers that are built alike have pieces of the same code, which are compiled once.
Nothing checks guards when a compiled piece runs: it holds for any number of tokens, and all else about it is fixed.
"""

import copy
import hashlib
import itertools
import logging
import os
import platform
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from weft.errors import ConfigError
from weft.pieces.sources import CompileCounters

logger = logging.getLogger(__name__)

_ARTEFACT = "artefact"
_OTHERS_SETTINGS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Variables that Inductor sets for the whole process while it compiles."""


class CompiledPiece:
    """A compiled piece. To whoever records operations it is a single one, ``weft::compiled_piece``."""

    def __init__(self, function: Callable[..., Any], is_size: Sequence[bool], token_tensor: int) -> None:
        self._function, self._is_size, self._token_tensor = function, tuple(is_size), token_tensor
        self._number = next(_NUMBERS)
        _PIECES[self._number] = self

    def __call__(self, *arguments: Any) -> list[Tensor]:
        tensors = [a for a, is_size in zip(arguments, self._is_size, strict=True) if not is_size]
        return torch.ops.weft.compiled_piece(tensors, self._number)

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The work of the operator."""
        num_tokens, rest = tensors[self._token_tensor].shape[0], iter(tensors)
        return list(self._function(*(num_tokens if is_size else next(rest) for is_size in self._is_size)))


_NUMBERS = itertools.count()
_PIECES: weakref.WeakValueDictionary[int, CompiledPiece] = weakref.WeakValueDictionary()
_LIBRARY = torch.library.Library("weft", "FRAGMENT")
_LIBRARY.define("compiled_piece(Tensor[] tensors, int number) -> Tensor[]")
_LIBRARY.impl("compiled_piece", lambda tensors, number: _PIECES[number].run(tensors), "CompositeExplicitAutograd")


class PieceCompiler:
    """Compiles pieces, or finds them on disk.

    Args:
        device: where the pieces will run.
        folder: of the artefacts.

    Attributes:
        folder: where they are in fact.

    Raises:
        ConfigError: Inductor lacks what it needs on this machine.
    """

    def __init__(self, device: torch.device, folder: Path) -> None:
        check_available(device)
        self.counters = CompileCounters()
        self.folder, self._environment = _usable(folder), _environment(device)
        self._known: dict[str, Callable[..., Any]] = {}

    def __call__(self, graph: GraphModule) -> CompiledPiece:
        """The piece as a function of the same arguments, which returns a list of the results."""
        graph = _returning_tuple(graph)
        examples = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
        is_size = [not isinstance(example, Tensor) for example in examples]
        tensors = [example for example in examples if isinstance(example, Tensor)]
        token_tensor = next(i for i, x in enumerate(tensors) if not isinstance(x.shape[0], int))
        return CompiledPiece(self._function(graph, examples), is_size, token_tensor)

    def _function(self, graph: GraphModule, examples: list[Any]) -> Callable[..., Any]:
        key = self._key(graph)
        if key in self._known:
            self.counters.reused += 1
        else:
            self._known[key] = self._from_disk(key) or self._compiled(key, graph, examples)
        return self._known[key]

    def _key(self, graph: GraphModule) -> str:
        text = "\n".join([self._environment, code_of(graph)])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def _from_disk(self, key: str) -> Callable[..., Any] | None:
        path = self.folder / key / _ARTEFACT
        if not path.exists():
            return None
        from torch._inductor import CompiledArtifact

        try:
            with _cache_at(path.parent):
                artefact = CompiledArtifact.load(path=str(path), format="binary")
        except Exception:  # whatever is wrong with a file of a cache, it is made anew
            logger.warning("the compiled piece in %s cannot be used and is compiled again", path.parent, exc_info=True)
            shutil.rmtree(path.parent, ignore_errors=True)
            return None
        self.counters.cache_hits += 1
        return artefact

    def _compiled(self, key: str, graph: GraphModule, examples: list[Any]) -> Callable[..., Any]:
        from torch._inductor import config, standalone_compile

        folder = self.folder / key
        with _cache_at(folder), config.patch(compile_threads=1):
            artefact = standalone_compile(graph, examples, dynamic_shapes="from_graph")
            self.counters.compiled += 1
            _save(artefact, folder)
        return artefact


def _usable(folder: Path) -> Path:
    """The folder, or a temporary one where it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    except OSError as error:
        logger.warning(
            "the cache folder cannot be made (%s), so the next start compiles again; name another one in the variable "
            "WEFT_CACHE_DIR",
            error,
        )
        return Path(tempfile.mkdtemp(prefix="weft-pieces-"))


def _save(artefact: Any, folder: Path) -> None:
    """Into a temporary file first: another process may start with the same model at the same time."""
    temporary = folder / f"{_ARTEFACT}.{os.getpid()}"
    try:
        artefact.save(path=str(temporary), format="binary")
        temporary.rename(folder / _ARTEFACT)
    except (RuntimeError, AssertionError, OSError) as error:
        logger.warning("a compiled piece cannot be kept for the next start: %s", error)


@contextmanager
def _cache_at(folder: Path) -> Iterator[None]:
    """Inductor and its Triton kernels keep their files in ``folder``; the process's own settings come back."""
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    folder.mkdir(parents=True, exist_ok=True)
    before = {name: os.environ.get(name) for name in _OTHERS_SETTINGS}
    os.environ.pop("TRITON_CACHE_DIR", None)  # then it follows the folder
    try:
        with temporary_cache_dir(str(folder)):
            yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def code_of(graph: GraphModule) -> str:
    """The graph as text that depends on nothing but what is computed: nodes are numbered, inputs have their types."""
    numbers = {node: f"%{i}" for i, node in enumerate(graph.graph.nodes)}
    return "\n".join(_line(node, numbers) for node in graph.graph.nodes)


def _line(node: Node, numbers: dict[Node, str]) -> str:
    if node.op == "placeholder":
        return f"{numbers[node]} = {_type_of(node.meta['example_value'])}"
    target = node.target if isinstance(node.target, str) else _name_of(node.target)
    arguments = torch.fx.map_arg((node.args, node.kwargs), lambda other: numbers[other])
    return f"{numbers[node]} = {node.op} {target} {arguments}"


def _name_of(target: Any) -> str:
    return str(target) if isinstance(target, torch._ops.OpOverload) else f"{target.__module__}.{target.__qualname__}"


def _type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}"
    return f"size {value}"


def _environment(device: torch.device) -> str:
    if device.type == "cuda":
        where = f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)} {torch.version.cuda}"
    else:
        where = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    versions = [f"{name} {_version(name)}" for name in ("weft", "torch", "triton")]
    return "\n".join([*versions, f"python {sys.version}", where])


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "absent"


def _returning_tuple(graph: GraphModule) -> GraphModule:
    """A copy that returns a tuple of tensors, as Inductor wants it."""
    graph = copy.deepcopy(graph)
    output = graph.graph.output_node()
    if isinstance(output.args[0], Node):
        output.args = ((output.args[0],),)
        graph.recompile()
    return graph


def check_available(device: torch.device) -> None:
    """Raises ConfigError where Inductor lacks a compiler."""
    remedy = "or use piecewise_cuda_graph_compiler='capture' without enable_torch_compile, which compiles nothing"
    if device.type == "cuda":
        if _version("triton") == "absent":
            raise ConfigError(f"Inductor needs Triton for device 'cuda': pip install triton, {remedy}")
        return
    wanted = os.environ.get("CXX", "g++")
    if shutil.which(wanted) is None:
        raise ConfigError(
            f"Inductor needs a C++ compiler for device 'cpu', and {wanted!r} is not there: install g++, or name "
            f"another one in the variable CXX, {remedy}"
        )
