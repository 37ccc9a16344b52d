"""Speculative decoding as a setting: which tokens are drafted, and how many of them a step verifies.

Job: read ``speculative_config`` in vLLM's keys, translate SGLang's flags to these keys, and choose the open values.
Owns: the keys, their limits and defaults. Does not know: how a draft is made or verified.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from weft.config.json_object import json_setting
from weft.errors import ConfigError

Method = Literal["ngram", "mtp"]

NAME = "speculative_config"
MAX_DRAFTS = 16
"""Upper bound on tokens drafted per step. Each costs a state slot per running request."""

AUTO = "auto"
"""A value of ``num_speculative_tokens``: the numbers that ``weft tune`` measured for each batch size."""

_METHODS: Mapping[str, Method] = {
    "ngram": "ngram",
    "mtp": "mtp",
    "nextn": "mtp",
    "qwen3_next_mtp": "mtp",
    "qwen3_5_mtp": "mtp",
}
_LATER = ("eagle", "eagle3", "draft_model", "medusa", "suffix", "standalone")
_DEFAULT_TOKENS: Mapping[Method, int] = {"ngram": 4, "mtp": 2}
_DEFAULT_LOOKUP = 2, 4


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """The choice of drafts.

    Attributes:
        method: ``ngram`` drafts the tokens after the latest earlier occurrence of the sequence's longest known suffix.
            ``mtp`` drafts with the checkpoint's multi-token-prediction head.
        num_speculative_tokens: upper bound on tokens drafted per step.
        prompt_lookup_min, prompt_lookup_max: bounds on the length of a suffix that ``ngram`` looks up.
        is_default: the user left the number of drafts out.
        is_auto: numbers of drafts come from a profile of ``weft tune``.
        drafts_by_batch: pairs of an upper bound on sequences and a number of drafts, ascending; larger batches get
            none. If empty, every batch gets ``num_speculative_tokens``.
        synthetic_acceptance_rate: the probability with which a draft is accepted whatever it is, to measure with dummy
            weights; None: drafts are compared with sampled tokens.
    """

    method: Method
    num_speculative_tokens: int
    prompt_lookup_min: int
    prompt_lookup_max: int
    synthetic_acceptance_rate: float | None = None
    is_auto: bool = False
    is_default: bool = field(default=False, compare=False)
    drafts_by_batch: tuple[tuple[int, int], ...] = ()

    def drafts_at(self, num_seqs: int) -> int:
        """Number of drafts for each of ``num_seqs`` sequences that decode together."""
        if not self.drafts_by_batch:
            return self.num_speculative_tokens
        return next((drafts for limit, drafts in self.drafts_by_batch if num_seqs <= limit), 0)

    def __str__(self) -> str:
        drafts = f"{self.method}, {self.num_speculative_tokens} tokens"
        if self.drafts_by_batch:
            limits = ", ".join(f"{drafts} up to {limit} sequences" for limit, drafts in self.drafts_by_batch)
            drafts = f"{self.method}, tokens: {limits}"
        lookup = f", suffixes of {self.prompt_lookup_min} to {self.prompt_lookup_max} tokens"
        rate = self.synthetic_acceptance_rate
        synthetic = f", accepted with probability {rate:g} whatever is sampled" if rate is not None else ""
        return drafts + (lookup if self.method == "ngram" else "") + synthetic


def parse_speculative_config(value: Any) -> SpeculativeConfig:
    """Parse the setting, given as a mapping or as JSON text.

    Raises:
        ConfigError: an unknown key or method, or a number out of range.
    """
    if isinstance(value, SpeculativeConfig):
        return value
    keys = _without_sglang_names(json_setting(NAME, value, _EXAMPLE))
    unknown = sorted(keys.keys() - _KEYS)
    if unknown:
        raise ConfigError(f"{NAME} has the unknown key {unknown[0]!r}; allowed: {', '.join(_KEYS)}")
    method = _method(keys.get("method"))
    is_auto = keys.get("num_speculative_tokens") == AUTO
    tokens = None if is_auto else _integer(keys, "num_speculative_tokens", MAX_DRAFTS)
    for key in ("prompt_lookup_min", "prompt_lookup_max") if method != "ngram" else ():
        if keys.get(key) is not None:
            raise ConfigError(f"{NAME}: {key} has no effect with method {method!r}; leave it out, or use ngram")
    low, high = (_integer(keys, key, None) for key in ("prompt_lookup_min", "prompt_lookup_max"))
    if low is None and high is None:
        low, high = _DEFAULT_LOOKUP
    low, high = low or high, high or low
    assert low is not None and high is not None
    if low > high:
        raise ConfigError(f"{NAME}: prompt_lookup_min={low} is more than prompt_lookup_max={high}")
    is_default = tokens is None and not is_auto
    most = tokens or _DEFAULT_TOKENS[method]
    return SpeculativeConfig(method, most, low, high, _rate(keys), is_auto, is_default)


_KEYS = (
    "method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "synthetic_acceptance_rate",
)  # fmt: skip
_SGLANG_KEYS = {
    "algorithm": "method",
    "num_steps": "num_speculative_tokens",
    "ngram_min_match_window_size": "prompt_lookup_min",
    "ngram_max_match_window_size": "prompt_lookup_max",
}


_EXAMPLE = """'{"method": "ngram", "num_speculative_tokens": 4}'"""


def _without_sglang_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Translate SGLang's flags (``--speculative-num-steps``: ``num_steps``) to vLLM's keys."""
    keys = {_SGLANG_KEYS.get(key, key): value for key, value in given.items()}
    if len(keys) < len(given):
        raise ConfigError(f"{NAME}: {', '.join(map(repr, given))} name one thing twice")
    width = keys.pop("eagle_topk", None)
    if width not in (None, 1):
        raise ConfigError(f"{NAME}: a topk of {width}: drafts are one sequence of tokens, no tree; allowed is 1")
    total = _integer(keys, "num_draft_tokens", MAX_DRAFTS + 1)
    keys.pop("num_draft_tokens", None)
    if total is not None:  # SGLang counts the verified token as well
        if keys.get("num_speculative_tokens") is None:
            keys["num_speculative_tokens"] = total - 1
        if (tokens := keys["num_speculative_tokens"]) != total - 1:
            raise ConfigError(f"{NAME}: num_draft_tokens={total} is not one more than the {tokens} steps")
    return keys


def _method(given: Any) -> Method:
    if given is None:
        raise ConfigError(f"{NAME} names no method; give for example {_EXAMPLE}")
    name = given.lower() if isinstance(given, str) else given
    if name in _LATER:
        raise ConfigError(
            f"{NAME}: method {given!r} drafts with a model of its own, which this version of Weft does not do; "
            "allowed: ngram, mtp"
        )
    if not isinstance(name, str) or name not in _METHODS:
        raise ConfigError(f"{NAME}: method {given!r} is not known; allowed: ngram, mtp")
    return _METHODS[name]


def _integer(keys: Mapping[str, Any], key: str, high: int | None) -> int | None:
    value = keys.get(key)
    if value is None:
        return None
    allowed = f"1 to {high}" if high is not None else "1 or more"
    if isinstance(value, bool) or not isinstance(value, int):
        word = f", or {AUTO!r}" if key == "num_speculative_tokens" else ""
        raise ConfigError(f"{NAME}: {key}={value!r} is not an integer; allowed: {allowed}{word}")
    if value < 1 or (high is not None and value > high):
        raise ConfigError(f"{NAME}: {key}={value} is out of range; allowed: {allowed}")
    return value


def _rate(keys: Mapping[str, Any]) -> float | None:
    name = "synthetic_acceptance_rate"
    value = keys.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"{NAME}: {name}={value!r} is not a probability; allowed: 0 to 1")
    return float(value)
