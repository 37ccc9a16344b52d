"""The small parts of the server: rendering in time, admission, authentication, the log, settings."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import re
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patience import GUARD_S
from weft.cli import main
from weft.cli.serve import add_parser, serve_engine_settings, server_settings
from weft.config.aliases import SERVER_FLAGS
from weft.engine.channel import Address, EngineStart
from weft.engine.launcher import ENGINE_MODULE, EngineCommand
from weft.engine.supervisor import EngineSupervisor
from weft.errors import ConfigError, ContextLengthError, EngineDeadError, RequestError
from weft.processes.log_format import LogFormatter
from weft.server.admission import Admission
from weft.server.app import POSTS, build_app, media_types
from weft.server.authentication import AuthenticationMiddleware, presented_key
from weft.server.chat import chat_prompt
from weft.server.client import Client, identity_of
from weft.server.errors import ApiError, as_api_error, error_response
from weft.server.main import serve
from weft.server.openapi import openapi_document
from weft.server.rendering import SMALL, RenderPool, TemplateTimeout
from weft.server.service import Service
from weft.server.settings import ServerSettings


def forever() -> None:
    while True:
        time.sleep(0)


def test_work_that_does_not_end_is_ended() -> None:
    async def main() -> None:
        pool = RenderPool(timeout_s=0.1)
        assert await pool.run_limited(lambda: 5, str) == "5"
        for _ in range(4):  # more than there are threads: each is free again afterwards
            with pytest.raises(RequestError, match=r"longer than 0\.1 s"):
                await pool.run_limited(forever, str)
        assert await pool.run_limited(lambda: 6, str) == "6"
        with pytest.raises(RequestError, match="mine"):
            await pool.run_limited(_refuse, str)
        assert await pool.run_limited(threading.current_thread, str) == str(threading.main_thread())
        assert await pool.run_limited(threading.current_thread, str, size=SMALL) != str(threading.main_thread())
        pool.close()

    asyncio.run(main())


@pytest.mark.parametrize("size", [0, SMALL])
def test_work_that_drops_an_interruption_is_interrupted_again(size: int) -> None:
    """Callbacks of the interpreter drop interruptions too. The work runs once in the event loop, once in the thread."""
    given_up = time.monotonic() + GUARD_S

    def stubborn() -> str:
        num_dropped = 0
        while time.monotonic() < given_up:
            try:
                while time.monotonic() < given_up:
                    time.sleep(0)
            except TemplateTimeout:
                num_dropped += 1
                if num_dropped == 3:
                    raise
        return "lived on"

    async def main() -> None:
        pool = RenderPool(timeout_s=0.1)
        with pytest.raises(RequestError, match=r"longer than 0\.1 s"):
            await pool.run_limited(stubborn, str, size=size)
        assert await pool.run_limited(lambda: 6, str) == "6"
        pool.close()

    asyncio.run(main())


def test_an_alarm_that_comes_too_late_interrupts_nothing() -> None:
    async def main() -> None:
        pool = RenderPool(timeout_s=0.1)
        signal.raise_signal(signal.SIGALRM)
        with pytest.raises(RequestError, match="longer"):
            await pool.run_limited(lambda: signal.raise_signal(signal.SIGALRM) or forever(), str)
        pool.close()

    asyncio.run(main())


@pytest.mark.parametrize(("num_characters", "in_loop"), [(SMALL, True), (5 * SMALL, False)])
def test_a_short_conversation_with_long_tools_is_tokenized_in_a_thread(num_characters: int, in_loop: bool) -> None:
    def encode(chat: Any, limit: Any) -> Any:
        return threading.current_thread()

    async def main() -> Any:
        service: Any = SimpleNamespace(render=RenderPool(timeout_s=1.0), keeps_states=False)
        chats = SimpleNamespace(
            render=lambda *given, **named: SimpleNamespace(text="x" * num_characters), encode=encode
        )
        engine: Any = SimpleNamespace(tokenizer=0, chats=chats, inputs=SimpleNamespace(text_only="", media=None))
        try:
            return await chat_prompt(service, engine, [{"role": "user", "content": "x"}])
        finally:
            service.render.close()

    assert (asyncio.run(main()) is threading.main_thread()) is in_loop


def test_small_work_that_takes_long_does_not_keep_the_event_loop() -> None:
    """It is begun in the event loop, and again in a thread."""
    gaps: list[float] = []

    async def watch() -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0)
            gaps.append(time.thread_time() - began)

    async def main() -> None:
        pool = RenderPool(timeout_s=0.3)
        watcher = asyncio.create_task(watch())
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match=r"longer than 0\.3 s"):
            await pool.run_limited(forever, str)
        watcher.cancel()
        pool.close()

    asyncio.run(main())
    assert max(gaps) < 0.1


def _refuse() -> None:
    raise RequestError("mine")


def test_admission_counts_until_the_response_has_ended() -> None:
    admission = Admission(max_running=2, max_waiting=3)
    leave = admission.enter(4)
    with pytest.raises(ApiError) as refused:
        admission.enter(2)
    assert refused.value.status == 429 and refused.value.retry_after_s == 1
    with pytest.raises(RequestError, match="6 completions"):
        admission.enter(6)
    last = admission.enter(1)
    assert admission.num_open == 5, "all that there is room for"
    leave()
    leave()
    last()
    assert admission.num_open == 0


def knock(
    settings: ServerSettings, path: str = "/v1/models", method: str = "GET", **headers: str
) -> tuple[int, Client | None]:
    """Status and caller of a request through the gate; 0: it was let in."""
    seen: list[Client] = []
    statuses: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["weft.client"])

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    raw = [(name.replace("_", "-").lower().encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": path, "headers": raw, "method": method}
    asyncio.run(AuthenticationMiddleware(app, settings, [], lambda path, status: None)(scope, None, send))  # type: ignore[arg-type]
    return (0, seen[0]) if seen else (statuses[0], None)


def test_callers_with_different_keys_share_no_cache() -> None:
    settings = ServerSettings(api_keys=("a", "b"), admin_key="root")
    callers = [knock(settings, host="localhost", x_api_key=key)[1] for key in ("a", "b", "root", "a")]
    assert all(caller is not None for caller in callers)
    salts = [caller.cache_salt(None) for caller in callers if caller]
    assert len(set(salts)) == 3 and salts[0] == salts[3]
    first = callers[0]
    assert first is not None and first.cache_salt("x") not in (first.cache_salt(None), "x")
    assert [caller.is_admin for caller in callers if caller] == [False, False, True, False]
    assert knock(ServerSettings(), host="localhost", x_api_key="whatever") == (0, Client())
    assert Client("key", connection="a").queue == "key" and Client(connection="a").queue == "a"
    assert Client().cache_salt("x") == "x" and Client().cache_salt(None) is None
    with pytest.raises(RequestError, match="cache_salt='' is not a non-empty text; leave it out"):
        Client().cache_salt("")


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({b"authorization": b"Bearer a"}, b"a"),
        ({b"authorization": b"bearer  a ", b"x-api-key": b"b"}, b"a"),
        ({b"authorization": b"Basic a", b"x-api-key": b"b"}, b"b"),
        ({b"authorization": b"Bearer ", b"x-api-key": b"b"}, b"b"),
        ({b"authorization": b"Bearer "}, None),
        ({b"x-api-key": b""}, None),
        ({}, None),
    ],
)
def test_keys_that_are_presented(headers: dict[bytes, bytes], key: bytes | None) -> None:
    assert presented_key(headers) == key


def test_a_caller_is_known_by_its_key_alone() -> None:
    """With nothing but an admin key everybody is let in, and a key that is none of ours names nobody."""
    settings = ServerSettings(admin_key="root")
    assert knock(settings, host="localhost", x_api_key="other") == (0, Client())
    admin = knock(settings, host="localhost", x_api_key="root")[1]
    assert admin is not None and admin.is_admin and admin.identity == identity_of(b"root")
    for path, status in (("/v1/models", 401), ("/health", 0)):
        assert knock(ServerSettings(api_keys=("a",)), path, host="localhost", x_api_key="b")[0] == status


def answers(settings: ServerSettings, path: str, method: str = "GET", **headers: str) -> tuple[Any, ...]:
    """Return the counted responses, the status and headers of the response (without the id), and the callers of the
    application. The application returns 204."""
    counted: list[tuple[str, int]] = []
    sent: list[Any] = []
    callers: list[Client] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        callers.append(scope["weft.client"])
        await send({"type": "http.response.start", "status": 204, "headers": [(b"x", b"y")]})
        await send({"type": "http.response.body", "body": b""})

    async def send(message: Any) -> None:
        sent.append(message)

    gate = AuthenticationMiddleware(app, settings, ["/known"], lambda *response: counted.append(response))
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": path, "headers": raw, "method": method, "client": ("1.2.3.4", 5)}
    asyncio.run(gate(scope, None, send))  # type: ignore[arg-type]
    answered = dict(sent[0]["headers"])
    assert len(answered.pop(b"x-request-id")) == 32
    return counted, sent[0]["status"], answered, callers


def test_responses_are_counted_by_route_whoever_gave_them() -> None:
    settings = ServerSettings(api_keys=("a",))
    caller = Client(identity_of(b"a"), connection="1.2.3.4:5")
    assert answers(settings, "/known", host="localhost", x_api_key="a") == (
        [("/known", 204)], 204, {b"x": b"y"}, [caller],
    )  # fmt: skip
    assert answers(settings, "/made/up", host="localhost", x_api_key="a")[0] == [("other", 204)]
    counted, status, headers, callers = answers(settings, "/known", host="localhost")
    assert (counted, status, callers) == ([("/known", 401)], 401, []) and headers[b"www-authenticate"] == b"Bearer"
    assert answers(settings, "/known", host="localhost:port", x_api_key="a")[:2] == ([("/known", 403)], 403)


def test_pages_of_other_origins_are_let_in_by_name() -> None:
    settings = ServerSettings(allowed_origins=("https://a.example/",))
    for method, origin, is_let_in in (
        ("POST", "https://A.example", True), ("GET", "https://b.example", False),
        ("OPTIONS", "https://b.example", False),
    ):  # fmt: skip
        _, status, headers, callers = answers(settings, "/known", method, host="localhost", origin=origin)
        assert status == 204 and len(callers) == 1
        shared = {b"access-control-allow-origin": origin.encode(), b"vary": b"Origin"} if is_let_in else {}
        assert headers == {b"x": b"y"} | shared
    asked = {"origin": "https://a.example", "access_control_request_headers": "x-api-key"}
    counted, status, headers, callers = answers(settings, "/known", "OPTIONS", host="localhost", **asked)
    assert (counted, status, callers) == ([("/known", 204)], 204, []), "the application is not asked"
    assert headers[b"access-control-allow-origin"] == b"https://a.example"
    assert headers[b"access-control-allow-headers"] == b"x-api-key"
    assert headers[b"access-control-allow-methods"] == b"GET, POST"
    everybody = ServerSettings(allowed_origins=("*",))
    assert b"vary" in answers(everybody, "/known", "POST", host="localhost", origin="https://b.example")[2]


@pytest.mark.parametrize(
    ("error", "status", "told", "headers"),
    [
        (ContextLengthError("m", "prompt"), 400, ("invalid_request_error", "prompt", "context_length_exceeded"), {}),
        (RequestError("m", "n"), 400, ("invalid_request_error", "n", None), {}),
        (EngineDeadError("m"), 503, ("server_error", None, "engine_dead"), {}),
        (ApiError(429, "m", type="t", param="p", code="c", retry_after_s=3), 429, ("t", "p", "c"),
         {"retry-after": "3"}),
        (ApiError(401, "m", retry_after_s=0), 401, ("invalid_request_error", None, None),
         {"www-authenticate": "Bearer", "retry-after": "0"}),
    ],
)  # fmt: skip
def test_errors_as_responses(error: Exception, status: int, told: tuple[Any, ...], headers: dict[str, str]) -> None:
    response = error_response(error, "/v1/responses")
    kind, param, code = told
    expected = {"message": "m", "type": kind, "param": param, "code": code}
    assert response.status_code == status and json.loads(response.body) == {"type": "error", "error": expected}
    found = {name: value for name, value in response.headers.items() if name != "content-length"}
    assert found == headers | {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error"),
     (404, "not_found_error"), (405, "invalid_request_error"), (413, "request_too_large"), (429, "rate_limit_error"),
     (500, "api_error"), (503, "api_error"), (504, "timeout_error"), (529, "overloaded_error")],
)  # fmt: skip
def test_types_of_errors_in_the_anthropic_protocol(status: int, kind: str) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        error = json.loads(error_response(ApiError(status, "m", type="t"), path).body)["error"]
        assert (error["type"], error["message"]) == (kind, "m")


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 0), ("127.0.0.1:8000", 0), ("[::1]:8000", 0), ("LOCALHOST:1", 0), ("named", 0), ("evil", 403),
     ("localhost.evil.example", 403), ("127.0.0.1.evil:80", 403), ("", 403), ("evil:localhost", 403)],
)  # fmt: skip
def test_host_on_loopback(host: str, status: int) -> None:
    assert knock(ServerSettings(allowed_hosts=("named",)), host=host)[0] == status
    assert knock(ServerSettings(host="0.0.0.0", api_keys=("k",)), host=host, x_api_key="k")[0] == 0


def test_two_host_headers() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/health", "headers": [(b"host", b"localhost")] * 2, "method": "GET"}
    asyncio.run(
        AuthenticationMiddleware(lambda *given: None, ServerSettings(), [], lambda path, status: None)(
            scope, None, send
        )
    )  # type: ignore[arg-type, return-value]
    assert sent[0]["status"] == 400


@pytest.mark.parametrize(
    ("origin", "settings", "status"),
    [("http://localhost:8000", {}, 0), ("https://evil.example", {}, 403), ("null", {}, 403),
     ("https://app.example", {"allowed_origins": ("https://App.example/",)}, 0),
     ("https://evil.example", {"allowed_origins": ("*",)}, 0), ("http://localhost:9", {}, 403),
     ("https://evil.example", {"api_keys": ("k",)}, 401)],
)  # fmt: skip
def test_pages_of_other_origins_start_nothing(origin: str, settings: dict[str, Any], status: int) -> None:
    assert knock(ServerSettings(**settings), method="POST", host="localhost:8000", origin=origin)[0] == status


def test_trace_id() -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    good = knock(ServerSettings(), host="localhost", traceparent=f"00-{trace}-b7ad6b7169203331-01")[1]
    bad = knock(ServerSettings(), host="localhost", traceparent="00-x")[1]
    assert good is not None and good.trace_id == trace and bad is not None and bad.trace_id is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"host": "0.0.0.0"}, "no API key"), ({"host": "some.name"}, "no API key"), ({"port": 70000}, "port"),
     ({"api_keys": ("",)}, "key"), ({"request_timeout_s": 0}, "^request_timeout=0 is out of range; allowed: above 0"),
     ({"max_n": 0}, "^max_n=0 is out of range; allowed: 1 or more")],
)  # fmt: skip
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerSettings(**settings).check()


def test_settings_that_are_fine() -> None:
    for settings in ({}, {"host": "::1"}, {"host": "0.0.0.0", "allow_unauthenticated": True}, {"port": 0}):
        ServerSettings(**settings).check()  # type: ignore[arg-type]
    assert SERVER_FLAGS == ("--api-key", "--host", "--port")


def parsed(words: str) -> tuple[ServerSettings, dict[str, Any]]:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(), "serve")
    args = parser.parse_args(["serve", *words.split()])
    return server_settings(args), serve_engine_settings(args)


def test_every_flag_of_the_server_sets_its_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once, each with a value that no other has."""
    words: list[str] = []
    expected: dict[str, Any] = {}
    for number, field in enumerate((f for f in dataclasses.fields(ServerSettings) if f.metadata), start=3):
        arguments, default = field.metadata["arguments"], field.default
        flag = field.metadata["flag"] or f"--{field.name.replace('_', '-')}"
        if isinstance(default, bool):
            expected[field.name], given = True, [flag]
        elif isinstance(default, tuple):
            expected[field.name] = names = (f"a{number}", f"b{number}")
            given = [flag, *names] if "nargs" in arguments else [flag, names[0], flag, names[1]]
        elif "choices" in arguments:
            expected[field.name] = next(choice for choice in reversed(arguments["choices"]) if choice != default)
            given = [flag, expected[field.name]]
        else:
            expected[field.name] = number if isinstance(default, int | float) else f"text{number}"
            given = [flag, str(expected[field.name])]
        words += given
    settings, engine = parsed(" ".join(words))
    assert settings == ServerSettings(**expected) and engine == {}
    monkeypatch.setenv("WEFT_API_KEY", "secret")
    assert parsed("--api-key a")[0].api_keys == ("a", "secret") and parsed("")[0].api_keys == ("secret",)


def test_settings_of_server_and_engine_go_to_each(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr("weft.server.main.serve", lambda *given, **more: served.append((*given, more)) or 7)
    assert main(["serve", "DIR", "--port", "5", "--max-num-seqs", "3", "--verbose"]) == 7
    assert served == [(ServerSettings(port=5), {"model": "DIR", "max_num_seqs": 3}, {"verbose": True})]


@pytest.mark.parametrize(("log_format", "verbose", "restarts"), [("json", False, True), ("text", True, False)])
def test_the_engine_is_started_as_the_server_is_told(
    monkeypatch: pytest.MonkeyPatch, log_format: str, verbose: bool, restarts: bool
) -> None:
    class Started(Exception):
        pass

    def started(command: EngineCommand, restarts: bool) -> Any:
        raise Started(command, restarts)

    logs: list[Any] = []
    monkeypatch.setattr("weft.server.main.EngineSupervisor", started)
    monkeypatch.setattr("weft.server.main.configure_log", lambda *given: logs.append(given))
    settings = ServerSettings(port=0, log_format=log_format, restart_engine=restarts)
    with pytest.raises(Started) as got:
        serve(settings, {"max_num_seqs": 3}, verbose=verbose)
    as_json = log_format == "json"
    assert got.value.args == (EngineCommand({"max_num_seqs": 3}, ENGINE_MODULE, verbose, as_json), restarts)
    assert logs == [(as_json, verbose)]
    start = got.value.args[0].start(Address("to", "from"), "beat", 5)
    assert start == EngineStart(Address("to", "from"), "beat", 5, {"max_num_seqs": 3}, verbose, as_json)


def test_flags_that_scripts_for_other_servers_carry(capsys: pytest.CaptureFixture[str]) -> None:
    words = "DIR --served-model-name a b --tool-call-parser hermes --reasoning-parser qwen3 --max-num-seqs 4"
    ignored = " --enable-auto-tool-choice --swap-space 4 --disable-log-requests --trust-remote-code"
    settings, engine = parsed(words + ignored)
    assert (engine["model"], engine["served_model_name"], engine["max_num_seqs"]) == ("DIR", "a", 4)
    assert settings.model_aliases == ("b",) and settings.tool_call_parser == "hermes"
    told = capsys.readouterr().err
    assert "--enable-auto-tool-choice has no effect" in told and "--swap-space has no effect" in told
    assert parsed("--model DIR")[1] == {"model": "DIR"} and parsed("")[1] == {}
    with pytest.raises(ConfigError, match="two models"):
        parsed("DIR --model OTHER")


def test_log_lines() -> None:
    record = logging.LogRecord("weft.requests", logging.INFO, "", 0, "call ended", (), None)
    record.fields = {"request_id": "r", "ttft_s": 0.5}
    assert json.loads(LogFormatter(as_json=True).format(record))["ttft_s"] == 0.5
    assert LogFormatter(as_json=False).format(record).endswith("weft.requests: call ended request_id=r ttft_s=0.5")
    assert json.loads(LogFormatter(as_json=True, process="rank 1").format(record))["process"] == "rank 1"
    assert LogFormatter(as_json=False, process="rank 1").format(record) == "rank 1: weft.requests: call ended"


def test_unforeseen_errors_tell_nothing() -> None:
    error = as_api_error(KeyError("a secret"))
    assert error.status == 500 and "secret" not in str(error)
    assert as_api_error(RecursionError()).status == 400


def test_every_route_is_in_the_openapi_document() -> None:
    gate = build_app(Service(ServerSettings(), EngineSupervisor(EngineCommand({}))))
    document = openapi_document({path: kind for path, (_, kind) in POSTS.items()}, media_types())
    described = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    routes = gate._app.app.routes  # type: ignore[attr-defined]
    answered = {(re.sub(r":\w+}", "}", route.path), next(iter(route.methods - {"HEAD"}))) for route in routes}
    assert described == answered and {("/inspect", "GET"), ("/v1/models/{name}", "GET")} < described
    name = document["paths"]["/v1/models/{name}"]["get"]["parameters"][0]
    assert (name["name"], name["in"], name["required"]) == ("name", "path", True)
    assert "text/event-stream" in document["paths"]["/v1/responses"]["post"]["responses"]["200"]["content"]
    assert "text/plain" in document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
