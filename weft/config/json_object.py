"""Typed reading of JSON: files in a model folder, and settings that are JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, UnsupportedModelError


def json_setting(name: str, value: Any, example: str) -> Mapping[str, Any]:
    """Parse the setting ``name``, given as a mapping or as JSON text. Raises ConfigError for anything else."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{name}={value!r} is not JSON ({error}); give for example {example}") from error
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}={value!r} is not a mapping; give for example {example}")
    return value


class JsonObject:
    """A JSON object with typed accessors. An absent key and a ``null`` count as not given.

    Args:
        where: the name in error messages, for example ``/models/x/config.json`` or ``… (text_config)``.
        called: key -> its name in the file, for error messages, where that is another.
    """

    def __init__(self, values: dict[str, Any], where: str, called: Mapping[str, str] | None = None) -> None:
        self.values = values
        self.where = where
        self._called = called or {}

    @classmethod
    def load(cls, path: Path) -> JsonObject:
        """Parse the file.

        Raises:
            ConfigError: missing, unreadable, not UTF-8, not JSON (truncated, for example), or not an object.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist; a model folder needs it (save_pretrained writes it)") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not UTF-8 text ({error}); copy or download it again") from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ConfigError(
                f"{path} is not valid JSON ({error}); it may be truncated: copy or download it again"
            ) from None
        if not isinstance(values, dict):
            raise ConfigError(f"{path} holds a JSON {type(values).__name__}, not an object; copy or download it again")
        return cls(values, str(path))

    def given(self, key: str) -> bool:
        return self.values.get(key) is not None

    def raw(self, key: str) -> Any:
        return self.values.get(key)

    def object(self, key: str) -> JsonObject | None:
        """A nested object, or None."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return JsonObject(value, f"{self.where} ({key})")

    def integer(self, key: str, default: int | None = None, *, low: int = 1) -> int:
        """An integer of at least ``low``; without ``default`` the key is required."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.wrong(key, f"an integer of at least {low}")
        return value

    def number(self, key: str, default: float | None = None, *, low: float = 0.0, open_low: bool = True) -> float:
        """A finite number above ``low`` (or from ``low`` on)."""
        value = self._value(key, default)
        bad = isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < float("inf")
        if bad or value < low or (open_low and value == low):
            raise self.wrong(key, f"a number {'above' if open_low else 'of at least'} {low:g}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """An integer or a list of integers, all at least 0; empty if not given."""
        value = self.values.get(key)
        items = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in items):
            raise self.wrong(key, "an integer of at least 0 or a list of such")
        return tuple(items)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of ``count`` numbers, possibly infinite (``Infinity``, or transformers' object for it); empty if not
        given."""
        value = self.values.get(key)
        if value is None:
            return ()
        items: list[Any] = value if isinstance(value, list) else []
        items = [float("inf") if i in ("Infinity", {"__float__": "Infinity"}) else i for i in items]
        if len(items) != count or any(isinstance(i, bool) or not isinstance(i, (int, float)) or i != i for i in items):
            raise self.wrong(key, f"a list of {count} numbers")
        return tuple(float(i) for i in items)

    def wrong(self, key: str, expected: str) -> ConfigError:
        """Make the error for a value of the wrong kind."""
        return ConfigError(f"{self.where}: {self._shown(key)} is not valid; expected {expected}")

    def unsupported(self, key: str, remedy: str) -> UnsupportedModelError:
        """Make the error for a value that Weft does not compute. ``remedy`` follows "is not supported"."""
        return UnsupportedModelError(f"{self.where}: {self._shown(key)} is not supported{remedy}")

    def _shown(self, key: str) -> str:
        return f"{self._called.get(key, key)}={self.values.get(key)!r}"

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise ConfigError(f"{self.where}: required key {key!r} is missing")
        return default
