"""The stream of one call's results, for one reader.

Job: turn new tokens into deltas when the reader asks, wake the reader, or push deltas to it. Does not know: the source
of the tokens.

A stream has no queue. Tokens that arrive while the reader is slow are added to the next delta, so a reader that never
reads costs only the tokens of its own answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from weft.engine.output_processor import CompletionDelta, OutputStream
from weft.errors import WeftError
from weft.outputs import RequestOutput
from weft.request import Request

PromptDelta = tuple[int, CompletionDelta]
"""The number of a prompt within its call, and the new part of one of its completions."""

Push = Callable[[list[PromptDelta]], bool]
"""Accepts deltas at once, without the reader's task. Returns False if it cannot accept them now."""


class StreamOwner(Protocol):
    """The part of ``AsyncEngine`` that a stream calls."""

    def drop(self, stream: ResponseStream) -> None:
        """Abort what still runs of the stream, and drop the stream."""

    def give_up(self, request: Request) -> None:
        """Abort one request whose tokens have no text."""


class ResponseStream:
    """The completions of one call, which may have several prompts. One task reads them.

    Example:
        >>> async with engine.submit("id", prompts, params) as stream:
        ...     async for deltas in stream:
        ...         ...

    Attributes:
        request_id: the call's id.
        outputs: one per prompt.
        is_delivered: the reader has received everything.
        push: while the reader waits, it accepts new deltas without an end as soon as a step was received. The reader
            gets its exceptions.
    """

    push: Push | None = None

    def __init__(self, engine: StreamOwner, request_id: str, outputs: list[OutputStream]) -> None:
        self.request_id = request_id
        self.outputs = outputs
        self._engine = engine
        self._waiter: asyncio.Future[None] | None = None
        self._has_updates = self.is_delivered = False
        self._changed: set[int] = set()
        self._undelivered: list[PromptDelta] = []  # deltas that could not be pushed
        self._error: WeftError | None = None
        self._push_error: Exception | None = None

    @property
    def requests(self) -> list[Request]:
        return [request for output in self.outputs for request in output.requests]

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)

    def __aiter__(self) -> ResponseStream:
        return self

    async def __anext__(self) -> list[PromptDelta]:
        """Wait for something new, until every completion has ended.

        Raises:
            EngineDeadError: the engine died before the end.
            EngineFrozenError: the engine froze before it saw the call.
        """
        while not self.is_delivered:
            if not self._undelivered and not self._has_updates:
                await self._wait()
            deltas, self._undelivered = self._undelivered, []
            if self._has_updates:
                deltas += self._new_deltas()
            if _has_end(deltas):
                self.is_delivered = self.finished
            if deltas:
                return deltas
        raise StopAsyncIteration

    def _new_deltas(self) -> list[PromptDelta]:
        """The text since the last call."""
        self._has_updates = False
        changed = sorted(self._changed) if len(self._changed) > 1 else list(self._changed)
        self._changed.clear()
        self._catch_up(changed)
        deltas: list[PromptDelta] = []
        for index in changed:
            for delta in self.outputs[index].deltas():
                deltas.append((index, delta))  # a comprehension costs a call, and this runs for every token
        return deltas

    async def results(self) -> list[RequestOutput]:
        """Wait for the end of every completion. Raises as above."""
        while not self.finished:
            if not self._has_updates:
                await self._wait()
            self._has_updates = False
        return self.snapshot()

    async def _wait(self) -> None:
        """Wait for something new. Tokens that arrived before the engine died are still delivered."""
        if self._error is None and self._push_error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._push_error is not None:
            raise self._push_error
        if not self._has_updates and not self._undelivered and self._error is not None:
            raise self._error

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def snapshot(self) -> list[RequestOutput]:
        self._catch_up(range(len(self.outputs)))
        return [output.output() for output in self.outputs]

    def _catch_up(self, changed: Iterable[int]) -> None:
        """Detokenize new tokens. A completion for which that fails ends with an error; the others go on."""
        for index in changed:
            for request in self.outputs[index].catch_up():
                self._engine.give_up(request)

    def take(self, index: int, request: Request) -> str | None:
        """Note new tokens of a completion of prompt ``index``. Returns the stop string that ends it."""
        stop = self.outputs[index].take(request)
        self.touch(index)
        return stop

    def touch(self, index: int) -> None:
        """Note that prompt ``index`` has something new. Call ``notify`` afterwards."""
        self._changed.add(index)
        self._has_updates = True

    def notify(self) -> None:
        """Deliver new deltas to the reader, if it waits."""
        if self._waiter is not None and self._has_updates and not (self.push is not None and self._pushed(self.push)):
            self._wake()

    def _pushed(self, push: Push) -> bool:
        deltas = self._new_deltas()
        try:
            if not _has_end(deltas) and (not deltas or push(deltas)):
                return True
        except Exception as error:
            self._push_error = error
        self._undelivered = deltas
        return False

    def fail(self, error: WeftError) -> None:
        """End with this error after everything received was delivered."""
        self._error = error
        self._wake()

    def abort(self) -> None:
        """End all unfinished completions with finish reason ``"abort"``. The reader gets their tokens so far."""
        self._engine.drop(self)
        for index, output in enumerate(self.outputs):
            for request in output.requests:
                if request.finish_reason is None:
                    request.end("abort")
                    self.take(index, request)
        self.notify()

    def close(self) -> None:
        """Stop reading: abort all unfinished completions. May be called again."""
        self._engine.drop(self)

    async def __aenter__(self) -> ResponseStream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.close()


def _has_end(deltas: list[PromptDelta]) -> bool:
    for _, delta in deltas:  # noqa: SIM110  # a generator costs more, and this runs for every token
        if delta.finish_reason is not None:
            return True
    return False
