"""``weft serve``: the model over HTTP.

Job: flags of the server. Owns: their names. Does not know: what the server does with them.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import Any

from weft.cli.flags import add_engine_flags, engine_settings
from weft.cli.parser import add_verb
from weft.errors import ConfigError
from weft.server.settings import ServerSettings

_EPILOG = """\
examples:
  weft serve                                  the bundled model on http://127.0.0.1:8000
  weft serve --model DIR --port 9000
  WEFT_API_KEY=secret weft serve --model DIR --host 0.0.0.0

The API is OpenAI's: point a client's base_url at http://HOST:PORT/v1."""

_DEST = "server."

_FLAGS: dict[str, dict[str, Any]] = {
    "--host": {"dest": "host", "metavar": "NAME", "help": "where to listen (default: 127.0.0.1, this machine only)"},
    "--port": {"dest": "port", "type": int, "metavar": "N", "help": "default: 8000; 0: any free one"},
    "--api-key": {
        "dest": "api_keys", "action": "append", "metavar": "KEY",
        "help": "a key that callers must present; may be given more than once (or set WEFT_API_KEY)",
    },
    "--admin-key": {"dest": "admin_key", "metavar": "KEY", "help": "a key that may also look into the engine"},
    "--allow-unauthenticated": {
        "dest": "allow_unauthenticated", "action": "store_true", "help": "listen beyond this machine without a key",
    },
    "--allowed-host": {
        "dest": "allowed_hosts", "action": "append", "metavar": "NAME",
        "help": "a further name in the Host header, when listening on loopback",
    },
    "--allowed-origins": {
        "dest": "allowed_origins", "nargs": "+", "metavar": "URL",
        "help": "origins (https://NAME) whose web pages may call; * is all",
    },
    "--strict": {"dest": "strict", "action": "store_true", "help": "refuse request fields that are not known"},
    "--enable-force-include-usage": {
        "dest": "enable_force_include_usage", "action": "store_true",
        "help": "usage in every event of a stream, asked for or not",
    },
    "--restart-engine": {
        "dest": "restart_engine", "action": "store_true", "help": "start a new engine when it dies, instead of leaving",
    },
    "--max-queue-size": {"dest": "max_queue_size", "type": int, "metavar": "N", "help": "completions that may wait"},
    "--request-timeout": {
        "dest": "request_timeout_s", "type": float, "metavar": "S", "help": "longest life of a request",
    },
    "--drain-timeout": {
        "dest": "drain_timeout_s", "type": float, "metavar": "S",
        "help": "how long open requests may go on after SIGTERM",
    },
    "--max-body-bytes": {"dest": "max_body_bytes", "type": int, "metavar": "N", "help": "largest request body"},
    "--max-n": {"dest": "max_n", "type": int, "metavar": "N", "help": "most completions per prompt"},
    "--max-prompts": {"dest": "max_prompts", "type": int, "metavar": "N", "help": "most prompts in one call"},
    "--tool-call-parser": {
        "dest": "tool_call_parser", "choices": ("auto", "none"), "help": "auto reads hermes' and qwen3_coder's formats",
    },
    "--reasoning-parser": {"dest": "reasoning_parser", "choices": ("auto", "none"), "help": "auto reads <think>"},
    "--log-format": {"dest": "log_format", "choices": ("text", "json"), "help": "form of the log's lines"},
    "--otlp-traces-endpoint": {
        "dest": "otlp_traces_endpoint", "metavar": "URL", "help": "send OpenTelemetry spans there (http://HOST:4318)",
    },
}  # fmt: skip


def add_parser(verbs: Any) -> None:
    parser = add_verb(verbs, "serve", run, "serve the model over HTTP", usage="serve [flags]", epilog=_EPILOG)
    add_server_flags(parser)
    add_engine_flags(parser, server=True)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    defaults = {f.name: f.default for f in dataclasses.fields(ServerSettings)}
    for flag, arguments in _FLAGS.items():
        dest, help = arguments["dest"], arguments["help"]
        default = defaults[dest]
        if type(default) in (int, float) and "default" not in help:
            help += f" (default: {default:,})"
        group.add_argument(flag, **(arguments | {"dest": _DEST + dest, "default": argparse.SUPPRESS, "help": help}))


def server_settings(args: argparse.Namespace) -> ServerSettings:
    """The server's settings from the flags that were given, and ``WEFT_API_KEY``."""
    given = {name.removeprefix(_DEST): value for name, value in vars(args).items() if name.startswith(_DEST)}
    for name in ("api_keys", "allowed_hosts", "allowed_origins"):
        if name in given:
            given[name] = tuple(given[name])
    key = os.environ.get("WEFT_API_KEY")
    if key:
        given["api_keys"] = (*given.get("api_keys", ()), key)
    return ServerSettings(**given)


def run(args: argparse.Namespace) -> int:
    settings = server_settings(args)
    settings.check()
    try:
        from weft.server.main import serve
    except ImportError as error:
        raise ConfigError(f"weft serve needs {error.name}; install it with: pip install 'weft[server]'") from error
    return serve(settings, engine_settings(args), verbose=args.verbose)
