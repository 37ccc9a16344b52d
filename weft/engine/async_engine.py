"""The engine as the server sees it: requests in, streams of text out, all in one event loop.

Job: hand validated requests to the engine process, detokenize its results, end requests at stop strings, abort requests
that nobody reads, and fail every open stream after the engine died. Owns: the open streams. Does not know: HTTP, or
processes (a ``Link`` carries the messages).
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from weft.engine import wire
from weft.engine.chat_prompts import ChatPrompts
from weft.engine.input_processor import InputProcessor
from weft.engine.output_processor import OutputStream
from weft.engine.prompts import PreparedPrompt
from weft.engine.response_stream import ResponseStream
from weft.errors import ConfigError, EngineDeadError, RequestError, UnavailableError, WeftError
from weft.request import Request
from weft.sampling_params import SamplingParams
from weft.stats import EngineStats
from weft.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Link(Protocol):
    """Carries messages to an engine. It calls ``AsyncEngine.receive`` and ``AsyncEngine.die`` in return."""

    def send(self, message: wire.ToEngine) -> None: ...


class TokenTimes(Protocol):
    """Records the times of tokens, in seconds."""

    def first_token(self, seconds: float) -> None:
        """Record the first token of a request, and the time since its arrival."""

    def next_tokens(self, seconds: float, count: int) -> None:
        """Record a further token of ``count`` requests, and the time since their token before."""

    def iteration(self, num_tokens: int) -> None:
        """Record the tokens of a step: sampled tokens, and the tokens of finished prompts."""


class AsyncEngine:
    """The open streams of one engine process.

    Args:
        link: sends messages to the engine.
        inputs: validates and resolves requests for this model.
        tokenizer: the tokenizer; None: token ids only.
        inspection_numbers: numbers of ``Inspect`` and ``Control`` messages; None: from 0 on. Each of several API
            processes has numbers of its own.
    """

    def __init__(
        self,
        link: Link,
        inputs: InputProcessor,
        tokenizer: Tokenizer | None,
        token_times: Sequence[TokenTimes] = (),
        inspection_numbers: Iterator[int] | None = None,
    ) -> None:
        self.inputs = inputs
        self.tokenizer = tokenizer
        self.chats = ChatPrompts(tokenizer) if tokenizer is not None else None
        self.stats = EngineStats()
        self._link = link
        self._token_times = token_times
        self._streams: dict[str, ResponseStream] = {}
        self._owners: dict[str, tuple[ResponseStream, int, Request]] = {}
        self._updated: dict[ResponseStream, None] = {}  # streams with new tokens in this turn of the event loop
        self._death: EngineDeadError | None = None
        self._inspection_numbers = itertools.count() if inspection_numbers is None else inspection_numbers
        self._inspections: dict[int, asyncio.Future[wire.Inspected]] = {}
        self._pending_resets: list[asyncio.Future[bool]] = []
        self._controls: dict[int, asyncio.Future[wire.Controlled]] = {}
        self._unavailable = ""

    @property
    def num_open(self) -> int:
        """Number of streams that are still read."""
        return len(self._streams)

    def stream(self, request_id: str) -> ResponseStream | None:
        return self._streams.get(request_id)

    def submit(
        self,
        request_id: str,
        prompts: Sequence[PreparedPrompt],
        params: SamplingParams,
        *,
        priority: int = 0,
        grammar: str | None = None,
        caller: str = "",
    ) -> ResponseStream:
        """Start a call. If one of its prompts is refused, none is started.

        Args:
            grammar, caller: see ``InputProcessor.resolve`` and ``make_requests``.

        Raises:
            RequestError: the id is in use, or the parameters do not fit the model.
            EngineDeadError: the engine has died.
            UnavailableError: the engine is asleep, or has no valid weights.
        """
        if self._death is not None:
            raise self._death
        if self._unavailable:
            raise UnavailableError(self._unavailable)
        if request_id in self._streams:
            raise RequestError(f"request id {request_id!r} is already in use; choose another", "request_id")
        resolved = self.inputs.sampling.resolve(params, grammar)
        outputs = []
        for prompt in prompts:
            requests = self.inputs.make_requests(request_id, prompt, params, resolved, priority, caller=caller)
            outputs.append(OutputStream(request_id, prompt, requests, params, self.tokenizer))
        stream = self._streams[request_id] = ResponseStream(self, request_id, outputs)
        for index, output in enumerate(outputs):
            for request in output.requests:
                self._owners[request.request_id] = (stream, index, request)
                self._link.send(request.spec)
        return stream

    def receive(self, outputs: wire.Outputs) -> None:
        """Apply the changes of one step."""
        self.stats = outputs.stats
        now = time.monotonic()
        previous: dict[float, int] = {}  # time of a message -> requests whose previous token came in it
        num_tokens = 0
        updated: dict[ResponseStream, None] = {}
        for update in outputs.updates:
            owner = self._owners.get(update.request_id)
            if owner is None:
                continue  # its reader is gone, or a stop string ended it
            stream, index, request = owner
            if update.finish_reason == "unavailable":
                del self._owners[update.request_id]
                stream.fail(UnavailableError(str(update.stop_reason)))
                continue
            updated[stream] = None
            try:
                update.apply(request)
                if update.token_ids:
                    num_tokens += len(update.token_ids) + self._note_time(request, now, previous)
                stop = stream.take(index, request)
            except Exception:
                logger.exception(
                    "%s: its tokens could not be turned into text; it ends with an error", update.request_id
                )
                self.give_up(request)
                stream.touch(index)
            else:
                if stop is not None:
                    self._stop(request, stop)
            if request.finish_reason is not None:
                self._owners.pop(request.request_id, None)
        if updated and not self._updated:  # together, since each write is a system call
            asyncio.get_running_loop().call_soon(self._notify)
        self._updated |= updated
        for listener in self._token_times if num_tokens else ():
            listener.iteration(num_tokens)
            for moment, count in previous.items():
                listener.next_tokens(now - moment, count)

    def _notify(self) -> None:
        updated, self._updated = self._updated, {}
        for stream in updated:
            stream.notify()

    def _note_time(self, request: Request, now: float, previous: dict[float, int]) -> int:
        """Record the times of a request's new tokens. Returns the number of prompt tokens that they complete."""
        times = request.times
        before, times.last_token = times.last_token, now
        if before is not None:
            previous[before] = previous.get(before, 0) + 1
            return 0
        for listener in self._token_times:
            listener.first_token((times.first_token or now) - times.arrival)
        return request.num_prompt_tokens

    def _stop(self, request: Request, stop: str) -> None:
        """End a request at a stop string. The engine may not know yet."""
        if request.finish_reason is None:
            self._link.send(wire.FinishRequests([request.request_id], "stop"))
            request.times.finished = time.monotonic()
        request.finish_reason, request.stop_reason = "stop", stop

    def give_up(self, request: Request) -> None:
        """End one completion with an error. The others of its call go on."""
        if self._owners.pop(request.request_id, None) is not None and request.finish_reason is None:
            self._link.send(wire.FinishRequests([request.request_id]))
        request.finish_reason = "error"

    def drop(self, stream: ResponseStream) -> None:
        """Drop a stream that nobody reads any more, and abort its unfinished requests."""
        if self._streams.get(stream.request_id) is not stream:
            return  # dropped already; another stream may have its id by now
        del self._streams[stream.request_id]
        unfinished = [r.request_id for r in stream.requests if self._owners.pop(r.request_id, None) is not None]
        if unfinished and self._death is None:
            self._link.send(wire.FinishRequests(unfinished))

    async def inspect(self, tokens_per_node: int = 0, replica: int | None = None) -> wire.Inspected:
        """Inspect the engine between two of its steps; see ``wire.Inspect``.

        Raises:
            EngineDeadError: the engine has died.
        """
        if self._death is not None:
            raise self._death
        number = next(self._inspection_numbers)
        pending = self._inspections[number] = asyncio.get_running_loop().create_future()
        self._link.send(wire.Inspect(number, tokens_per_node, replica))
        try:
            return await pending
        finally:
            del self._inspections[number]

    def on_inspected(self, message: wire.Inspected) -> None:
        """Pass on the answer to an inspection, unless the caller is gone."""
        pending = self._inspections.get(message.number)
        if pending is not None and not pending.done():
            pending.set_result(message)

    async def reset_prefix_cache(self) -> bool:
        """Drop every cached prefix. Returns False, and changes nothing, while requests run. Raises EngineDeadError."""
        if self._death is not None:
            raise self._death
        pending: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._pending_resets.append(pending)
        self._link.send(wire.ResetPrefixCache())
        return await pending

    def on_prefix_cache_reset(self, message: wire.PrefixCacheReset) -> None:
        """Pass on the answer to the oldest reset."""
        pending = self._pending_resets.pop(0)
        if not pending.done():
            pending.set_result(message.done)

    async def control(self, action: str, mode: str = "wait", **arguments: Any) -> wire.Controlled:
        """Have the engine carry out a command; see ``wire.Control``.

        Raises:
            ConfigError: the command was refused or failed. The message says whether the old weights are served on.
            EngineDeadError: the engine has died.
        """
        if self._death is not None:
            raise self._death
        number = next(self._inspection_numbers)
        pending = self._controls[number] = asyncio.get_running_loop().create_future()
        self._link.send(wire.Control(number, action, mode, arguments))
        try:
            answer = await pending
        finally:
            del self._controls[number]
        if answer.error:
            raise ConfigError(answer.error)
        return answer

    def on_controlled(self, message: wire.Controlled) -> None:
        """Pass on the answer to a command, and refuse or accept requests from now on."""
        self._unavailable = message.unavailable
        pending = self._controls.get(message.number)
        if pending is not None and not pending.done():
            pending.set_result(message)

    def fail_later_than(self, moment: float, error: WeftError) -> None:
        """Fail the streams that were submitted after ``moment`` (of ``time.monotonic()``) and have no token yet."""
        for stream in self._streams.values():
            request = stream.requests[0]
            if request.arrival_time > moment and request.times.last_token is None:
                stream.fail(error)

    def die(self, reason: str) -> None:
        """End every open stream with an error, and refuse new ones, since the engine is gone."""
        self._death = EngineDeadError(reason)
        for stream in self._streams.values():
            stream.fail(self._death)
        waiting: list[asyncio.Future[Any]] = [
            *self._inspections.values(),
            *self._pending_resets,
            *self._controls.values(),
        ]
        for pending in waiting:
            if not pending.done():
                pending.set_exception(self._death)
        self._pending_resets.clear()
