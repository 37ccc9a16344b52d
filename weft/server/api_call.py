"""One API call from its acceptance to its end.

Job: admit, submit, and let go; count the usage; the ``weft`` extension field. Owns: a call's bookkeeping, so that every
endpoint does it alike. Does not know: the shape of requests and responses.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import getrandbits
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from weft.engine.async_engine import AsyncEngine
from weft.engine.chat_prompts import ChatPrompt
from weft.engine.output_processor import CompletionDelta, OutputStream
from weft.engine.prompts import PreparedPrompt
from weft.engine.response_stream import ResponseStream
from weft.errors import RequestError
from weft.outputs import CompletionOutput
from weft.sampling_params import SamplingParams
from weft.server.chat import need_tokenizer, opens_reasoning
from weft.server.client import Client
from weft.server.errors import ApiError
from weft.server.large_bodies import is_large
from weft.server.metrics import Metrics
from weft.server.protocol import Body, BodyReader, SamplingFields
from weft.server.requestlog import RequestLog
from weft.server.service import Service
from weft.server.settings import ServerSettings
from weft.server.structured import Constraint, WholeGrammar, end_of_reasoning

if TYPE_CHECKING:
    from weft.server.tracing import Tracer


@dataclass(frozen=True, slots=True)
class Context:
    """Objects that every handler works with."""

    service: Service
    settings: ServerSettings
    bodies: BodyReader
    metrics: Metrics
    log: RequestLog
    tracer: Tracer | None = None


@dataclass(slots=True)
class ApiCall:
    """A running call.

    Attributes:
        id: of the response, such as ``chatcmpl-…``.
        model: name of the model in the response.
        engine: the one that serves it.
        stream: the completions.
        prompts: as submitted.
        params: how they are sampled.
        operation: what OpenTelemetry calls it, ``chat`` or ``text_completion``.
        created: Unix time.
    """

    id: str
    model: str
    engine: AsyncEngine
    stream: ResponseStream
    prompts: Sequence[PreparedPrompt]
    params: SamplingParams
    operation: str
    context: Context
    client: Client
    leave: Callable[[], None]
    created: int = field(default_factory=lambda: int(time.time()))
    _is_closed: bool = False

    def close(self) -> None:
        """The response has ended, well or not."""
        if self._is_closed:
            return
        self._is_closed = True
        self.stream.close()
        self.leave()
        self.context.metrics.observe(self.stream)
        self.context.log.ended(self.id, self.stream, self.client)
        if self.context.tracer is not None:
            trace = self.client.trace
            self.context.tracer.ended(self.operation, self.model, self.id, self.params, self.stream, trace)

    @property
    def headers(self) -> dict[str, str]:
        return {"X-Request-Id": self.id}

    def check_error(self, end: CompletionDelta | CompletionOutput) -> None:
        """Raises ApiError if a completion ended because its options leave no token, or the model or its step broke."""
        if end.finish_reason != "error":
            return
        if end.stop_reason is not None:
            raise ApiError(400, str(end.stop_reason))
        raise ApiError(500, "the model computed NaN or its step broke", type="server_error", code="model_error")

    def usage(self) -> dict[str, Any]:
        """Tokens so far. Prompt tokens count once per prompt, whatever ``n`` is, with those of images and videos."""
        prompt = sum(len(p.token_ids) for p in self.prompts)
        completion = sum(output.num_output_tokens for output in self.stream.outputs)
        cached = sum(output.requests[0].num_cached_tokens or 0 for output in self.stream.outputs)
        image = sum(p.num_media_tokens for p in self.prompts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached} | ({"image_tokens": image} if image else {}),
        }

    def extension(self) -> dict[str, Any]:
        """The ``weft`` field: what the cache gave and why not more, and where the time went, per prompt."""
        return {"prompts": [_prompt_report(output) for output in self.stream.outputs]}


def _prompt_report(output: OutputStream) -> dict[str, Any]:
    result = output.output()
    report = result.cache_report
    metrics = result.metrics
    return {
        "cache": None if report is None else str(report),
        "cached_tokens": result.num_cached_tokens,
        "weight_version": result.weight_version,
        "weight_spans": [completion.weight_spans for completion in result.outputs],
        "num_preemptions": metrics.num_preemptions,
        "time_in_queue_s": _rounded(metrics.time_in_queue),
        "time_to_first_token_s": _rounded(metrics.time_to_first_token),
        "e2e_latency_s": _rounded(metrics.e2e_latency),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def served_names(context: Context) -> list[str]:
    """The names by which callers may ask for the model; the first is its own."""
    return [context.service.model_name, *context.settings.model_aliases]


def check_model(context: Context, name: str | None) -> str:
    """The model's name in the answer: the one asked for. Raises ApiError if it is not served."""
    names = served_names(context)
    if name is None or name in names:
        return name or names[0]
    raise ApiError(
        404,
        f"model {name[:200]!r} is not served here; this server has {', '.join(map(repr, names))}",
        type="invalid_request_error",
        param="model",
        code="model_not_found",
    )


async def read_request(
    context: Context, path: str, body: bytes, kind: type[Body], client: Client
) -> tuple[Body, list[ChatPrompt] | None]:
    """Read the request of a body. A large request is returned without its prompts, and its prompts separately.

    Raises:
        RequestError: the body is not valid.
        ApiError: the queue is full, or there is no engine.
    """
    if not _is_for_workers(context, body):
        return context.bodies.read(body, kind), None
    leave = context.service.admission.enter(1)
    try:
        found = await context.service.large_bodies.read(path, body, kind, context.bodies, client.queue)
    finally:
        leave()
    return (context.bodies.read(body, kind), None) if found is None else found


async def respond_to_large(context: Context, path: str, body: bytes, client: Client) -> Response | None:
    """The response to a large body, if a worker can make it as a whole. Raises RequestError or ApiError."""
    if not _is_for_workers(context, body):
        return None
    model, content = await context.service.large_bodies.respond(path, body, context.bodies, client.queue)
    if not content:
        return None
    check_model(context, model)
    return Response(content, media_type="application/json")


def _is_for_workers(context: Context, body: bytes) -> bool:
    return is_large(body) and context.service.engine.tokenizer is not None


async def submit_call(
    context: Context,
    client: Client,
    request: SamplingFields,
    prefix: str,
    params: SamplingParams,
    num_prompts: int,
    prepare: Callable[[AsyncEngine], Awaitable[Sequence[PreparedPrompt]]],
    *,
    model: str,
    constraint: Constraint | WholeGrammar | None = None,
    operation: str = "chat",
) -> ApiCall:
    """Admit a call, wait for its prompts and submit it.

    ``prepare`` makes the prompts; it is called once the call is admitted.

    Raises:
        RequestError, ApiError: it is refused; then nothing of it is left.
    """
    service = context.service
    engine = service.engine  # from here on the call belongs to this engine, also if the server begins to drain
    leave = service.admission.enter(num_prompts * params.n)
    try:
        prompts = await prepare(engine)
        call_id = f"{prefix}-{_check_id(request.request_id)}"
        grammar = None
        if constraint is not None:
            in_reasoning = opens_reasoning(prompts[0])
            grammar = constraint.grammar(end_of_reasoning(need_tokenizer(engine)) if in_reasoning else None)
            await service.grammars.check(grammar, constraint.param)
        stream = engine.submit(
            call_id, prompts, params, priority=request.priority or 0, grammar=grammar, caller=client.queue
        )
    except BaseException:
        leave()
        raise
    return ApiCall(call_id, model, engine, stream, prompts, params, operation, context, client, leave)


def _check_id(request_id: str | None) -> str:
    if request_id is None:
        return f"{getrandbits(128):032x}"  # a call to the operating system costs more
    if not request_id or len(request_id) > 128 or not request_id.isascii() or not request_id.isprintable():
        raise RequestError("request_id must be 1 to 128 printable ASCII characters", "request_id")
    return request_id
