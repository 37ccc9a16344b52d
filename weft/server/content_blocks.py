"""Responses in content blocks (reasoning, text, tool calls), for the responses and the messages API.

Job: turn parts into blocks that open, grow and close. A protocol writes the events.
Owns: their order and numbers. Does not know: the shape of events.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from weft.engine.response_stream import PromptDelta
from weft.server.chat_completions import Chat
from weft.server.output_parser import Parts, ToolCall
from weft.server.response_builder import ResponseBuilder

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    """A block of an answer. A call is always whole.

    Attributes:
        text: the reasoning, the text, or the arguments of the call.
        logprobs: entries of the text's tokens.
        is_cut_off: True if more would have followed.
    """

    index: int
    kind: Kind
    text: str = ""
    call: ToolCall | None = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    is_cut_off: bool = False


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """Something happened to a block: it opened, it got ``delta`` (with ``logprobs``), or it closed."""

    what: Literal["open", "delta", "close"]
    block: Block
    delta: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Blocks:
    """The blocks of one answer."""

    done: list[Block] = field(default_factory=list)
    _current: Block | None = None

    def feed(self, parts: Parts) -> Iterator[BlockEvent]:
        """Apply new parts and yield the events that follow."""
        if parts.reasoning:
            yield from self._grow("reasoning", parts.reasoning)
        if parts.content:
            yield from self._grow("text", parts.content, parts.logprobs)
        for call in parts.calls or ():
            yield from self._open("call", call)
            yield from self._delta(call.arguments)

    def finish(self, *, is_cut_off: bool) -> Iterator[BlockEvent]:
        """The answer has ended (``is_cut_off``: by ``max_tokens``); one without anything in it is an empty text."""
        if self._current is None:
            yield from self._open("text", None)
        assert self._current is not None
        self._current.is_cut_off = is_cut_off and self._current.call is None
        yield from self._close()

    def _grow(self, kind: Kind, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[BlockEvent]:
        if self._current is None or self._current.kind != kind:
            yield from self._open(kind, None)
        yield from self._delta(text, logprobs)

    def _open(self, kind: Kind, call: ToolCall | None) -> Iterator[BlockEvent]:
        yield from self._close()
        self._current = Block(len(self.done), kind, call=call)
        yield BlockEvent("open", self._current)

    def _delta(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[BlockEvent]:
        assert self._current is not None
        self._current.text += text
        self._current.logprobs += logprobs
        yield BlockEvent("delta", self._current, text, list(logprobs))

    def _close(self) -> Iterator[BlockEvent]:
        if self._current is not None:
            self.done.append(self._current)
            yield BlockEvent("close", self._current)
            self._current = None


class BlockResponseBuilder(ResponseBuilder):
    """The response to one chat in a protocol of blocks."""

    def __init__(self, chat: Chat) -> None:
        super().__init__(chat.call)
        self.chat, self.blocks = chat, Blocks()
        self._has_begun = False

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The body, once all blocks are done."""

    @abstractmethod
    def opening(self) -> Iterator[bytes]:
        """Encoded events before the first block's."""

    @abstractmethod
    def block_events(self, event: BlockEvent) -> Iterator[bytes]:
        """Encoded events of something that happened to a block."""

    @abstractmethod
    def closing(self) -> Iterator[bytes]:
        """Encoded events after the last block's."""

    async def body(self) -> dict[str, Any]:
        async for deltas in self.call.stream:
            for parts in self.chat.parts(deltas):
                list(self.blocks.feed(parts))
        list(self._finish())
        return self.whole()

    def content(self, deltas: list[PromptDelta]) -> bytes:
        encoded: list[bytes] = []
        if not self._has_begun:
            self._has_begun = True
            encoded += self.opening()
        for parts in self.chat.parts(deltas):
            for event in self.blocks.feed(parts):
                encoded += self.block_events(event)
        return b"".join(encoded)

    def last_events(self) -> bytes:
        ends = (encoded for event in self._finish() for encoded in self.block_events(event))
        return b"".join((*ends, *self.closing()))

    def _finish(self) -> Iterator[BlockEvent]:
        return self.blocks.finish(is_cut_off=self.chat.finish_reason == "length")
