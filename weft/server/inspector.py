"""``/inspect``: what the page's second half shows.

Job: fetch snapshots of the engine at a bounded rate, and take out of them what a caller may not see.
Owns: the latest snapshot, and the rule: texts, and ids of requests that the caller does not name, need the admin key.
Does not know: how a snapshot is made, how it is drawn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Any

import msgspec
from starlette.requests import Request

from weft.engine.views import Snapshot
from weft.server.caller import Caller
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


class Inspector:
    """Looks into the engine of one service, shared by all callers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._look: asyncio.Task[tuple[Snapshot, list[str]]] | None = None
        self._began = 0.0

    async def answer(self, request: Request) -> dict[str, Any]:
        """The body of ``GET /inspect?request=ID&request=ID&history=hour``. ``history``: ``recent`` or ``hour``.

        Raises:
            ApiError: 503, there is no engine, or it does not answer in time.
        """
        caller: Caller = request.scope["weft.caller"]
        snapshot, texts = await self._latest()
        named = frozenset(request.query_params.getlist("request")[:MAX_NAMED])
        capacity = msgspec.to_builtins(self._service.capacity)
        track = "hour" if request.query_params.get("history") == "hour" else "recent"
        reports = await self._service.peers.gather(track)
        return {
            "model": self._service.model_name,
            "is_admin": caller.is_admin,
            "capacity": capacity,
            "keeps_states": self._service.keeps_states,
            "replicas": msgspec.to_builtins(self._service.engine_client.replicas or []),
            "history": self._service.history.view(track, reports),
        } | visible(snapshot, texts if caller.is_admin else None, named)

    async def _latest(self) -> tuple[Snapshot, list[str]]:
        now = time.monotonic()
        if self._look is None or (self._look.done() and now - self._began > MIN_INTERVAL_S):
            self._began = now
            self._look = asyncio.create_task(self._fetch())
        # Shielded: a caller that goes away must not take the look away from the others.
        return await asyncio.shield(self._look)

    async def _fetch(self) -> tuple[Snapshot, list[str]]:
        service, engine = self._service, self._service.engine
        wants_text = service.settings.admin_key is not None and engine.tokenizer is not None
        try:
            async with asyncio.timeout(PATIENCE_S):
                snapshot = await engine.inspect(TOKENS_PER_NODE if wants_text else 0)
        except TimeoutError as error:
            raise ApiError(
                503, f"the engine has not answered for {PATIENCE_S:g} s", type="server_error", code="engine_busy"
            ) from error
        tokenizer = engine.tokenizer
        if not wants_text or tokenizer is None:
            return snapshot, []
        decode = tokenizer.decode
        texts = await service.render.run(
            lambda: [decode(node.token_ids, skip_special_tokens=False) for node in snapshot.nodes]
        )
        return snapshot, texts


def visible(snapshot: Snapshot, texts: list[str] | None, named: Collection[str]) -> dict[str, Any]:
    """A snapshot as a JSON object for one caller. ``texts``: of the nodes, for an admin; None: for anyone else, who
    sees neither texts nor token ids, and only those request ids that it can name."""
    result = msgspec.to_builtins(snapshot)
    for index, node in enumerate(result["nodes"]):
        del node["token_ids"]
        node["text"] = texts[index] if texts else None
    for request in result["requests"]:
        name = request["request_id"].rpartition("/")[0]  # without the number that the engine's side adds
        request["is_own"] = name in named
        request["request_id"] = name if texts is not None or name in named else None
    return result
