"""``/inspect``: data for the inspector page.

Job: fetch snapshots of the engine at a bounded rate, and take out of them what a caller may not see.
Owns: the latest snapshot, and the rule: texts, and ids of requests that the caller does not name, need the admin key.
Does not know: how a snapshot is made, how it is drawn.
"""

import asyncio
import time
from collections.abc import Collection
from typing import Any

import msgspec
from starlette.requests import Request

from weft.engine import wire
from weft.engine.snapshot import Snapshot
from weft.server.client import Client
from weft.server.errors import ApiError
from weft.server.service import Service

MIN_INTERVAL_S = 0.5
"""Seconds between two looks into the engine, however many callers ask."""

PATIENCE_S = 5.0
"""How long a look may take: as long as a long step."""

TOKENS_PER_NODE = 48
"""Tokens of a node whose text an admin sees."""

MAX_NAMED = 64
"""Requests that a caller may name as its own."""


Look = asyncio.Task[tuple[wire.Inspected, list[str]]]


class Inspector:
    """Looks into the engine of one service, or one of its replicas, shared by all callers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._looks: dict[int | None, tuple[float, Look]] = {}  # by replica that was asked for

    async def answer(self, request: Request) -> dict[str, Any]:
        """Return the body of ``GET /inspect?request=ID&request=ID&history=hour&replica=0``.

        ``history`` is ``recent`` or ``hour``. The default of ``replica`` is the first replica that is up.

        Raises:
            ApiError: 503 if the engine is missing or too slow, 404 if the replica does not exist, 409 if the replica is
                down.
        """
        client: Client = request.scope["weft.client"]
        look, texts = await self._latest(self._replica(request.query_params.get("replica")))
        named = frozenset(request.query_params.getlist("request")[:MAX_NAMED])
        capacity = msgspec.to_builtins(self._service.capacity)
        track = "hour" if request.query_params.get("history") == "hour" else "recent"
        reports = await self._service.api_processes.gather(track)
        return {
            "model": self._service.model_name,
            "is_admin": client.is_admin,
            "capacity": capacity,
            "keeps_states": self._service.keeps_states,
            "replicas": msgspec.to_builtins(self._service.engine_client.replicas or []),
            "replica": look.replica,
            "history": self._service.history.view(track, reports),
        } | visible(look.snapshot, texts if client.is_admin else None, named)

    def _replica(self, given: str | None) -> int | None:
        """The replica that was asked for, or the first one that is up. Raises ApiError if it cannot be looked into."""
        views = self._service.engine_client.replicas or []
        if given is None:
            return next((view.replica for view in views if view.state == "up"), None)
        view = next((view for view in views if str(view.replica) == given), None)
        if view is None:
            raise ApiError(404, f"there is no replica {given!r}; there are {len(views)}, from 0 on", param="replica")
        if view.state not in ("up", "behind", "draining"):
            raise ApiError(409, f"replica {given} is {view.state}; only one that is up can be looked into")
        return view.replica

    async def _latest(self, replica: int | None) -> tuple[wire.Inspected, list[str]]:
        now = time.monotonic()
        began, look = self._looks.get(replica, (0.0, None))
        if look is None or (look.done() and now - began > MIN_INTERVAL_S):
            look = asyncio.create_task(self._fetch(replica))
            self._looks[replica] = now, look
        # Shielded: a caller that goes away must not take the look away from the others.
        return await asyncio.shield(look)

    async def _fetch(self, replica: int | None) -> tuple[wire.Inspected, list[str]]:
        service, engine = self._service, self._service.engine
        wants_text = service.settings.admin_key is not None and engine.tokenizer is not None
        try:
            async with asyncio.timeout(PATIENCE_S):
                look = await engine.inspect(TOKENS_PER_NODE if wants_text else 0, replica)
        except TimeoutError as error:
            raise ApiError(
                503, f"the engine has not answered for {PATIENCE_S:g} s", type="server_error", code="engine_busy"
            ) from error
        tokenizer = engine.tokenizer
        if not wants_text or tokenizer is None:
            return look, []
        decode = tokenizer.decode
        texts = await service.render.run(
            lambda: [decode(node.token_ids, skip_special_tokens=False) for node in look.snapshot.nodes]
        )
        return look, texts


def visible(snapshot: Snapshot, texts: list[str] | None, named: Collection[str]) -> dict[str, Any]:
    """Return a snapshot as a JSON object for one caller.

    An admin sees ``texts``, the texts of the nodes. With ``texts=None`` a caller sees no texts, no token ids, and only
    the request ids in ``named``.
    """
    result = msgspec.to_builtins(snapshot)
    for index, node in enumerate(result["nodes"]):
        del node["token_ids"]
        node["text"] = texts[index] if texts else None
    for request in result["requests"]:
        name = request["request_id"].rpartition("/")[0]  # without the number that the engine's side adds
        request["is_own"] = name in named
        request["request_id"] = name if texts is not None or name in named else None
    return result
