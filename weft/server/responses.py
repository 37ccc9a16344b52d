"""``/v1/responses``: the newer OpenAI protocol, for text, images and function tools. Nothing is stored.

Job: translate a request into a chat completion's, and the answer's blocks into this protocol's items and events.
Owns: both translations. Does not know: generation.
"""

import uuid
from collections.abc import Iterator
from typing import Any

import msgspec

from weft.errors import RequestError
from weft.server.api_call import Context, read_request
from weft.server.chat_completions import Chat, start_chat
from weft.server.client import Client
from weft.server.content_blocks import Block, BlockEvent, BlockResponseBuilder
from weft.server.errors import ApiError
from weft.server.protocol import ChatCompletionRequest, ExtraFields, ResponseFormat
from weft.server.sse import JsonResponse, StreamResponse, named_event


class TextOptions(msgspec.Struct):
    """Form of the text; ``format`` as OpenAI's ``response_format`` without its inner object."""

    format: dict[str, Any] | None = None


class ReasoningOptions(msgspec.Struct):
    """The effort of reasoning. The reasoning itself is returned, whatever ``summary`` says."""

    effort: str | None = None
    summary: str | None = None


class ResponsesStreamOptions(msgspec.Struct):
    """``include_obfuscation``: padding against observers of the connection."""

    include_obfuscation: bool | None = None


class ResponsesRequest(ExtraFields, kw_only=True):
    """Body of ``/v1/responses``."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    truncation: str | None = None
    previous_response_id: str | None = None
    background: bool | None = None


async def responses(context: Context, body: bytes, client: Client) -> JsonResponse | StreamResponse:
    """Handle one request. Raises RequestError or ApiError."""
    request, read = await read_request(context, "/v1/responses", body, ResponsesRequest, client)
    chat = await start_chat(context, to_chat(request), client, read, prefix="resp")
    return ResponsesBuilder(chat, request).response(request.stream)


def to_chat(request: ResponsesRequest) -> ChatCompletionRequest:
    """The same request as a chat completion. Raises RequestError."""
    _check(request)
    wants_logprobs = _LOGPROBS in (request.include or ()) or request.top_logprobs is not None
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    messages += _messages(request.input)
    return ChatCompletionRequest(
        messages=messages,
        model=request.model,
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        stream=request.stream,
        tools=[_tool(tool, index) for index, tool in enumerate(request.tools or ())] or None,
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_format((request.text or TextOptions()).format),
        reasoning_effort=(request.reasoning or ReasoningOptions()).effort,
        logprobs=wants_logprobs or None,
        top_logprobs=request.top_logprobs,
        **{name: getattr(request, name) for name in ExtraFields.__struct_fields__},
    )


_LOGPROBS = "message.output_text.logprobs"
_INCLUDES = {
    _LOGPROBS,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
}
"""Values accepted in ``include``. Except for the log probabilities they are about OpenAI's own tools and storage, of
which an answer has none, and about the request's own images. Reasoning is returned as it is."""


def _check(request: ResponsesRequest) -> None:
    """Raises RequestError for what would change the answer and is not served."""
    for name in ("previous_response_id", "background"):
        if getattr(request, name):
            raise RequestError(f"{name} needs stored responses, which this server does not keep; leave it out", name)
    if request.truncation not in (None, "disabled"):
        raise RequestError(f"truncation={request.truncation!r} is not supported; shorten the input", "truncation")
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        raise RequestError("stream_options.include_obfuscation is not supported; leave it out", "stream_options")
    unknown = [name for name in request.include or () if name not in _INCLUDES]
    if unknown:
        raise RequestError(f"include={unknown[0]!r} is not known; allowed: {', '.join(sorted(_INCLUDES))}", "include")


def _messages(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(given):
        _add_item(messages, item, f"input[{index}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    """Reasoning and calls belong to the assistant's message around them."""
    match item.get("type", "message"):
        case "message" if item.get("role") == "assistant":
            _assistant(messages)["content"] = item.get("content")
        case "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        case "reasoning":
            messages.append({"role": "assistant", "content": "", "reasoning_content": _thoughts(item, where)})
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _assistant(messages, with_calls=True).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            output = item.get("output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        case other:
            raise RequestError(f"{where} has the type {other!r}, which this server cannot read", "input")


def _thoughts(item: dict[str, Any], where: str) -> str:
    """The text of a reasoning item, which may have none."""
    parts = item.get("content") or []
    try:
        return "".join(part["text"] for part in parts)
    except (TypeError, KeyError) as error:
        raise RequestError(
            f"{where}.content is not a list of {{'type': 'reasoning_text', 'text': …}}", "input"
        ) from error


def _assistant(messages: list[dict[str, Any]], *, with_calls: bool = False) -> dict[str, Any]:
    """Return the assistant's message for an item: the last message if it is still open, else a new one."""
    last = messages[-1] if messages else {}
    is_open = last.get("role") == "assistant" and (with_calls or not (last.get("content") or last.get("tool_calls")))
    if not is_open:
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RequestError(
            f"tools[{index}] has the type {str(tool.get('type'))[:40]!r}; this server runs no tools: offer functions",
            "tools",
        )
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(given: Any) -> ResponseFormat | None:
    if not isinstance(given, dict) or not isinstance(given.get("type"), str):
        return None
    return ResponseFormat(given["type"], {"schema": given.get("schema")} if given["type"] == "json_schema" else None)


_PREFIX = {"reasoning": "rs", "text": "msg", "call": "fc"}
_PART = {"reasoning": "reasoning_text", "text": "output_text"}


class ResponsesBuilder(BlockResponseBuilder):
    """A response, or the events of one."""

    def __init__(self, chat: Chat, request: ResponsesRequest) -> None:
        super().__init__(chat)
        self._request = request
        self._ids: list[str] = []
        self._num_events = 0

    def whole(self) -> dict[str, Any]:
        return self._response(finished=True)

    def opening(self) -> Iterator[bytes]:
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self._response(finished=False))

    def closing(self) -> Iterator[bytes]:
        whole = self._response(finished=True)
        yield self._event(f"response.{whole['status']}", response=whole)

    def error_events(self, error: ApiError) -> bytes:
        return self._event("error", code=error.code, message=str(error), param=error.param)

    def _event(self, kind: str, **fields: Any) -> bytes:
        value = {"type": kind, "sequence_number": self._num_events} | fields
        self._num_events += 1
        return named_event(kind, value)

    def block_events(self, event: BlockEvent) -> Iterator[bytes]:
        block, index = event.block, event.block.index
        where = {"item_id": self._id(block), "output_index": index}
        if event.what == "open":
            yield self._event("response.output_item.added", output_index=index, item=self._item(block, done=False))
            if block.kind == "text":
                yield self._event("response.content_part.added", **where, content_index=0, part=_part(block, ""))
        elif event.what == "delta":
            place = _place(block, event.logprobs)
            yield self._event(_name(block, "delta"), **where, **place, delta=event.delta)
        else:
            key = "arguments" if block.kind == "call" else "text"
            yield self._event(_name(block, "done"), **where, **_place(block, block.logprobs), **{key: block.text})
            if block.kind == "text":
                part = _part(block, block.text)
                yield self._event("response.content_part.done", **where, content_index=0, part=part)
            yield self._event("response.output_item.done", output_index=index, item=self._item(block))

    def _id(self, block: Block) -> str:
        while len(self._ids) <= block.index:
            self._ids.append(f"{_PREFIX[block.kind]}_{uuid.uuid4().hex}")
        return self._ids[block.index]

    def _item(self, block: Block, *, done: bool = True) -> dict[str, Any]:
        status = "in_progress" if not done else "incomplete" if block.is_cut_off else "completed"
        if block.call is not None:
            call = {"call_id": block.call.id, "name": block.call.name, "arguments": block.text if done else ""}
            return {"id": self._id(block), "type": "function_call", "status": status} | call
        content = [_part(block, block.text)] if done else []
        if block.kind == "reasoning":
            return {"id": self._id(block), "type": "reasoning", "summary": [], "content": content, "status": status}
        return {"id": self._id(block), "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(self, *, finished: bool) -> dict[str, Any]:
        request, call = self._request, self.chat.call
        cut_off = self.chat.finish_reason == "length"
        status = "in_progress" if not finished else "incomplete" if cut_off else "completed"
        return {
            "id": call.id,
            "object": "response",
            "created_at": call.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": call.model,
            "output": [self._item(block) for block in self.blocks.done] if finished else [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": msgspec.to_builtins(request.reasoning or ReasoningOptions()),
            "store": False,
            "temperature": request.temperature,
            "text": {"format": (request.text or TextOptions()).format or {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": self._usage() if finished else None,
            "weft": call.extension() if finished else None,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.chat.call.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.chat.num_reasoning_tokens()},
            "total_tokens": usage["total_tokens"],
        }


def _part(block: Block, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _PART[block.kind], "text": text}
    return part | {"annotations": [], "logprobs": block.logprobs if text else []} if block.kind == "text" else part


def _name(block: Block, what: str) -> str:
    return f"response.{'function_call_arguments' if block.kind == 'call' else _PART[block.kind]}.{what}"


def _place(block: Block, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """Fields that say where in its item a delta belongs."""
    if block.kind == "call":
        return {}
    return {"content_index": 0, "logprobs": logprobs} if block.kind == "text" else {"content_index": 0}
