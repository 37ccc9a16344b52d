"""Settings of the HTTP server."""

import ipaddress
from dataclasses import Field, dataclass, field, fields
from typing import Any

from weft.errors import ConfigError

MAX_API_SERVERS = 64


def _option(default: Any, help: str, flag: str | None = None, **arguments: Any) -> Any:
    """Make a field that users set. ``flag`` differs from the field's name; ``arguments`` are argparse's."""
    return field(default=default, metadata={"help": help, "flag": flag, "arguments": arguments})


def flag_of(option: Field[Any]) -> str:
    return option.metadata["flag"] or f"--{option.name.replace('_', '-')}"


def server_flags() -> list[Field[Any]]:
    return [option for option in fields(ServerSettings) if option.metadata]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of address, authentication and limits. The help texts are those of ``weft serve``."""

    host: str = _option("127.0.0.1", "where to listen (default: 127.0.0.1, this machine only)", metavar="NAME")
    port: int = _option(8000, "default: 8000; 0: any free one, which is logged at the start")
    api_server_count: int = _option(1, "processes that answer calls (HTTP, templates, tokenizer), before one engine")
    api_keys: tuple[str, ...] = _option(
        (), "a key that callers must present; may be given more than once (or set WEFT_API_KEY)", "--api-key",
        action="append", metavar="KEY",
    )  # fmt: skip
    admin_key: str | None = _option(None, "a further key, which may also look into the engine", metavar="KEY")
    enable_admin_api: bool = _option(
        False, "endpoints for training loops (sleep, new weights), for callers with the admin key"
    )
    allow_unauthenticated: bool = _option(False, "listen beyond this machine without a key")
    allowed_hosts: tuple[str, ...] = _option(
        (), "a further name in the Host header, when listening on loopback", "--allowed-host", action="append",
        metavar="NAME",
    )  # fmt: skip
    allowed_origins: tuple[str, ...] = _option(
        (), "origins (https://NAME) whose web pages may call, * is all; without keys, pages of others may not start "
        "anything", nargs="+", metavar="URL",
    )  # fmt: skip
    strict: bool = _option(False, "refuse request fields that are not known, instead of ignoring them with a warning")
    enable_force_include_usage: bool = _option(False, "usage in every event of a stream, asked for or not")
    return_tokens_as_token_ids: bool = _option(
        False, "log probabilities name tokens token_id:N where a request does not say"
    )
    restart_engine: bool = _option(False, "start a new engine when it dies, instead of leaving")
    max_queue_size: int = _option(1024, "completions that may wait beyond those that run; more get 429")
    request_timeout_s: float = _option(600.0, "longest life of a request, its streaming included", "--request-timeout")
    drain_timeout_s: float = _option(60.0, "how long open requests may go on after SIGTERM", "--drain-timeout")
    max_body_bytes: int = _option(8 << 20, "largest request body")
    max_n: int = _option(64, "most completions per prompt")
    max_prompts: int = _option(1024, "most prompts in one call")
    tool_call_parser: str = _option(
        "auto", "none: calls stay text; any other name reads hermes' (JSON) and qwen3_coder's (XML) formats",
        choices=("auto", "hermes", "qwen3_coder", "qwen3_xml", "none"),
    )  # fmt: skip
    reasoning_parser: str = _option(
        "auto", "none: it stays text; else <think> is read", choices=("auto", "qwen3", "deepseek_r1", "none")
    )
    log_format: str = _option("text", "form of the log's lines", choices=("text", "json"))
    otlp_traces_endpoint: str | None = _option(None, "send OpenTelemetry spans there (http://HOST:4318)", metavar="URL")
    # without a flag
    max_schema_bytes: int = 256 << 10
    """Largest JSON schema, grammar or regular expression."""
    template_timeout_s: float = 2.0
    """Longest time to render a chat template."""
    model_aliases: tuple[str, ...] = ()
    """Further names by which callers may ask for the model: those of ``--served-model-name`` after the first."""

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def check(self) -> None:
        """Raises ConfigError for values out of range, and for a server open to other machines without an API key."""
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port} is out of range; allowed: 0 (any free one) to 65535")
        if not 1 <= self.api_server_count <= MAX_API_SERVERS:
            raise ConfigError(
                f"api_server_count={self.api_server_count} is out of range; allowed: 1 to {MAX_API_SERVERS}"
            )
        for name in ("request_timeout_s", "drain_timeout_s", "template_timeout_s"):
            if getattr(self, name) <= 0:
                flag = name.removesuffix("_s")
                raise ConfigError(f"{flag}={getattr(self, name):g} is out of range; allowed: above 0")
        for name in ("max_queue_size", "max_body_bytes", "max_n", "max_prompts", "max_schema_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is out of range; allowed: 1 or more")
        if any(not key or not key.isascii() for key in (*self.api_keys, self.admin_key or "x")):
            raise ConfigError("an API key is empty or not ASCII; give keys that fit into an HTTP header")
        if self.enable_admin_api and self.admin_key is None:
            raise ConfigError("enable_admin_api=True needs --admin-key, which its callers present")
        if not (self.is_loopback or self.api_keys or self.allow_unauthenticated):
            raise ConfigError(
                f"host={self.host!r} lets other machines in, but there is no API key; set --api-key, listen on "
                "127.0.0.1, or say --allow-unauthenticated if something in front of the server checks callers"
            )
