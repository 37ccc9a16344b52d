"""Flags of the engine's settings and of sampling, derived from the fields of both.

Job: one flag per field, its aliases, and the way back from parsed flags to keyword arguments. Owns: the map from fields
to flags. Does not know: ranges (the fields' own validation checks those).
"""

import argparse
import json
from typing import Any, NoReturn

import msgspec

from weft.config.aliases import ALIASES, REFUSED_FLAGS, SERVER_FLAGS
from weft.config.fields import OPTIONS, Option
from weft.config.flag_names import flag_name
from weft.config.vllm_settings import VLLM_SETTINGS
from weft.errors import RequestError
from weft.sampling_params import SamplingParams

_ENGINE, _SAMPLING = "engine.", "sampling."


def add_engine_flags(parser: argparse.ArgumentParser, *, server: bool = False, prefix: str = _ENGINE) -> None:
    """Add one flag for each setting, and the aliases of other engines. Flags of ``weft serve`` are refused by name,
    unless ``server``: that parser has them itself. ``prefix``: the beginning of the attributes that flags set."""
    group = parser.add_argument_group("engine settings")
    for name, option in OPTIONS.items():
        group.add_argument(flag_name(name), **_arguments(prefix + name, option))
    for flag, alias in ALIASES.items():
        dest = prefix + alias.field
        help = f"same as {flag_name(alias.field)}"
        if alias.key is not None:
            help = f"{help} with the key {alias.key}"
            group.add_argument(
                flag, dest=dest, action=_Key, const=alias.key, default=argparse.SUPPRESS, help=help, metavar="VALUE"
            )
        elif alias.value is None:
            group.add_argument(flag, **(_arguments(dest, OPTIONS[alias.field]) | {"help": help}))
        else:
            help = f"same as --{'' if alias.value else 'no-'}{flag_name(alias.field)[2:]}"
            group.add_argument(
                flag, dest=dest, action="store_const", const=alias.value, default=argparse.SUPPRESS, help=help
            )
    name = "trust_remote_code"
    help = f"no effect: {VLLM_SETTINGS[name].why}"
    group.add_argument(flag_name(name), dest=prefix + name, action="store_true", default=argparse.SUPPRESS, help=help)
    refused = {flag: f"flag of SGLang that Weft does not have: {why}" for flag, why in REFUSED_FLAGS.items()}
    if not server:
        refused |= dict.fromkeys(SERVER_FLAGS, "setting of the HTTP server; use it with weft serve, or leave it out")
    for flag, why in refused.items():
        hidden: Any = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        group.add_argument(flag, action=_Refused, nargs="?", const=why, **hidden)


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of ``LLM`` from the flags that were given."""
    return {name.removeprefix(_ENGINE): value for name, value in vars(args).items() if name.startswith(_ENGINE)}


def _arguments(dest: str, option: Option) -> dict[str, Any]:
    common: dict[str, Any] = {"dest": dest, "default": argparse.SUPPRESS, "help": _help(option)}
    match option.kind:
        case "bool":
            return common | {"action": argparse.BooleanOptionalAction}
        case "int":
            return common | {"type": int, "metavar": "N"}
        case "float":
            return common | {"type": float, "metavar": "X"}
        case "ints":
            return common | {"action": _Items, "type": _ints, "nargs": "+", "metavar": "N"}
        case "texts":
            return common | {"action": _Items, "type": _texts, "nargs": "+", "metavar": "NAME"}
        case "path":
            return common | {"metavar": "DIR"}
        case "text":
            return common | {"metavar": "|".join(option.choices) or "NAME"}
        case "json":
            return common | {"action": _Json, "metavar": "JSON"}


def _help(option: Option) -> str:
    default = "" if option.default is None else f" (default: {option.default})"
    return (option.help + default).replace("%", "%%")


def _ints(word: str) -> list[int]:
    """Parse ``1,2,4`` as well as one number."""
    return [int(part) for part in _texts(word)]


def _texts(word: str) -> list[str]:
    return [part.strip() for part in word.split(",") if part.strip()]


_ints.__name__ = "int"  # the name of the type in argparse's errors


class _Items(argparse.Action):
    """The items of a list, given one by one or with commas between them."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, [item for items in values for item in items])


class _Json(argparse.Action):
    """A JSON object. Keys that other flags have set are kept."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        try:
            value = json.loads(values)
        except json.JSONDecodeError as error:
            parser.error(f"{option} {values!r} is not JSON: {error}")
        before = getattr(namespace, self.dest, None) or {}
        setattr(namespace, self.dest, before | value if isinstance(value, dict) else value)


class _Key(argparse.Action):
    """One key of a JSON object, named by ``const``. A whole number stands for itself."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        value = int(values) if values.isdecimal() else values
        setattr(namespace, self.dest, (getattr(namespace, self.dest, None) or {}) | {self.const: value})


class _Refused(argparse.Action):
    """Refuses a flag; ``const`` is the reason."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None
    ) -> NoReturn:
        parser.error(f"{option} is a {self.const}")


_SAMPLING_FLAGS: dict[str, dict[str, Any]] = {
    "n": {"type": int, "metavar": "N", "help": "completions per prompt"},
    "max_tokens": {"type": int, "metavar": "N", "help": "most tokens to generate; default: what the context allows"},
    "min_tokens": {"type": int, "metavar": "N", "help": "fewest tokens to generate"},
    "temperature": {"type": float, "metavar": "X", "help": "0 is greedy; default: the checkpoint's"},
    "top_k": {"type": int, "metavar": "N", "help": "keep the N likeliest tokens"},
    "top_p": {"type": float, "metavar": "X", "help": "keep the likeliest tokens up to this probability"},
    "min_p": {"type": float, "metavar": "X", "help": "drop tokens below this share of the likeliest one"},
    "presence_penalty": {"type": float, "metavar": "X", "help": "on tokens that were generated, -2 to 2"},
    "frequency_penalty": {"type": float, "metavar": "X", "help": "on each time a token was generated, -2 to 2"},
    "repetition_penalty": {"type": float, "metavar": "X", "help": "on tokens of prompt and output; 1 is off"},
    "logit_bias": {"type": json.loads, "metavar": "JSON", "help": 'added to logits: {"TOKEN_ID": BIAS}'},
    "allowed_token_ids": {
        "action": _Items,
        "type": _ints,
        "nargs": "+",
        "metavar": "ID",
        "help": "generate only these tokens",
    },
    "bad_words": {"nargs": "+", "metavar": "TEXT", "help": "never generate these"},
    "stop": {"action": "append", "metavar": "TEXT", "help": "end at this text; may be given more than once"},
    "stop_token_ids": {"action": _Items, "type": _ints, "nargs": "+", "metavar": "ID", "help": "end at these tokens"},
    "include_stop_str_in_output": {"action": "store_true", "help": "keep what ended the text"},
    "ignore_eos": {"action": "store_true", "help": "go on after the end-of-sequence token"},
    "skip_special_tokens": {"action": argparse.BooleanOptionalAction, "help": "leave special tokens out of the text"},
    "logprobs": {"type": int, "metavar": "N", "help": "log probabilities of the N likeliest tokens, in JSON output"},
    "prompt_logprobs": {"type": int, "metavar": "N", "help": "the same for the prompt's tokens, in JSON output"},
}


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each sampling parameter. The seed is the engine's ``--seed``; a line of JSON may have its
    own."""
    group = parser.add_argument_group("sampling")
    for name, arguments in _SAMPLING_FLAGS.items():
        group.add_argument(flag_name(name), dest=_SAMPLING + name, default=argparse.SUPPRESS, **arguments)


def sampling_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of ``SamplingParams`` from the flags that were given."""
    return {name.removeprefix(_SAMPLING): value for name, value in vars(args).items() if name.startswith(_SAMPLING)}


_IN_PYTHON_ONLY = ("logits_processors", "output_kind")
SAMPLING_NAMES = tuple(f.name for f in msgspec.structs.fields(SamplingParams) if f.name not in _IN_PYTHON_ONLY)
"""Sampling parameters with values that can be written in text and mean something for a whole text."""


SAMPLING_ERROR = "sampling parameters"
"""First words of an error in sampling parameters."""


def sampling_params(settings: dict[str, Any]) -> SamplingParams:
    """Validated sampling parameters from plain values, as they come from flags or JSON.

    Raises:
        RequestError: an unknown name, a wrong type or a value out of range.
    """
    try:
        return msgspec.convert(settings, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        raise RequestError(f"{SAMPLING_ERROR}: {error}") from error
