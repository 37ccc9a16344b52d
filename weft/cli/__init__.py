"""The command line: ``weft VERB [flags]``.

Job: parse, call one verb, turn errors into one line and an exit status (2: bad input, 1: any other error of a user,
130: interrupted). Owns: the verbs' names. Does not know: what a verb does.

Only the module of the given verb is loaded. Verbs that run an engine import torch after their flags were parsed, so
``weft --help`` takes 50 ms.
"""

import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from weft import __version__
from weft.cli.parser import Parser
from weft.errors import ConfigError, RequestError, WeftError

VERBS = {
    "generate": "complete prompts, or answer questions",
    "chat": "talk to the model in the terminal",
    "serve": "serve the model over HTTP",
    "config": "show every setting, its value, and why",
    "inspect": "say what the prefix cache reuses, and why not more",
    "eval": "measure accuracy on the bundled word problems",
    "bench": "measure speed",
    "verify": "compare captured graphs with eager steps",
    "tune": "measure the fastest graph mode, or number of drafts, per batch size, for later starts",
    "graph": "show what a prefill captures in mode PIECEWISE",
    "cache": "list, verify or empty the files of a disk tier",
    "models": "list the architectures that Weft runs, what was verified of each, and formats of quantised weights",
    "doctor": "check this machine and say what is missing",
}
"""The verbs, with their lines in the list of verbs. A verb's module has its name, or the one in ``_MODULES``."""

_MODULES = {"eval": "evaluate"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``weft`` with ``argv`` (default: the process's). Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    args = build_parser(next((word for word in argv if not word.startswith("-")), "")).parse(argv)
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, format="%(name)s: %(message)s")
    try:
        return args.run(args)
    except WeftError as error:
        print(f"weft: error: {_with_flags(error)}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, RequestError)) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # nobody reads the output any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _with_flags(error: WeftError) -> str:
    """Name the flags that the user gave. A line of ``--input`` has keys instead."""
    from weft.cli.flags import SAMPLING_ERROR, SAMPLING_NAMES  # a verb has imported the module before it failed
    from weft.config.flag_names import with_flags
    from weft.server.settings import flag_of, server_flags

    if isinstance(error, ConfigError):
        return with_flags(str(error), (flag_of(field)[2:].replace("-", "_") for field in server_flags()))
    return with_flags(str(error), SAMPLING_NAMES) if str(error).startswith(SAMPLING_ERROR) else str(error)


def build_parser(only: str | None = None) -> Parser:
    """Make the parser of all verbs. If ``only`` is given, the other verbs have no flags."""
    parser = Parser(
        prog="weft",
        description="An inference engine for hybrid language models.",
        usage="weft VERB [flags]",
    )
    parser.add_argument("--version", action="version", version=f"weft {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb", required=True, prog=parser.prog)
    for name, help in VERBS.items():
        if only in (None, name):
            import_module(f"weft.cli.{_MODULES.get(name, name)}").add_parser(verbs, help)
        else:
            verbs.add_parser(name, help=help)
    return parser
