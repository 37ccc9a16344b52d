"""Settings of the HTTP server.

Job: one frozen dataclass with defaults, and the checks between its fields. Owns: limits and their defaults.
Does not know: flags, the engine's settings.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from weft.errors import ConfigError

TOOL_CALL_PARSERS = ("auto", "hermes", "qwen3_coder", "qwen3_xml", "none")
REASONING_PARSERS = ("auto", "qwen3", "deepseek_r1", "none")

MAX_API_SERVERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How the server listens, whom it lets in, and how much it takes.

    Attributes:
        host, port: where to listen. Port 0: any free one (it is logged at the start).
        api_server_count: processes that answer calls, before one engine.
        api_keys: callers must present one of them; empty: no keys.
        admin_key: a further key, which may also look into the engine.
        allow_unauthenticated: listen beyond loopback although there is no key.
        allowed_hosts: names accepted in the Host header beside the loopback names, when listening on loopback.
        allowed_origins: origins (``https://NAME``) whose web pages may call, or ``*``; without keys, pages of others
            may not start anything.
        strict: refuse request fields that are not known, instead of ignoring them with a warning.
        enable_force_include_usage: every event of every completion and chat stream has the usage, asked for or not.
        return_tokens_as_token_ids: log probabilities name tokens ``token_id:N`` where a request does not say.
        restart_engine: start a new engine when it dies, instead of leaving.
        max_queue_size: completions that may wait beyond those that run; more get 429.
        request_timeout_s: longest life of one request, its streaming included.
        drain_timeout_s: how long open requests may go on after SIGTERM.
        max_body_bytes: largest request body.
        max_n: most completions per prompt.
        max_prompts: most prompts in one call.
        max_schema_bytes: largest JSON schema, grammar or regular expression.
        template_timeout_s: longest time to render a chat template.
        model_aliases: further names by which callers may ask for the model.
        tool_call_parser: one of ``TOOL_CALL_PARSERS``: ``none``, or by whatever other name in both formats.
        reasoning_parser: one of ``REASONING_PARSERS``: ``none``, or by whatever other name from ``<think>`` tags.
        log_format: text or json.
        otlp_traces_endpoint: URL of an OpenTelemetry collector; None: no traces.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_server_count: int = 1
    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None
    allow_unauthenticated: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    strict: bool = False
    enable_force_include_usage: bool = False
    return_tokens_as_token_ids: bool = False
    restart_engine: bool = False
    max_queue_size: int = 1024
    request_timeout_s: float = 600.0
    drain_timeout_s: float = 60.0
    max_body_bytes: int = 8 << 20
    max_n: int = 64
    max_prompts: int = 1024
    max_schema_bytes: int = 256 << 10
    template_timeout_s: float = 2.0
    model_aliases: tuple[str, ...] = ()
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    log_format: str = "text"
    otlp_traces_endpoint: str | None = None

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
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0")
        for name in ("max_queue_size", "max_body_bytes", "max_n", "max_prompts", "max_schema_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be 1 or more")
        if any(not key or not key.isascii() for key in (*self.api_keys, self.admin_key or "x")):
            raise ConfigError("an API key is empty or not ASCII; give keys that fit into an HTTP header")
        if not (self.is_loopback or self.api_keys or self.allow_unauthenticated):
            raise ConfigError(
                f"host={self.host!r} lets other machines in, but there is no API key; set --api-key, listen on "
                "127.0.0.1, or say --allow-unauthenticated if something in front of the server checks callers"
            )
