"""``/replicas``: the replicas behind this server, and taking one of them out of service.

Draining and starting need the admin key; ``engine/replicas.py`` does them.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request

from weft.engine import wire
from weft.engine.replicas import why_not_drain, why_not_start
from weft.server.api_call import Context
from weft.server.errors import ApiError

CHANGE_PATH = "/replicas/{replica:int}/{change:str}"

_WHY_NOT = {"drain": why_not_drain, "start": why_not_start}


def show(context: Context) -> dict[str, Any]:
    """``/replicas``; none if there is one engine."""
    return {"replicas": msgspec.to_builtins(context.service.engine_client.replicas or [])}


def change(context: Context, request: Request) -> dict[str, Any]:
    """``POST /replicas/N/drain``, ``POST /replicas/N/start``: begun when this returns.

    Raises:
        ApiError: 403, the admin key was not presented; 404, there is no such thing; 409, not in the replica's state.
    """
    if not request.scope["weft.client"].is_admin:
        raise ApiError(403, "this needs the admin key: start the server with --admin-key, and present that key")
    client, index, name = context.service.engine_client, request.path_params["replica"], request.path_params["change"]
    replicas = client.replicas
    if replicas is None:
        raise ApiError(404, "there is one engine; replicas come with --data-parallel-size")
    if name not in _WHY_NOT or index >= len(replicas):
        raise ApiError(404, f"{request.url.path} does not exist; there are {len(replicas)} replicas, from 0 on")
    refusal = _WHY_NOT[name](replicas, index)
    if refusal is not None:
        raise ApiError(409, refusal)
    client.send(wire.DrainReplica(index) if name == "drain" else wire.StartReplica(index))
    return {"replica": index, "begun": name}
