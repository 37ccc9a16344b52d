"""The authentication middleware: who may call.

Job: a raw ASGI layer before everything else: Host and Origin checks, API keys, trace ids, counting responses.
Owns: which paths are open, and the headers by which browsers let pages of other origins in (CORS). Does not know:
handlers.

It decides on the raw ASGI path, by a list of open paths: what is not on the list needs a key, whatever the router makes
of it later.
"""

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Collection, Iterable
from random import getrandbits

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.server import page
from weft.server.client import Client, identity_of, read_traceparent
from weft.server.errors import ApiError, error_response
from weft.server.settings import ServerSettings

STATE_PATHS = frozenset({"/health", "/ready"})
OPEN_PATHS = page.PATHS | STATE_PATHS

_REQUEST_ID = b"x-request-id"

_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})


class AuthenticationMiddleware:
    """Wraps the application.

    Args:
        routes: paths that are counted by name; all others are counted together.
        responded: called with path and status of each response.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        routes: Collection[str],
        responded: Callable[[str, int], None],
    ) -> None:
        self._app = app
        self._routes = frozenset(routes)
        self._responded = responded
        self._keys = [_digest(key.encode()) for key in settings.api_keys]
        self._admin_key = _digest(settings.admin_key.encode()) if settings.admin_key else None
        self._origins = frozenset(origin.rstrip("/").lower() for origin in settings.allowed_origins)
        self._hosts = _LOOPBACK_NAMES | set(settings.allowed_hosts) if settings.is_loopback else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no other protocol is spoken here; the server closes the connection
        headers = dict(scope["headers"])
        path = scope["path"] if scope["path"] in self._routes else "other"
        request_id = _request_id(headers.get(b"x-request-id"))

        origin = headers.get(b"origin")
        is_let_in = origin is not None and not {"*", origin.decode("latin-1").lower()}.isdisjoint(self._origins)

        def counting(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                self._responded(path, message["status"])
                message["headers"] = _with_request_id(message.get("headers", ()), request_id)
                if is_let_in and origin is not None:
                    message["headers"] += [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]
            return send(message)

        try:
            self._check_host(headers, sum(name == b"host" for name, _ in scope["headers"]))
            if origin is not None and not is_let_in:
                self._check_origin(scope["method"], origin, headers.get(b"host", b""))
            if is_let_in and scope["method"] == "OPTIONS":
                await _preflight(headers)(scope, receive, counting)
                return
            scope["weft.client"] = self._identify(scope["path"], headers, scope.get("client"))
        except ApiError as refusal:
            await error_response(refusal, scope["path"])(scope, receive, counting)
            return
        await self._app(scope, receive, counting)

    def _check_origin(self, method: str, origin: bytes, host: bytes) -> None:
        """Without keys, a page of another origin that a browser shows on this machine could start generations."""
        is_own = origin.lower().partition(b"://")[2] == host.lower()
        if method == "POST" and not self._keys and not is_own:
            raise ApiError(
                403,
                f"Origin {origin[:100].decode('latin-1')!r} is not let in; name it with --allowed-origins, or set keys",
            )

    def _check_host(self, headers: dict[bytes, bytes], num_hosts: int) -> None:
        """On loopback only its own names are accepted, so that no web page can reach the server by DNS rebinding."""
        if num_hosts > 1:
            raise ApiError(400, "the request has several Host headers; send one")
        if self._hosts is None:
            return
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name, colon, port = host.rpartition(":")
        if (name if colon and port.isdigit() else host) not in self._hosts:
            raise ApiError(403, f"Host {host[:100]!r} is not served on loopback; use localhost, or set --allowed-host")

    def _identify(self, path: str, headers: dict[bytes, bytes], client: tuple[str, int] | None) -> Client:
        """Who calls. Raises ApiError (401) if a key is needed and none of ours was presented."""
        trace = read_traceparent(headers.get(b"traceparent"))
        connection = "" if client is None else f"{client[0]}:{client[1]}"
        if not self._keys and self._admin_key is None:
            return Client(None, False, trace, connection)
        given = presented_key(headers)
        digest = _digest(given or b"")
        # Every key is compared, in constant time each, so that nothing is learned from how long it takes.
        is_admin = self._admin_key is not None and hmac.compare_digest(digest, self._admin_key)
        is_known = sum(hmac.compare_digest(digest, key) for key in self._keys) > 0 or is_admin
        if self._keys and not is_known and path not in OPEN_PATHS:
            raise ApiError(
                401,
                "no valid API key; send 'Authorization: Bearer KEY'",
                type="authentication_error",
                code="invalid_api_key",
            )
        identity = identity_of(given) if given is not None and is_known else None
        return Client(identity, is_admin, trace, connection)


def _request_id(given: bytes | None) -> bytes | None:
    """The caller's own id, if it is 1 to 128 printable ASCII characters."""
    is_fit = given is not None and 0 < len(given) <= 128 and all(32 < byte < 127 for byte in given)
    return given if is_fit else None


def _with_request_id(headers: Iterable[tuple[bytes, bytes]], request_id: bytes | None) -> list[tuple[bytes, bytes]]:
    """The headers of a response with the caller's ``X-Request-Id``, else its own, else a new one."""
    result = [header for header in headers if request_id is None or header[0].lower() != _REQUEST_ID]
    if request_id is not None or not any(name.lower() == _REQUEST_ID for name, _ in result):
        result.append((_REQUEST_ID, request_id or b"%032x" % getrandbits(128)))
    return result


def _preflight(headers: dict[bytes, bytes]) -> Response:
    """The answer to a browser that asks whether a page of another origin may call."""
    wanted = headers.get(b"access-control-request-headers", b"*").decode("latin-1")
    allowed = {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Allow-Headers": wanted}
    return Response(status_code=204, headers=allowed | {"Access-Control-Max-Age": "600"})


def presented_key(headers: dict[bytes, bytes]) -> bytes | None:
    """The key that a caller sent, as a bearer token or in ``x-api-key``; never empty."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and token.strip():
        return token.strip()
    return headers.get(b"x-api-key") or None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
