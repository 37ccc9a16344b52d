"""Errors on the wire, in the shape of the OpenAI API, with Anthropic's types on its paths."""

import msgspec
from starlette.responses import Response

from weft.errors import (
    ContextLengthError,
    EngineDeadError,
    EngineFrozenError,
    RequestError,
    UnavailableError,
    WeftError,
)

FROZEN_RETRY_S = 5
"""Seconds after which a caller may try an engine again that stood still."""

UNAVAILABLE_RETRY_S = 1
"""Seconds after which a caller may try an engine again that slept or had no weights."""

MESSAGES_PATH = "/v1/messages"
"""The paths of the Anthropic protocol begin so."""


class ApiError(WeftError):
    """A request that is answered with an error.

    Args:
        message: what was given, what is allowed, what to do.
        param: the request field to blame.
        code: a word for programs.
        retry_after_s: seconds after which the caller may try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


def as_api_error(error: Exception) -> ApiError:
    """Any exception as an ``ApiError``; what is none of the known kinds is a 500 without details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), param=error.param, code="context_length_exceeded")
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param)
    if isinstance(error, RecursionError):
        return ApiError(400, "the body is nested too deeply")
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), type="server_error", code="engine_dead")
    if isinstance(error, UnavailableError):
        return ApiError(503, str(error), type="server_error", code="unavailable", retry_after_s=UNAVAILABLE_RETRY_S)
    if isinstance(error, EngineFrozenError):
        return ApiError(503, str(error), type="server_error", code="frozen", retry_after_s=FROZEN_RETRY_S)
    return ApiError(500, "the server made a mistake; its log says more", type="server_error")


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def anthropic_type(error: ApiError) -> str:
    """Anthropic's type of an error, which follows from the status."""
    return _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")


def error_body(error: ApiError, path: str = "") -> dict[str, object]:
    """OpenAI's shape; with the ``type`` beside it, it is Anthropic's too. ``path``: what was called, if it is known."""
    kind = anthropic_type(error) if path.startswith(MESSAGES_PATH) else error.type
    return {
        "type": "error",
        "error": {"message": str(error), "type": kind, "param": error.param, "code": error.code},
    }


def error_response(error: Exception, path: str) -> Response:
    """The whole response to a request to ``path`` that failed before anything was sent."""
    known = as_api_error(error)
    headers = {} if known.retry_after_s is None else {"Retry-After": str(known.retry_after_s)}
    if known.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = msgspec.json.encode(error_body(known, path))
    return Response(body, known.status, headers, media_type="application/json")
