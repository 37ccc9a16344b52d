"""The argument parser of all verbs.

Job: argparse with short errors that suggest similar names. Owns: their wording, and the flags that every verb has. Does
not know: verbs, settings.
"""

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from weft.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that accepts no abbreviations and suggests flags similar to an unknown one."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_HelpFormatter, **kwargs)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse all of ``argv``, or exit with status 2 and one line on stderr."""
        args, unknown = self.parse_known_args(argv)
        if unknown:
            args.parser._refuse(unknown[0])
        return args

    def _refuse(self, word: str) -> NoReturn:
        if not word.startswith("-"):
            self.error(f"unexpected argument {word!r}; {self._positional_words()}")
        from weft.config.flag_names import with_flags
        from weft.config.vllm_settings import VLLM_SETTINGS

        flag = word.split("=", maxsplit=1)[0]
        vllms = VLLM_SETTINGS.get(flag.lstrip("-").replace("-", "_"))
        if vllms is not None and "--model" in self._option_string_actions:
            self.error(f"{flag} is a flag of vLLM that Weft does not have: {with_flags(vllms.why)}")
        close = difflib.get_close_matches(flag, self._option_string_actions, n=3)
        self.error(f"unknown flag {flag}" + (f"; did you mean {' or '.join(close)}?" if close else ""))

    def _positional_words(self) -> str:
        """Describe the positional arguments and their places."""
        for taken in self._get_positional_actions():
            which = f"one {taken.metavar}" if taken.nargs == "?" else f"every {taken.metavar} in one place"
            return f"give {which}, before or after the flags"
        return f"{self.prog} takes flags only; a model is given by --model"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a word that is no verb, with similar verbs."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            close = difflib.get_close_matches(value, action.choices, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else f"verbs: {', '.join(action.choices)}"
            self.error(f"unknown verb {value!r}; {hint}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message}\n(`{self.prog} --help` lists the flags)", file=sys.stderr)
        sys.exit(2)


def add_verb(
    verbs: Any, name: str, run: Callable[[argparse.Namespace], int], help: str, *,
    arguments: str = "[flags]", epilog: str | None = None,
) -> Parser:  # fmt: skip
    """Add verb ``name``, executed by ``run``. Returns its parser. ``arguments``: the arguments in its usage line."""
    description = help[0].upper() + help[1:] + "."
    parser: Parser = verbs.add_parser(
        name, help=help, description=description, usage=f"%(prog)s {arguments}".rstrip(), epilog=epilog
    )
    parser.add_argument("--verbose", action="store_true", help="say what the engine decides while it starts")
    parser.set_defaults(run=run, parser=parser)
    return parser


def check_lowest(args: argparse.Namespace, **lowest: int) -> None:
    """Raise ConfigError, naming the flag, if its number (or one of several) is below the minimum."""
    for name, low in lowest.items():
        value = getattr(args, name)
        least = min(value) if isinstance(value, (list, tuple)) else value
        if least is not None and least < low:
            raise ConfigError(f"--{name.replace('_', '-')} {least}: give {low} or more")


def check_range(args: argparse.Namespace, name: str) -> tuple[int, int]:
    """The two numbers of a flag. Raises ConfigError if they are no range of positive numbers."""
    low, high = getattr(args, name)
    if not 1 <= low <= high:
        raise ConfigError(f"--{name.replace('_', '-')} {low} {high}: give MIN and MAX with 1 <= MIN <= MAX")
    return low, high


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=118)
