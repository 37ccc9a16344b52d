"""The page at ``/``: chat with the model, and look into the engine.

The files beside this one, as they are, with headers that let the page load nothing and talk to nobody but this server.
It is an API client like any other.
"""

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).parent

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
    ".LICENSE": "text/plain; charset=utf-8",
}

_NAMES = sorted(str(p.relative_to(_FOLDER)) for p in _FOLDER.rglob("*") if p.suffix in _TYPES)

PATHS = frozenset({"/", *(f"/{name}" for name in _NAMES)})
"""Paths that are open to everyone: the page holds no secrets. ``/vendor/`` has other people's code, unchanged, with its
licences; ``vendor/versions.json`` says which, and the tests compare."""

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types dompurify"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
"""No other host, no inline script or style, no frame; text becomes markup through DOMPurify alone. Images that a user
attaches are data: URLs. A browser keeps the files and asks with their ``ETag`` whether they have changed."""


def media_types() -> dict[str, str]:
    return {path: _TYPES[_file(path).suffix].partition(";")[0] for path in sorted(PATHS)}


def routes() -> list[Route]:
    """A route for each file; ``/`` is ``index.html``."""
    return [_route(path) for path in sorted(PATHS)]


def _file(path: str) -> Path:
    return _FOLDER / (path.removeprefix("/") or "index.html")


def _route(path: str) -> Route:
    file = _file(path)
    content = file.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = HEADERS | {"Content-Type": _TYPES[file.suffix], "ETag": tag}

    async def endpoint(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)

    return Route(path, endpoint, methods=["GET"])
