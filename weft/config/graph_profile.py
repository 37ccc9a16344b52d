"""Measured graph modes on disk: what ``weft tune`` found, and where it applies.

Job: the file's format, and whether a stored profile fits an engine. Owns: the folder of profiles, and the settings that
profiles depend on. Does not know: how modes are measured, or which mode a batch gets (``pieces/mode_table.py``).

A profile fits if device, model, settings and versions equal those of the measurement. Differences are reported by name.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from weft.config.cache_folder import cache_folder
from weft.config.model import Mixers, ModelConfig
from weft.errors import ConfigError
from weft.platforms.cpu import cpu_name

FORMAT = 2
"""Version of the file's format. Files of other versions are not read."""

SETTINGS = tuple(
    "dtype backend mamba_ssm_dtype kv_cache_dtype tensor_parallel_size enable_expert_parallel "
    "disable_custom_all_reduce page_size max_model_len max_num_seqs max_num_batched_tokens cuda_graph_bs "
    "cuda_graph_max_bs piecewise_cuda_graph_tokens piecewise_cuda_graph_max_tokens piecewise_cuda_graph_compiler "
    "splitting_ops enable_torch_compile torch_compile_max_bs".split()
)
"""Settings that change the cost of a step in some mode."""


class Timing(msgspec.Struct, frozen=True):
    """Timing of one batch in every mode that can run it. ``ms[mode]``: median milliseconds of a step."""

    num_tokens: int
    ms: dict[str, float]


class GraphProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A measurement of graph modes, and the engine that was measured.

    Attributes:
        format: the format version of the writer.
        model: ``model_hash`` of the checkpoint.
        versions: the versions of Weft, torch and Triton.
        date: UTC.
        splits: timings of prompts in pieces, for every measured list of split ops.
        splitting_ops: the fastest list of split ops, used for all other measurements; empty if no list was measured.
        prefill, mixed, decode: timings of batches of prompts, of prompts and decodes, and of decodes, by ascending
            token counts.
    """

    format: int = FORMAT
    device: str
    model: str
    settings: dict[str, Any]
    versions: dict[str, str]
    date: str = ""
    splits: dict[str, list[Timing]] = {}
    splitting_ops: list[str] = []
    prefill: list[Timing] = []
    mixed: list[Timing] = []
    decode: list[Timing] = []


def empty_profile(values: Mapping[str, Any], model: ModelConfig) -> GraphProfile:
    """Make a profile without figures that describes an engine with these settings on this machine. A stored profile
    must equal it.

    Args:
        values: resolved settings by name.
    """
    return GraphProfile(
        device=device_name(values["device"]),
        model=model_hash(model),
        settings={name: _plain(values[name]) for name in SETTINGS},
        versions=installed_versions(),
    )


def model_hash(model: ModelConfig) -> str:
    """Sixteen hexadecimal digits of the model's geometry."""
    geometry = dataclasses.asdict(model)
    del geometry["eos_token_ids"]
    return _hash(geometry)


def default_path(profile: GraphProfile) -> Path:
    """The path at which a start looks for the profile."""
    rest = _hash([profile.device, profile.settings])[:8]
    return _folder() / f"{profile.model}-{rest}.json"


def write_profile(profile: msgspec.Struct, path: Path) -> None:
    """Write a profile, of graphs or of drafts. A concurrent reader sees either the old file or the new one.

    Raises:
        ConfigError: the file cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1))
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"the profile {path} cannot be written: {error.strerror or error}") from error


def read_profile(path: Path) -> GraphProfile:
    """Read a stored profile.

    Raises:
        ConfigError: the file cannot be read, or is no profile of this version.
    """
    remedy = "measure again with `weft tune`, or give graph_profile='none'"
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=GraphProfile)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"graph_profile {path} is not a profile ({error}); {remedy}") from error
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"graph_profile {str(path)!r} cannot be read: {why}; {remedy}") from error
    if profile.format != FORMAT:
        raise ConfigError(f"graph_profile {path} has format {profile.format}, this Weft reads {FORMAT}; {remedy}")
    return profile


def differences(found: GraphProfile, wanted: GraphProfile) -> list[str]:
    """Describe each difference of ``found`` in a phrase; empty if the profile fits."""
    pairs: list[tuple[str, Any, Any]] = [("device", found.device, wanted.device), ("model", found.model, wanted.model)]
    for ours, theirs in ((found.settings, wanted.settings), (found.versions, wanted.versions)):
        pairs += [(name, ours.get(name), theirs.get(name)) for name in sorted(ours.keys() | theirs.keys())]
    return [f"{name} was {then!r} and is {now!r}" for name, then, now in pairs if then != now]


def find_profile(values: Mapping[str, Any], model: ModelConfig) -> tuple[Path | None, str]:
    """Return the stored profile if it fits, and the reason why it is used or not.

    Args:
        values: resolved settings by name, as they are while a profile is used.
    """
    stored = sorted(_folder().glob(f"{model_hash(model)}-*.json"))
    if not stored:
        return None, "`weft tune` has measured nothing for this model"
    wanted = empty_profile(values, model)
    misfits: list[Sequence[str]] = []
    for path in stored:
        try:
            found = differences(read_profile(path), wanted)
        except ConfigError as error:
            found = [str(error)]
        if not found:
            return path, "measured by `weft tune` for this device, model and version"
        misfits.append(found)
    nearest = min(misfits, key=len)
    return None, f"no stored profile fits: {'; '.join(nearest)} (run `weft tune` to measure again)"


def _folder() -> Path:
    return cache_folder() / "graph-profiles"


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """The value after a round trip through JSON."""
    if isinstance(value, (frozenset, set)):
        return sorted(value)
    if isinstance(value, Mixers):
        return value.as_dicts()
    return list(value) if isinstance(value, tuple) else value


def device_name(device: str) -> str:
    if device == "cuda":
        import torch  # torch is loaded already, since it found the GPU

        return torch.cuda.get_device_name()
    return f"{cpu_name()}, {os.cpu_count()} threads"


def installed_versions(names: Sequence[str] = ("weft", "torch", "triton")) -> dict[str, str]:
    """The versions of those packages that are installed."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import, and --help does not need it

    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
