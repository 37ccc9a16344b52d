"""Endpoints for training loops, behind ``--enable-admin-api``: pause, sleep, new weights.

Job: read arguments, as JSON or in the query as vLLM's and SGLang's clients send them, and have the engine obey. Owns:
the names of paths and fields. Does not know: how the engine does it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.engine import wire
from weft.engine.async_engine import AsyncEngine
from weft.errors import ConfigError, RequestError
from weft.server.api_call import Context
from weft.server.errors import ApiError

Mode = Literal["wait", "abort", "keep"]


class Fields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of a command. ``action`` and ``arguments`` are those of ``wire.Control``."""

    action = "state"
    mode: Mode = "wait"

    def arguments(self) -> dict[str, Any]:
        return {}


class Pause(Fields, kw_only=True):
    """vLLM's ``/pause``, whose default ends open requests. Caches of kept requests are always computed anew."""

    action = "pause"
    mode: Mode = "abort"
    clear_cache: bool = True


class Resume(Fields, kw_only=True):
    action = "resume"


class Sleep(Fields, kw_only=True):
    action = "sleep"
    mode: Mode = "abort"
    level: int = 1

    def arguments(self) -> dict[str, Any]:
        return {"level": self.level}


class WakeUp(Fields, kw_only=True):
    action = "wake_up"
    tags: list[str] | None = None

    def arguments(self) -> dict[str, Any]:
        return {"tags": self.tags}


class Update(Fields, kw_only=True):
    """Fields of every update. ``abort_all_requests``: SGLang's name for mode "abort". ``flush_cache``: always done."""

    abort_all_requests: bool = False
    flush_cache: bool = True
    weight_version: int | None = None

    def __post_init__(self) -> None:
        if self.abort_all_requests:
            self.mode = "abort"


class FromDisk(Update, kw_only=True):
    action = "load"
    model_path: str
    load_format: Literal["auto", "safetensors"] | None = None

    def arguments(self) -> dict[str, Any]:
        return {"folder": self.model_path, "version": self.weight_version}


class FromDistributed(Update, kw_only=True):
    action = "receive"
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weft"

    def arguments(self) -> dict[str, Any]:
        given = {"names": self.names, "dtypes": self.dtypes, "shapes": self.shapes}
        return given | {"group": self.group_name, "version": self.weight_version}


class InitGroup(Fields, kw_only=True):
    action = "join"
    mode: Mode = "keep"
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weft"
    backend: Literal["nccl", "gloo"]

    def arguments(self) -> dict[str, Any]:
        given = msgspec.structs.asdict(self)
        names = {"address": "master_address", "port": "master_port", "name": "group_name"}
        own = {name: given[name] for name in ("rank_offset", "world_size", "backend")}
        return own | {name: given[field] for name, field in names.items()}


class DestroyGroup(Fields, kw_only=True):
    action = "leave"
    mode: Mode = "keep"
    group_name: str = "weft"

    def arguments(self) -> dict[str, Any]:
        return {"name": self.group_name}


POSTS: dict[str, type[Fields]] = {
    "/pause": Pause,
    "/resume": Resume,
    "/sleep": Sleep,
    "/wake_up": WakeUp,
    "/update_weights_from_disk": FromDisk,
    "/update_weights_from_distributed": FromDistributed,
    "/init_weights_update_group": InitGroup,
    "/destroy_weights_update_group": DestroyGroup,
}
"""Path -> its fields. ``GET /is_sleeping`` has none."""

Read = Callable[[Request], Awaitable[bytes]]
Answer = Callable[[Any], Response]
Fail = Callable[[Exception, str], Response]


def routes(context: Context, read: Read, answer: Answer, fail: Fail) -> list[Route]:
    """The routes, or none without the setting.

    Args:
        read: reads a body within its limits.
        answer, fail: make responses of a JSON value and of an error.
    """
    if not context.settings.enable_admin_api:
        return []

    def route(path: str, kind: type[Fields], method: str) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                engine = _engine(context, request)
                fields = _fields(kind, request, await read(request) if method == "POST" else b"")
                state = await engine.control(fields.action, fields.mode, **fields.arguments())
                return answer({"success": True, **_state_of(state)})
            except ConfigError as error:
                return fail(ApiError(400, str(error)), path)
            except Exception as error:
                return fail(error, path)

        return Route(path, endpoint, methods=[method])

    return [*(route(path, kind, "POST") for path, kind in POSTS.items()), route("/is_sleeping", Fields, "GET")]


def _state_of(message: wire.Controlled) -> dict[str, Any]:
    """The part of an answer that a caller gets."""
    out = {"replicas_out": message.replicas_out} if message.replicas_out else {}
    return out | {
        "is_sleeping": message.is_sleeping,
        "is_paused": message.is_paused,
        "weight_version": message.weight_version,
    }


def _engine(context: Context, request: Request) -> AsyncEngine:
    """The engine, for a caller with the admin key."""
    if not request.scope["weft.client"].is_admin:
        raise ApiError(403, "this needs the admin key, which --admin-key sets")
    return context.service.engine


def _fields(kind: type[Fields], request: Request, body: bytes) -> Fields:
    """Read the fields of the query, and of the body, which counts where both have a field."""
    query = request.query_params
    given: dict[str, Any] = {name: query.getlist(name) if name == "tags" else query[name] for name in query}
    try:
        if body.strip():
            given |= msgspec.json.decode(body, type=dict[str, Any])
        return msgspec.convert(given, kind, strict=False)
    except msgspec.MsgspecError as error:
        raise RequestError(f"{error}; fields are {', '.join(kind.__struct_fields__)}") from error
