"""Settings as an object: ``EngineArgs``, and a parser for its flags.

The fields are those of ``EngineConfig``, and the settings of vLLM that ``LLM`` accepts or refuses by name. None means
"not given" everywhere.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, make_dataclass
from typing import Any, Self

from weft.cli.flags import add_engine_flags
from weft.config.fields import OPTIONS
from weft.config.validate import check_names
from weft.config.vllm_settings import VLLM_SETTINGS


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that reads ``--max_model_len`` as ``--max-model-len``."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([self._with_dashes(word) for word in words], namespace)

    def _with_dashes(self, word: str) -> str:
        flag, equals, value = word.partition("=")
        dashed = flag.replace("_", "-")
        return f"{dashed}{equals}{value}" if dashed in self._option_string_actions else word


class _Settings:
    """Methods of ``EngineArgs``."""

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        check_names(settings.keys() - VLLM_SETTINGS.keys())
        return super().__new__(cls)

    def settings(self) -> dict[str, Any]:
        """Return the settings that were given, as keyword arguments of ``LLM``."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in values.items() if value is not None}

    @staticmethod
    def add_cli_args(parser: Any, async_args_only: bool = False) -> Any:
        """Add a flag for each setting. Returns the parser. An attribute that no flag sets is None."""
        if not async_args_only:
            add_engine_flags(parser, server=True, prefix="")
            parser.set_defaults(**dict.fromkeys((*OPTIONS, "trust_remote_code")))
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Any:
        names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: value for name, value in vars(args).items() if name in names})


_FIELDS = [(name, Any, None) for name in (*OPTIONS, *VLLM_SETTINGS)]

EngineArgs: Any = make_dataclass("EngineArgs", _FIELDS, bases=(_Settings,))
AsyncEngineArgs = EngineArgs
EngineArgs.__module__ = __name__  # for pickle
