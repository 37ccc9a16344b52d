"""The ASGI application: which path is answered by what.

Job: the table of routes, reading bodies within their limit, and errors in the OpenAI shape.
Owns: the table. Does not know: what handlers do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.server import admin, page, utility
from weft.server.anthropic_messages import CountTokensRequest, MessagesRequest, count_tokens, messages
from weft.server.api_call import Context
from weft.server.authentication import AuthenticationMiddleware
from weft.server.chat_completions import chat_completions
from weft.server.client import Client
from weft.server.completions import completions
from weft.server.errors import ApiError, as_api_error, error_response
from weft.server.inspector import Inspector
from weft.server.metrics import CONTENT_TYPE, METRICS, Metrics
from weft.server.openapi import openapi_document
from weft.server.protocol import (
    BodyReader,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from weft.server.requestlog import RequestLog
from weft.server.responses import ResponsesRequest, responses
from weft.server.service import Service

if TYPE_CHECKING:
    from weft.server.tracing import Tracer

logger = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]
DirectEndpoint = Callable[[Scope, Receive], Awaitable[Response]]
PostHandler = Callable[[Context, bytes, Client], Awaitable[Any]]

POSTS: dict[str, tuple[PostHandler, type[msgspec.Struct]]] = {
    "/v1/chat/completions": (chat_completions, ChatCompletionRequest),
    "/v1/completions": (completions, CompletionRequest),
    "/v1/responses": (responses, ResponsesRequest),
    "/v1/messages": (messages, MessagesRequest),
    "/v1/messages/count_tokens": (count_tokens, CountTokensRequest),
    "/tokenize": (utility.tokenize, TokenizeRequest),
    "/detokenize": (utility.detokenize, DetokenizeRequest),
}
"""Path -> handler of the body, and the body's type. A handler gives a ``Response`` or a JSON value."""

GETS: dict[str, Callable[[Context], Any]] = {
    "/v1/models": utility.models,
    "/tokenizer_info": utility.tokenizer_info,
    "/health": utility.health,
    "/ready": utility.ready,
    "/load": utility.load,
    "/version": utility.version,
    "/replicas": utility.replicas,
}
"""Path -> what it gives: a JSON value, or a status and one."""


BODY_TIMEOUT_S = 60.0
"""For a whole body to come."""

MODEL_PATH = "/v1/models/{name:path}"


def media_types() -> dict[str, str]:
    """Media types of the responses to GET, by path."""
    json = [*GETS, MODEL_PATH, "/inspect", "/openapi.json"]
    return dict.fromkeys(json, "application/json") | {"/metrics": CONTENT_TYPE.partition(";")[0]} | page.media_types()


def build_app(service: Service, tracer: Tracer | None = None) -> ASGIApp:
    """The application over a service."""
    settings = service.settings
    context = Context(service, settings, BodyReader(settings.strict), Metrics(service), RequestLog(), tracer)
    service.api_processes.offer(
        lambda what: context.metrics.report() if what == METRICS else service.history.report(what)
    )
    document = msgspec.json.encode(openapi_document({path: kind for path, (_, kind) in POSTS.items()}, media_types()))

    async def metrics(request: Request) -> Response:
        return Response(await context.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def one_model(request: Request) -> Response:
        name = request.path_params["name"]
        return await _get(context, lambda context: utility.model(context, name))(request.scope, request.receive)

    async def openapi(request: Request) -> Response:
        return Response(document, media_type="application/json")

    async def change_replica(request: Request) -> Response:
        try:
            return _json(utility.change_replica(context, request), 202)
        except Exception as error:
            return _failure(error, request.url.path)

    async def read(request: Request) -> bytes:
        headers = dict(request.scope["headers"])
        return await read_body(request.scope, request.receive, headers, settings.max_body_bytes)

    inspector = Inspector(service)

    async def inspect(request: Request) -> Response:
        try:
            return _json(await inspector.answer(request))
        except Exception as error:
            return _failure(error, request.url.path)

    direct = {("POST", path): _post(context, handler) for path, (handler, _) in POSTS.items()}
    direct |= {("GET", path): _get(context, handler) for path, handler in GETS.items()}
    routes = [
        *(Route(path, _routed(endpoint), methods=[method]) for (method, path), endpoint in direct.items()),
        Route(MODEL_PATH, one_model, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/openapi.json", openapi, methods=["GET"]),
        Route("/inspect", inspect, methods=["GET"]),
        Route(utility.CHANGE_PATH, change_replica, methods=["POST"]),
        *admin.routes(context, read, _json, _failure),
        *page.routes(),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error, Exception: _any_error})
    app.router.redirect_slashes = False
    return AuthenticationMiddleware(
        DirectRoutes(direct, app),
        settings,
        [*POSTS, *GETS, "/metrics", "/openapi.json", "/inspect", "/"],
        context.metrics.responded,
    )


class DirectRoutes:
    """Dispatches the most frequent calls by method and path, without a router, and all others to ``app``."""

    def __init__(self, endpoints: Mapping[tuple[str, str], DirectEndpoint], app: Starlette) -> None:
        self._endpoints = endpoints
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get((scope.get("method", ""), scope["path"]))
        if endpoint is None:
            await self.app(scope, receive, send)
            return
        response = await endpoint(scope, receive)
        await response(scope, receive, send)


def _post(context: Context, handler: PostHandler) -> DirectEndpoint:
    async def endpoint(scope: Scope, receive: Receive) -> Response:
        try:
            headers = dict(scope["headers"])
            _check_media_type(headers.get(b"content-type"))
            _check_encoding(headers.get(b"content-encoding"))
            body = await read_body(scope, receive, headers, context.settings.max_body_bytes)
            result = await handler(context, body, scope["weft.client"])
        except ClientDisconnect:
            return Response(status_code=499)  # nobody is there to read it
        except Exception as error:
            return _failure(error, scope["path"])
        return result if isinstance(result, Response) else _json(result)

    return endpoint


def _routed(endpoint: DirectEndpoint) -> Endpoint:
    """For the router, which refuses other methods."""

    async def routed(request: Request) -> Response:
        return await endpoint(request.scope, request.receive)

    return routed


def _get(context: Context, handler: Callable[[Context], Any]) -> DirectEndpoint:
    async def endpoint(scope: Scope, receive: Receive) -> Response:
        try:
            result = handler(context)
        except Exception as error:
            return _failure(error, scope["path"])
        return _json(result[1], result[0]) if isinstance(result, tuple) else _json(result)

    return endpoint


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _check_media_type(given: bytes | None) -> None:
    """Browsers send other media types to other hosts without asking them first. Raises ApiError (415)."""
    if given is None or given == b"application/json":
        return
    kind = given.decode("latin-1").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"Content-Type {kind[:60]!r} is not read here; send application/json")


def _check_encoding(given: bytes | None) -> None:
    """Raises ApiError (415) for a compressed body."""
    if given is not None and given.strip().lower() not in (b"", b"identity"):
        kind = given[:60].decode("latin-1")
        raise ApiError(415, f"Content-Encoding {kind!r} is not read here; send the body without compression")


async def read_body(scope: Scope, receive: Receive, headers: Mapping[bytes, bytes], limit: int) -> bytes:
    """The body. Raises ApiError: 413 as soon as it is known to be too large, 408 if it takes too long."""
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length) > limit:
        raise _too_large(limit)
    if "weft.is_complete" in scope:  # nothing to wait for
        return await _read_all(receive, limit)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _read_all(receive, limit)
    except TimeoutError as error:
        raise ApiError(408, f"the body did not come within {BODY_TIMEOUT_S:g} s") from error


async def _read_all(receive: Receive, limit: int) -> bytes:
    chunks, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than this server takes: {limit:,} bytes", code="body_too_large")


def _failure(error: Exception, path: str) -> Response:
    if as_api_error(error).status == 500:
        logger.error("a request failed", exc_info=error)
    return error_response(error, path)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    allowed = (error.headers or {}).get("Allow", "")
    message = {
        404: f"there is nothing at {request.url.path[:200]}; /openapi.json lists what there is",
        405: f"{request.method} is not allowed here; allowed: {allowed}",
    }
    known = ApiError(error.status_code, message.get(error.status_code, error.detail))
    response = error_response(known, request.url.path)
    if allowed:
        response.headers["Allow"] = allowed
    return response


async def _any_error(request: Request, error: Exception) -> Response:
    return _failure(error, request.url.path)
