"""``weft tune --speculative-config``: measure how many drafts pay at which batch size, for the next start."""

from __future__ import annotations

import dataclasses
import datetime
from typing import TYPE_CHECKING, Any

from weft import report
from weft.config.fields import EngineConfig

if TYPE_CHECKING:
    from weft.bench.draft_depth import Effort
    from weft.config.draft_profile import DraftProfile
    from weft.config.speculation import SpeculativeConfig


def tune_drafts(settings: dict[str, Any], effort: Effort) -> int:
    """Measure and store.

    Args:
        settings: the user's, with ``speculative_config``; its number of drafts is the most that are tried.
    """
    from weft.bench.draft_depth import MOST_DRAFTS, measure_depths
    from weft.config import resolve
    from weft.config.draft_profile import DraftProfile, draft_profile_fits, draft_profile_path
    from weft.config.graph_profile import write_profile
    from weft.config.speculation import parse_speculative_config

    given = parse_speculative_config(settings["speculative_config"])
    most = MOST_DRAFTS[given.method] if given.is_auto else given.num_speculative_tokens
    config = resolve(**settings | {"speculative_config": dataclasses.replace(given, is_auto=False)})
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(EngineConfig)}
    fits = draft_profile_fits(values, dataclasses.replace(config.model_config, runs_mtp=False), given)
    timings = measure_depths(settings, config, most, effort, print)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    profile = DraftProfile(fits=fits, prompts=_prompts(given), date=date, timings=timings)
    write_profile(profile, path := draft_profile_path(fits))
    _print_table(profile, report.device_name(config.device))
    print(f"Written to {path}: starts with num_speculative_tokens 'auto' and these settings use it.")
    return 0


def _prompts(config: SpeculativeConfig) -> str:
    rate = config.synthetic_acceptance_rate
    return "chats of the evaluation set" if rate is None else f"random tokens, {rate:g} of the drafts taken for right"


def _print_table(profile: DraftProfile, device: str) -> None:
    counts = range(len(profile.timings[0].token_ms))
    rows = [[str(t.batch_size), *(f"{ms:.3f}" for ms in t.token_ms), str(t.best)] for t in profile.timings]
    heads = ("batch", *(f"{count} drafts" for count in counts), "taken")
    report.table(f"Milliseconds per new token on {device}, {profile.prompts}", heads, rows)
