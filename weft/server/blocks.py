"""Content blocks of an answer: reasoning, text, tool calls.

Job: from parts, as they come, to blocks that open, grow and close. Owns: their order and numbers. Does not know: how
the messages and the responses API write them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from weft.server.answers import Parts, ToolCall

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    """``text`` is the reasoning, the text, or the arguments of the call; ``logprobs``: of the text's tokens."""

    index: int
    kind: Kind
    text: str = ""
    call: ToolCall | None = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)


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
        """What the new parts do."""
        if parts.reasoning:
            yield from self._grow("reasoning", parts.reasoning)
        if parts.content:
            yield from self._grow("text", parts.content, parts.logprobs)
        for call in parts.calls or ():
            yield from self._open("call", call)
            yield from self._delta(call.arguments)

    def finish(self) -> Iterator[BlockEvent]:
        """The answer has ended; one without anything in it is an empty text."""
        if self._current is None and not self.done:
            yield from self._open("text", None)
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
