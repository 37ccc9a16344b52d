"""The command line: ``weft generate | chat | serve | config | inspect | eval | bench | verify | doctor``.

Job: parse, call one verb, turn errors into one line and an exit status (2: bad input, 1: anything else that a user can
cause, 130: interrupted). Owns: the verbs' names. Does not know: what a verb does; torch is loaded by the verbs that run
an engine, after their flags were understood.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from weft import __version__
from weft.cli import bench, chat, config, doctor, evaluate, generate, inspect, serve, verify
from weft.cli.parser import Parser
from weft.errors import ConfigError, RequestError, WeftError

VERBS = (generate, chat, serve, config, inspect, evaluate, bench, verify, doctor)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``weft`` with ``argv`` (default: the process's). Returns the exit status."""
    args = build_parser().parse(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, format="%(name)s: %(message)s")
    try:
        return args.run(args)
    except WeftError as error:
        print(f"weft: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, RequestError)) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone; nothing more can be said
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def build_parser() -> Parser:
    """The parser of all verbs."""
    parser = Parser(
        prog="weft",
        description="An inference engine for hybrid language models.",
        usage="weft VERB [flags]",
    )
    parser.add_argument("--version", action="version", version=f"weft {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb", required=True)
    for verb in VERBS:
        verb.add_parser(verbs)
    return parser
