"""Validation of one setting's value."""

import difflib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from weft.config.aliases import ALIASES
from weft.config.fields import OPTIONS, Option
from weft.errors import ConfigError


def check_names(names: Iterable[str]) -> None:
    """Raise ConfigError for unknown settings, with similar names."""
    by_alias = {flag.removeprefix("--").replace("-", "_"): alias.field for flag, alias in ALIASES.items()}
    for name in names:
        if name in OPTIONS:
            continue
        if name in by_alias:
            raise ConfigError(f"unknown setting {name!r}: as a keyword it is called {by_alias[name]!r}")
        close = difflib.get_close_matches(name, OPTIONS, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "`weft config` lists all settings"
        raise ConfigError(f"unknown setting {name!r}; {hint}")


def check_value(name: str, value: Any) -> Any:
    """Return ``value`` in its canonical form (lists as tuples, paths as ``Path``, synonyms replaced).

    Raises:
        ConfigError: the value has the wrong kind, is out of range, or is no such choice.
    """
    option = OPTIONS[name]
    if value is None and option.default is None:
        return value
    match option.kind:
        case "int" | "float":
            return _number(name, option, value)
        case "bool":
            if not isinstance(value, bool):
                raise ConfigError(f"{name}={value!r} is not a truth value; give True or False")
            return value
        case "text":
            return _text(name, option, value)
        case "path":
            if not isinstance(value, (str, Path)) or not str(value):
                raise ConfigError(f"{name}={value!r} is not a path")
            return Path(value)
        case "ints" | "texts":
            return _items(name, option, value)
        case "json":
            assert option.parse is not None
            return option.parse(value)


def _number(name: str, option: Option, value: Any) -> int | float:
    wanted = "an integer" if option.kind == "int" else "a number"
    allowed_types = (int,) if option.kind == "int" else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed_types) or not abs(value) < math.inf:
        raise ConfigError(f"{name}={value!r} is not {wanted}; allowed: {describe_range(option)}")
    too_low = (option.low is not None and value < option.low) or (option.above is not None and value <= option.above)
    if too_low or (option.high is not None and value > option.high):
        raise ConfigError(f"{name}={value!r} is out of range; allowed: {describe_range(option)}")
    return value if option.kind == "int" else float(value)


def _text(name: str, option: Option, value: Any) -> str:
    if isinstance(value, Path) and not option.choices:
        value = str(value)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name}={value!r} is not a text" + _choices(option))
    value = option.synonyms.get(value, value)
    if option.choices and value not in option.choices:
        raise ConfigError(f"{name}={value!r} is not known" + _choices(option))
    return value


def _items(name: str, option: Option, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise ConfigError(f"{name}={value!r} is not a non-empty list")
    if option.kind == "texts":
        return tuple(_text(name, option, item) for item in value)
    single = Option(help="", kind="int", default=None, low=option.low, high=option.high)
    return tuple(_number(name, single, item) for item in value)


def _choices(option: Option) -> str:
    return f"; allowed: {', '.join(option.choices)}" if option.choices else ""


def describe_range(option: Option) -> str:
    """The allowed numbers in words: ``1 or more``, ``above 0 and at most 1``."""
    low = f"{option.low:,} or more" if option.low is not None else ""
    low = f"above {option.above:g}" if option.above is not None else low
    high = f"at most {option.high:,}" if option.high is not None else ""
    return " and ".join(part for part in (low, high) if part) or "any"
