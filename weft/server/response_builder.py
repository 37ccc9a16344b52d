"""Base classes that turn the stream of a call into a response, whole or as events."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from typing import Any

from weft.engine.response_stream import PromptDelta
from weft.server.api_call import ApiCall
from weft.server.errors import ApiError
from weft.server.protocol import SamplingFields, StreamOptions
from weft.server.sse import DONE, ChunkEvents, JsonResponse, LastEvent, StreamResponse, data_event, openai_error_events


class ResponseBuilder(ABC):
    """The response to one call."""

    def __init__(self, call: ApiCall) -> None:
        self.call = call

    @abstractmethod
    async def body(self) -> dict[str, Any]:
        """The whole response, once the call's stream has ended."""

    def first_events(self) -> Iterator[bytes]:
        return iter(())

    @abstractmethod
    def content(self, deltas: list[PromptDelta]) -> bytes:
        """The events of some deltas, perhaps none."""

    @abstractmethod
    def last_events(self) -> bytes:
        """The events after the last delta's."""

    def error_events(self, error: ApiError) -> bytes:
        """The events that end a failed stream."""
        return openai_error_events(error)

    async def events(self) -> AsyncIterator[bytes]:
        for event in self.first_events():
            yield event
        stream, content = self.call.stream, b""
        async for deltas in stream:
            content = self.content(deltas)
            if content and not stream.is_delivered:
                yield content
        yield LastEvent(content + self.last_events())

    def response(self, stream: bool | None) -> JsonResponse | StreamResponse:
        call, timeout_s = self.call, self.call.context.settings.request_timeout_s
        if stream:
            pushed = (call.stream, self.content)
            return StreamResponse(self.events(), call.close, timeout_s, self.error_events, call.headers, pushed)
        return JsonResponse(self.body, call.close, timeout_s, headers=call.headers)


class OpenAIResponseBuilder(ResponseBuilder):
    """Base class of chat completions and completions.

    Args:
        kind, chunk_kind: ``object`` of a body and of a chunk.

    Attributes:
        chunks: makes the events of choices.
        usage_always: every chunk has the usage.
    """

    def __init__(self, call: ApiCall, request: SamplingFields, kind: str, chunk_kind: str) -> None:
        super().__init__(call)
        self._kind, self._chunk_kind = kind, chunk_kind
        self.chunks = ChunkEvents(self._head(chunk_kind))
        forced = call.context.settings.enable_force_include_usage
        options = request.stream_options or StreamOptions()
        self._usage_at_end = forced or bool(options.include_usage)
        self.usage_always = forced or bool(options.include_usage and options.continuous_usage_stats)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.call.id, "object": kind, "created": self.call.created, "model": self.call.model}

    def usage(self) -> dict[str, Any]:
        return self.call.usage()

    def whole(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """The whole body. ``more``: fields besides those that both kinds have."""
        head = self._head(self._kind) | {"choices": choices, "usage": self.usage()}
        return head | more | {"weft": self.call.extension()}

    def last_events(self) -> bytes:
        if not self._usage_at_end:
            return DONE
        last = self._head(self._chunk_kind) | {"choices": [], "usage": self.usage(), "weft": self.call.extension()}
        return data_event(last) + DONE
