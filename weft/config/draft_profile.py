"""Measurements of drafts on disk: what ``weft tune`` found for each batch size, and where it applies.

Job: the file's format, the choice that follows from its figures, and whether a stored profile fits an engine. Owns: the
folder of these profiles. Does not know: how drafts are measured.
"""

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from weft.config.cache_folder import cache_folder
from weft.config.graph_profile import device_name, installed_versions, model_hash
from weft.config.model import ModelConfig
from weft.config.speculation import SpeculativeConfig

FORMAT = 1

SETTINGS = (
    "dtype", "backend", "mamba_ssm_dtype", "kv_cache_dtype", "tensor_parallel_size", "enable_expert_parallel",
    "disable_custom_all_reduce", "cuda_graph_mode",
)  # fmt: skip
"""Settings that change the cost of a step."""

TIE = 1.02
"""Numbers of drafts within this factor of the fastest count as equal. The smallest of them is chosen."""


class DraftTiming(msgspec.Struct, frozen=True):
    """Timing of one batch size. ``token_ms[k]``: milliseconds per new token of a sequence with k drafts in every
    step."""

    batch_size: int
    token_ms: list[float]

    @property
    def best(self) -> int:
        limit = TIE * min(self.token_ms)
        return next(drafts for drafts, ms in enumerate(self.token_ms) if ms <= limit)


class DraftProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A measurement of drafts, and the engine that was measured.

    Attributes:
        fits: device, model, method, settings and versions of the measurement, as plain values by name.
        prompts: the prompts of the measured batches.
        timings: ascending batch sizes.
    """

    format: int = FORMAT
    fits: dict[str, Any]
    prompts: str = ""
    date: str = ""
    timings: list[DraftTiming] = []

    @property
    def drafts_by_batch(self) -> tuple[tuple[int, int], ...]:
        """Pairs of an upper bound on sequences and a number of drafts. A batch between two measured sizes uses the
        larger one, whose graph it runs in. Batches above the largest measured size get no drafts."""
        pairs = [(timing.batch_size, timing.best) for timing in self.timings]
        runs = [list(run) for _, run in groupby(pairs, key=lambda pair: pair[1])]
        limits = [run[-1] for run in runs]
        while limits and not limits[-1][1]:
            limits.pop()
        return tuple(limits)


def draft_profile_fits(values: Mapping[str, Any], model: ModelConfig, config: SpeculativeConfig) -> dict[str, Any]:
    """The properties that a profile must share with an engine of these resolved settings."""
    fits = {name: values[name] for name in SETTINGS} | installed_versions()
    return fits | {"device": device_name(values["device"]), "model": model_hash(model), "method": config.method}


def draft_profile_path(fits: Mapping[str, Any]) -> Path:
    return cache_folder() / "draft-profiles" / f"{fits['model']}-{fits['method']}.json"


def find_draft_profile(fits: Mapping[str, Any]) -> tuple[DraftProfile | None, str]:
    """Return the stored profile if it fits, and the reason why it fits or not."""
    path = draft_profile_path(fits)
    try:
        found = msgspec.json.decode(path.read_bytes(), type=DraftProfile)
    except OSError:
        return None, "`weft tune` has measured no drafts for this model and method"
    except msgspec.MsgspecError as error:
        return None, f"{path} is not a profile ({error})"
    names = sorted(found.fits.keys() | fits.keys())
    pairs = [(name, found.fits.get(name), fits.get(name)) for name in names]
    misfits = [f"{name} was {then!r} and is {now!r}" for name, then, now in pairs if then != now]
    if found.format != FORMAT or misfits:
        why = "; ".join(misfits) or "another format"
        return None, f"the stored profile does not fit: {why} (run `weft tune` to measure again)"
    return found, f"measured by `weft tune` on {found.date[:10]}"
