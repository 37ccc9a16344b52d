"""``weft serve``: the model over HTTP.

Job: flags of the server. Owns: their names. Does not know: what the server does with them.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from typing import Any

from weft.cli.flags import add_engine_flags, engine_settings
from weft.cli.parser import add_verb
from weft.errors import ConfigError
from weft.executor.external import follow
from weft.server.settings import REASONING_PARSERS, TOOL_CALL_PARSERS, ServerSettings

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
"""Flags that scripts for vLLM carry, and why they change nothing."""

_FLAGS: dict[str, dict[str, Any]] = {
    "--host": {"dest": "host", "metavar": "NAME", "help": "where to listen (default: 127.0.0.1, this machine only)"},
    "--port": {"dest": "port", "type": int, "metavar": "N", "help": "default: 8000; 0: any free one"},
    "--api-server-count": {
        "dest": "api_server_count", "type": int, "metavar": "N",
        "help": "processes that answer calls (HTTP, templates, tokenizer), before one engine",
    },
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
    "--return-tokens-as-token-ids": {
        "dest": "return_tokens_as_token_ids", "action": "store_true",
        "help": "log probabilities name tokens token_id:N where a request does not say",
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
        "dest": "tool_call_parser", "choices": TOOL_CALL_PARSERS,
        "help": "none: calls stay text; any other name reads hermes' (JSON) and qwen3_coder's (XML) formats",
    },
    "--reasoning-parser": {
        "dest": "reasoning_parser", "choices": REASONING_PARSERS, "help": "none: it stays text; else <think> is read",
    },
    "--log-format": {"dest": "log_format", "choices": ("text", "json"), "help": "form of the log's lines"},
    "--otlp-traces-endpoint": {
        "dest": "otlp_traces_endpoint", "metavar": "URL", "help": "send OpenTelemetry spans there (http://HOST:4318)",
    },
}  # fmt: skip


def add_parser(verbs: Any) -> None:
    parser = add_verb(verbs, "serve", run, "serve the model over HTTP", usage="serve [MODEL] [flags]", epilog=_EPILOG)
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
    """Says why a flag changes nothing."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        print(f"weft: {option} has no effect: {_WITHOUT_EFFECT[str(option)]}", file=sys.stderr)


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
    given["model_aliases"] = tuple(getattr(args, _NAMES, ())[1:])
    key = os.environ.get("WEFT_API_KEY")
    if key:
        given["api_keys"] = (*given.get("api_keys", ()), key)
    return ServerSettings(**given)


def serve_engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's settings from the flags that were given. Raises ConfigError for two models."""
    given = engine_settings(args)
    if _NAMES in vars(args):
        given["served_model_name"] = getattr(args, _NAMES)[0]
    if args.model is not None and given.setdefault("model", args.model) != args.model:
        raise ConfigError(f"two models are given, {args.model} and --model {given['model']}; give one")
    return given


def run(args: argparse.Namespace) -> int:
    follow(engine_settings(args))  # a rank that torchrun has started serves rank 0, and no callers
    settings = server_settings(args)
    settings.check()
    try:
        from weft.server.main import serve
    except ImportError as error:
        raise ConfigError(f"weft serve needs {error.name}; install it with: pip install 'weft[server]'") from error
    return serve(settings, serve_engine_settings(args), verbose=args.verbose)
