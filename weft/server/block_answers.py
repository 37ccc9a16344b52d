"""Responses in content blocks, for the responses and the messages API, streamed or whole.

Job: read a call's stream, and have a protocol write what becomes of the blocks. Does not know: the shape of events.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from weft.engine.response_stream import PromptDelta
from weft.server.blocks import BlockEvent, Blocks
from weft.server.chat_completions import Chat
from weft.server.errors import ApiError
from weft.server.sse import JsonResponse, LastEvent, StreamResponse


class BlockAnswer(ABC):
    """The response to one call in one protocol.

    Attributes:
        chat: the call.
        blocks: of the answer, so far.
    """

    def __init__(self, chat: Chat) -> None:
        self.chat, self.blocks = chat, Blocks()
        self._has_begun = False

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The body, once all blocks are done."""

    @abstractmethod
    def first_events(self) -> Iterator[bytes]:
        """Encoded events before the first block's."""

    @abstractmethod
    def block_events(self, event: BlockEvent) -> Iterator[bytes]:
        """Encoded events of something that happened to a block."""

    @abstractmethod
    def last_events(self) -> Iterator[bytes]:
        """Encoded events after the last block's."""

    def response(
        self, *, stream: bool, error_events: Callable[[ApiError], bytes], timeout_s: float
    ) -> JsonResponse | StreamResponse:
        """The response to the caller. ``error_events``: how a stream ends that cannot go on."""
        call = self.chat.call
        if stream:
            pushed = (call.stream, self.content)
            return StreamResponse(self.events(), call.close, timeout_s, error_events, call.headers, pushed)
        return JsonResponse(self.body, call.close, timeout_s, headers=call.headers)

    async def body(self) -> dict[str, Any]:
        async for deltas in self.chat.call.stream:
            for parts in self.chat.parts(deltas):
                list(self.blocks.feed(parts))
        list(self.blocks.finish())
        return self.whole()

    async def events(self) -> AsyncIterator[bytes]:
        stream, content = self.chat.call.stream, b""
        async for deltas in stream:
            content = self.content(deltas)
            if content and not stream.is_delivered:
                yield content
        ends = (encoded for event in self.blocks.finish() for encoded in self.block_events(event))
        yield LastEvent(b"".join((content, *ends, *self.last_events())))

    def content(self, deltas: list[PromptDelta]) -> bytes:
        """The events of some deltas, perhaps none."""
        encoded: list[bytes] = []
        if not self._has_begun:
            self._has_begun = True
            encoded += self.first_events()
        for parts in self.chat.parts(deltas):
            for event in self.blocks.feed(parts):
                encoded += self.block_events(event)
        return b"".join(encoded)
