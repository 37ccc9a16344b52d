"""Initialisation of a model's parameters, from safetensors files or with reproducible random numbers.

Job: plan which checkpoint tensor goes to which rows of which parameter, check names and shapes of the whole checkpoint
before the first copy, then copy tensor by tensor. Owns: the accounting (every parameter written, every tensor used or
declared ignorable) and its errors. Does not know: what layers compute, or which rows they need (see ``layouts``).

At most one tensor is in host memory at a time. Under tensor parallelism only the rows of this rank are read.
"""

import hashlib
import logging
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor, nn

from weft.config.model import ModelConfig
from weft.errors import ConfigError, WeightsError
from weft.layers.weight import LoadableModel, WeightModule, WeightPiece
from weft.weights.safetensors_folder import FLOATS, SafetensorsFolder

logger = logging.getLogger(__name__)

_HEAD = "lm_head.weight"
_ROUNDED_AT_ONCE = 2**26  # random float32 values that are held at a time
_SHOWN = 12  # names listed per kind of problem
_MOST_READS = 256
"""Most small parts of a tensor that are read one by one. A tensor of more parts, such as single rows, is read whole."""
_SMALL_PART = 2**20
"""Numbers from which a part is not small."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of a load.

    Attributes:
        num_tensors: checkpoint tensors used (0 for random weights).
        num_bytes: bytes of the model's parameters on this rank.
        ignored: pattern -> number of checkpoint tensors that it matched.
        seconds: wall time.
    """

    num_tensors: int
    num_bytes: int
    ignored: dict[str, int]
    seconds: float


def load_weights(
    model: LoadableModel, model_config: ModelConfig, folder: Path, load_format: str, seed: int
) -> LoadReport:
    """Write every parameter of ``model`` in place.

    Args:
        folder: the checkpoint folder; not read for ``"dummy"``.
        load_format: ``"auto"`` (safetensors) or ``"dummy"`` (random, straight on the device).
        seed: seed of the random weights. The numbers of a parameter depend on the seed and its name alone.

    Raises:
        ConfigError: unknown ``load_format``.
        WeightsError: there are no readable safetensors files, or tensors are missing, left over or of the wrong shape
            (listed).
    """
    start = time.perf_counter()
    _check_owners(model)
    num_tensors, ignored = 0, dict[str, int]()
    with torch.no_grad():
        if load_format == "dummy":
            _initialize_random(model, seed)
        elif load_format == "auto":
            num_tensors, ignored = _load_safetensors(model, model_config, Path(folder))
        else:
            raise ConfigError(f"load_format={load_format!r} is not valid; allowed are 'auto' and 'dummy'")
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    return LoadReport(num_tensors, num_bytes, ignored, time.perf_counter() - start)


def _check_owners(model: nn.Module) -> None:
    """Check that a ``WeightModule`` owns every parameter. Nobody would fill the others."""
    names = [
        f"{module_name}.{name}"
        for module_name, module in model.named_modules()
        if not isinstance(module, WeightModule)
        for name, _ in module.named_parameters(recurse=False)
    ]
    assert not names, f"parameters of modules that are no WeightModule, and so have no layouts: {_listed(names)}"


def _initialize_random(model: nn.Module, seed: int) -> None:
    filled: set[int] = set()  # a tied head shares the embedding's parameter
    for module_name, module in model.named_modules():
        if not isinstance(module, WeightModule):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in filled:
                continue
            filled.add(id(parameter))
            digest = hashlib.blake2b(f"{seed}/{module_name}.{name}".encode(), digest_size=8).digest()
            generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest, "big") >> 1)
            _initialize_uniform(parameter, *module.initial_range(name), generator)


def _initialize_uniform(parameter: Tensor, low: float, high: float, generator: torch.Generator) -> None:
    """Fill a parameter with uniform random numbers. Floats of one byte have no generator, so parts of float32 numbers
    are rounded."""
    if not parameter.is_floating_point():
        parameter.random_(int(low), int(high), generator=generator)
        return
    if parameter.element_size() > 1:
        parameter.uniform_(low, high, generator=generator)
        return
    for part in parameter.view(-1).split(_ROUNDED_AT_ONCE):
        wide = torch.empty(part.shape, dtype=torch.float32, device=part.device)
        part.copy_(wide.uniform_(low, high, generator=generator))


def _load_safetensors(model: LoadableModel, model_config: ModelConfig, folder: Path) -> tuple[int, dict[str, int]]:
    with SafetensorsFolder(folder) as checkpoint:
        tensors, ignored = _module_names(model, checkpoint)
        plan = _plan(model, tensors.keys())
        head = tensors.pop(_HEAD, None) if model_config.tie_word_embeddings else None
        _check(plan, tensors, checkpoint)
        for name, stored in tensors.items():
            _copy_piece(plan[name], checkpoint, stored)
        if head is not None:
            embedding = model.weight_table.checkpoint_name("model.embed_tokens", "weight")
            _check_tied_head(checkpoint, head, embedding, plan[embedding])
    for pattern, count in ignored.items():
        logger.info("%d tensors of the checkpoint match %s and are not needed", count, pattern)
    return len(tensors) + (head is not None), ignored


def _copy_piece(piece: WeightPiece, checkpoint: SafetensorsFolder, stored: str) -> None:
    shape = checkpoint.shape(stored)
    is_transposed = piece.is_transposed(shape)
    small = len(piece.copies) > _MOST_READS and math.prod(shape) < len(piece.copies) * _SMALL_PART
    whole = checkpoint.read(stored, (slice(None),) * len(shape)) if small else None
    for source, target in piece.copies:
        if whole is not None:
            target.copy_(whole[source])
        elif is_transposed:
            experts, rows, columns = source
            target.copy_(checkpoint.read(stored, (experts, columns, rows)).transpose(1, 2))
        else:
            target.copy_(checkpoint.read(stored, source if shape else ()))


def _module_names(model: LoadableModel, checkpoint: SafetensorsFolder) -> tuple[dict[str, str], dict[str, int]]:
    """Map each tensor's name in the text model to its name in the checkpoint, and count ignorable tensors by
    pattern."""
    table, tensors, ignored = model.weight_table, dict[str, str](), dict[str, int]()
    ignorable = ignorable_patterns(model)
    for stored in checkpoint.names:
        pattern = next((p for p in ignorable if fnmatchcase(stored, p)), None)
        if pattern is not None:
            ignored[pattern] = ignored.get(pattern, 0) + 1
            continue
        checkpoint.check_dtype(stored)
        name = table.module_name(stored)
        if name in tensors:
            raise WeightsError(
                f"{checkpoint.folder}: {tensors[name]} and {stored} are the same tensor of the model; remove one"
            )
        tensors[name] = stored
    return tensors, ignored


def ignorable_patterns(model: LoadableModel) -> list[str]:
    """The patterns of checkpoint names that the model has no modules for."""
    modules = [name for name, _ in model.named_modules()]
    return [p for p in model.weight_table.ignorable if not any(fnmatchcase(name, p) for name in modules)]


def _plan(model: LoadableModel, available: Iterable[str]) -> dict[str, WeightPiece]:
    """Map the checkpoint name of every tensor that the model needs to its piece.

    A layer with several layouts uses the first layout of which the checkpoint has any tensor.
    """
    plan: dict[str, WeightPiece] = {}
    names = set(available)
    for module_name, module in model.named_modules():
        if isinstance(module, WeightModule):
            layouts = [model.weight_table.named(module_name, layout) for layout in module.layouts()]
            plan |= next((layout for layout in layouts if not names.isdisjoint(layout)), layouts[0])
    return plan


def _check(plan: dict[str, WeightPiece], tensors: dict[str, str], checkpoint: SafetensorsFolder) -> None:
    """Compare names and shapes of the whole checkpoint with the plan."""
    missing = [name for name, piece in plan.items() if name not in tensors and not piece.optional]
    unexpected = [stored for name, stored in tensors.items() if name not in plan]
    wrong, stored_as = [], []
    num_mtp = sum(name.startswith("mtp.") for name in plan)
    for name, stored in tensors.items():
        if name not in plan:
            continue
        wrong += wrong_shape(stored, checkpoint.shape(stored), plan[name])
        stored_as += wrong_dtype(stored, checkpoint.dtype(stored), plan[name])
    if missing and all(name.startswith("mtp.") for name in missing) and len(missing) == num_mtp:
        raise WeightsError(
            f"{checkpoint.folder}: the checkpoint has no multi-token-prediction head (mtp.*), which speculative_config "
            "with method 'mtp' needs; choose method 'ngram', or a checkpoint with the head"
        )
    kinds = {"missing": missing, "unexpected": unexpected, "of the wrong shape": wrong, "of the wrong dtype": stored_as}
    if problems := described(kinds):
        raise WeightsError(
            f"{checkpoint.folder}: the tensors do not match config.json; {problems}. "
            "Check that config.json and the weight files belong together and are complete"
        )


def wrong_shape(stored: str, shape: tuple[int, ...], piece: WeightPiece) -> list[str]:
    """The problem of a tensor whose shape does not fit; empty if it fits."""
    needed = piece.shape
    if shape == needed or (shape == () and needed == (1,)) or piece.is_transposed(shape):
        return []
    return [f"{stored} is {list(shape)}, the config needs {list(needed)}"]


def wrong_dtype(stored: str, dtype: str, piece: WeightPiece) -> list[str]:
    """The problem of a tensor whose dtype, as safetensors writes it, does not fit; empty if it fits."""
    if dtype in (piece.stored or FLOATS):
        return []
    return [f"{stored} is {dtype}, the config needs {' or '.join(piece.stored) or 'F32, F16 or BF16'}"]


def described(problems: dict[str, list[str]]) -> str:
    """List problems by their kind; empty if there are none."""
    return "; ".join(f"{len(names)} {kind}: {_listed(names)}" for kind, names in problems.items() if names)


def _listed(names: list[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _check_tied_head(checkpoint: SafetensorsFolder, stored: str, name: str, embedding: WeightPiece) -> None:
    """Check that the head of a checkpoint with tied embeddings, if present, equals the embedding."""
    shape = checkpoint.shape(stored)
    same = shape == embedding.shape and all(
        isinstance(target, Tensor) and torch.equal(checkpoint.read(stored, source).to(target), target)
        for source, target in embedding.copies
    )
    if not same:
        raise WeightsError(
            f"{checkpoint.folder}: config.json has tie_word_embeddings=true, but {stored} (shape {list(shape)}) "
            f"differs from {name}; set tie_word_embeddings to false or remove the tensor"
        )
