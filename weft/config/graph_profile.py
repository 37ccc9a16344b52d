"""Measured graph modes on disk: what ``weft tune`` found, and what it holds for.

Job: the file's format, and whether a stored profile fits an engine. Owns: where profiles lie, and which settings they
depend on. Does not know: how modes are measured, or which mode a batch gets (``pieces/mode_table.py``).

A profile fits if device, model, settings and versions are those of the measurement; anything else is said by name.
"""

from __future__ import annotations

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
"""Number of the file's format; files of another are not read."""

SETTINGS = tuple(
    "dtype backend mamba_ssm_dtype kv_cache_dtype tensor_parallel_size enable_expert_parallel "
    "disable_custom_all_reduce page_size max_model_len max_num_seqs max_num_batched_tokens cuda_graph_bs "
    "cuda_graph_max_bs piecewise_cuda_graph_tokens piecewise_cuda_graph_max_tokens piecewise_cuda_graph_compiler "
    "splitting_ops enable_torch_compile torch_compile_max_bs".split()
)
"""Settings that change what a step costs in some mode."""

_VERSIONED = ("weft", "torch", "triton")


class Timing(msgspec.Struct, frozen=True):
    """One batch in every mode that can run it: ``ms[mode]``, the median milliseconds of a step."""

    num_tokens: int
    ms: dict[str, float]


class GraphProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, and of what.

    Attributes:
        format: ``FORMAT`` of the Weft that wrote it.
        device: name of the device.
        model: ``model_hash`` of the checkpoint.
        settings: values of ``SETTINGS``.
        versions: of Weft, torch and Triton.
        date: UTC.
        splits: prompts in pieces, for every list of split ops that was tried, by its names.
        splitting_ops: the fastest of these lists, with which the rest was measured; empty: none was tried.
        prefill, mixed, decode: batches of prompts, of prompts and decodes, of decodes; ascending token counts.
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
    """A profile without figures for an engine with these settings, on this machine: what a stored one must fit.

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
    """Where the profile is looked for at a start."""
    rest = _hash([profile.device, profile.settings])[:8]
    return _folder() / f"{profile.model}-{rest}.json"


def write_profile(profile: msgspec.Struct, path: Path) -> None:
    """Store what was measured, of graphs or of drafts; a reader sees the old file or the new one.

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
    """A stored profile.

    Raises:
        ConfigError: it cannot be read, or is no profile of this version.
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
    """What of ``found`` does not fit, one phrase each; empty if it fits."""
    pairs: list[tuple[str, Any, Any]] = [("device", found.device, wanted.device), ("model", found.model, wanted.model)]
    for ours, theirs in ((found.settings, wanted.settings), (found.versions, wanted.versions)):
        pairs += [(name, ours.get(name), theirs.get(name)) for name in sorted(ours.keys() | theirs.keys())]
    return [f"{name} was {then!r} and is {now!r}" for name, then, now in pairs if then != now]


def find_profile(values: Mapping[str, Any], model: ModelConfig) -> tuple[Path | None, str]:
    """The stored profile that fits, and why it is the one or why there is none.

    Args:
        values: resolved settings by name, as they are when a profile is used.
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
    """The value as JSON gives it back."""
    if isinstance(value, (frozenset, set)):
        return sorted(value)
    if isinstance(value, Mixers):
        return value.as_dicts()
    return list(value) if isinstance(value, tuple) else value


def device_name(device: str) -> str:
    """For what a measurement on ``device`` holds."""
    if device == "cuda":
        import torch  # a GPU was found with it

        return torch.cuda.get_device_name()
    return f"{cpu_name()}, {os.cpu_count()} threads"


def installed_versions() -> dict[str, str]:
    """Of Weft, torch and Triton."""
    from importlib.metadata import PackageNotFoundError, version  # slow, and only needed where a profile is stored

    found = {}
    for name in _VERSIONED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
