"""``weft serve``: the model over HTTP."""

import argparse
import dataclasses
import os
import sys
from typing import Any

from weft.cli.flags import add_engine_flags, engine_settings
from weft.cli.parser import add_verb
from weft.errors import ConfigError
from weft.executor.external import become_rank
from weft.server.settings import ServerSettings, flag_of, server_flags

_EPILOG = """\
examples:
  weft serve                                  the bundled model on http://127.0.0.1:8000
  weft serve DIR --port 9000
  WEFT_API_KEY=secret weft serve --model DIR --host 0.0.0.0

The API is OpenAI's: point a client's base_url at http://HOST:PORT/v1."""

_DEST = "server."
_NAMES = "engine.served_model_name"

_WITHOUT_EFFECT = {
    "--disable-log-requests": "prompts and answers are never logged",
    "--disable-log-stats": "figures are under /metrics",
    "--enable-auto-tool-choice": "tool calls are read wherever tools are given",
    "--enable-chunked-prefill": "prompts are always computed in chunks",
    "--enable-prompt-tokens-details": "they are always there",
    "--enable-request-id-headers": "X-Request-Id is always there",
    "--enable-server-load-tracking": "/load is always there",
    "--enable-tokenizer-info-endpoint": "/tokenizer_info is always there",
    "--no-enable-log-requests": "prompts and answers are never logged",
    "--swap-space": "requests that have to wait are computed again from what the prefix cache kept",
    "--uvicorn-log-level": "see --verbose and --log-format",
}
"""Flags in scripts for vLLM that change nothing here, each with the reason."""


def add_parser(verbs: Any, help: str) -> None:
    parser = add_verb(verbs, "serve", run, help, arguments="[MODEL] [flags]", epilog=_EPILOG)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="folder or hub id, as --model")
    add_server_flags(parser)
    add_engine_flags(parser, server=True)
    names = parser._option_string_actions["--served-model-name"]
    names.nargs, names.help = "+", "names of the model: the first stands in answers, callers may use any"
    ignored = parser.add_argument_group("flags of other servers, without effect here")
    for flag, why in _WITHOUT_EFFECT.items():
        num_values = 1 if flag in ("--swap-space", "--uvicorn-log-level") else 0
        ignored.add_argument(flag, nargs=num_values, action=_Ignored, dest=argparse.SUPPRESS, metavar="X", help=why)


class _Ignored(argparse.Action):
    """Warns that a flag changes nothing, and why."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        print(f"weft: {option} has no effect: {_WITHOUT_EFFECT[str(option)]}", file=sys.stderr)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for each field that has a help text."""
    group = parser.add_argument_group("server")
    for field in server_flags():
        group.add_argument(flag_of(field), dest=_DEST + field.name, default=argparse.SUPPRESS, **_arguments(field))


def _arguments(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """Arguments for argparse, from a field's default and definition."""
    help, kind = field.metadata["help"], type(field.default)
    arguments: dict[str, Any] = {"help": help}
    if kind is bool:
        arguments["action"] = "store_true"
    elif kind in (int, float):
        arguments |= {"type": kind, "metavar": "N" if kind is int else "S"}
        if "default" not in help:
            arguments["help"] = f"{help} (default: {field.default:,})"
    return arguments | field.metadata["arguments"]


def server_settings(args: argparse.Namespace) -> ServerSettings:
    """The server's settings, from flags and ``WEFT_API_KEY``."""
    given = {name.removeprefix(_DEST): value for name, value in vars(args).items() if name.startswith(_DEST)}
    for name in ("api_keys", "allowed_hosts", "allowed_origins"):
        if name in given:
            given[name] = tuple(given[name])
    given["model_aliases"] = tuple(getattr(args, _NAMES, ())[1:])
    key = os.environ.get("WEFT_API_KEY")
    if key:
        given["api_keys"] = (*given.get("api_keys", ()), key)
    return ServerSettings(**given)


def serve_engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's settings, from flags. Raises ConfigError if two models are given."""
    given = engine_settings(args)
    if _NAMES in vars(args):
        given["served_model_name"] = getattr(args, _NAMES)[0]
    if args.model is not None and given.setdefault("model", args.model) != args.model:
        raise ConfigError(f"two models are given, {args.model} and --model {given['model']}; give one")
    return given


def run(args: argparse.Namespace) -> int:
    become_rank(engine_settings(args))  # a rank that torchrun started serves rank 0, and no callers
    settings = server_settings(args)
    settings.check()
    try:
        from weft.server.main import serve
    except ImportError as error:
        raise ConfigError(f"weft serve needs {error.name}; install it with: pip install 'weft[server]'") from error
    return serve(settings, serve_engine_settings(args), verbose=args.verbose)
