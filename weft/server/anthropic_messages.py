"""``/v1/messages`` and ``/v1/messages/count_tokens``: the Anthropic protocol.

Job: translate a request into a chat completion's, and the answer's blocks into this protocol's.
Owns: both translations. Does not know: generation.
"""

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from weft.errors import RequestError
from weft.server.api_call import Context, check_model, read_request
from weft.server.chat_completions import render_chat, start_chat
from weft.server.client import Client
from weft.server.content_blocks import Block, BlockEvent, BlockResponseBuilder
from weft.server.errors import ApiError, anthropic_type
from weft.server.protocol import ChatCompletionRequest, ResponseFormat
from weft.server.sse import JsonResponse, StreamResponse, named_event
from weft.server.tool_use import tool_use


class Thinking(msgspec.Struct):
    """``type``: enabled, disabled or adaptive. ``budget_tokens``: an upper bound in Anthropic's API, which clients have
    to send; ``max_tokens`` bounds reasoning and answer together here."""

    type: str | None = None
    budget_tokens: int | None = None


class OutputConfig(msgspec.Struct):
    """``effort``: how much to reason, for templates that read it; ``format``: a JSON schema for the answer."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """Body of ``/v1/messages/count_tokens``."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of ``/v1/messages``."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None


async def messages(context: Context, body: bytes, client: Client) -> JsonResponse | StreamResponse:
    """Handle one request. Raises RequestError or ApiError."""
    request, read = await read_request(context, "/v1/messages", body, MessagesRequest, client)
    chat = await start_chat(context, to_chat(request), client, read, prefix="msg")
    return MessagesBuilder(chat).response(request.stream)


async def count_tokens(context: Context, body: bytes, client: Client) -> dict[str, Any]:
    """Tokens of the prompt that the same messages would make."""
    given, read = await read_request(context, "/v1/messages/count_tokens", body, CountTokensRequest, client)
    request = to_chat(given)
    check_model(context, request.model)
    if read is not None:
        return {"input_tokens": len(read[0].token_ids)}
    tools = tool_use(request, context.settings.tool_call_parser)
    chat = await render_chat(context, context.service.engine, request, tools, client)
    return {"input_tokens": len(chat.token_ids)}


def to_chat(request: CountTokensRequest) -> ChatCompletionRequest:
    """The same request in the OpenAI protocol. Raises RequestError."""
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": _joined(_parts_of(request.system, "system"))})
    for index, message in enumerate(request.messages):
        messages += _messages_of(message, f"messages[{index}]")
    tool_choice, parallel = _tool_choice(request.tool_choice)
    chat = ChatCompletionRequest(
        messages=messages,
        continue_final_message=_is_prefill(messages[-1:]),
        model=request.model,
        tools=_tools(request.tools),
        tool_choice=tool_choice,
        parallel_tool_calls=parallel,
    )
    if isinstance(request, MessagesRequest):
        chat.max_tokens, chat.stop = request.max_tokens, request.stop_sequences
        chat.temperature, chat.top_p, chat.top_k = request.temperature, request.top_p, request.top_k
        chat.stream, chat.chat_template_kwargs = request.stream, request.chat_template_kwargs
    config = request.output_config or OutputConfig()
    chat.reasoning_effort = config.effort
    chat.response_format = _format(config.format or request.output_format)
    if request.thinking is not None and request.thinking.type in ("enabled", "disabled"):
        thinks = {"enable_thinking": request.thinking.type == "enabled"}
        chat.chat_template_kwargs = thinks | (chat.chat_template_kwargs or {})
    return chat


def _format(given: dict[str, Any] | None) -> ResponseFormat | None:
    if given is None:
        return None
    if given.get("type") != "json_schema":
        raise RequestError(f"output_config.format.type={given.get('type')!r} is not json_schema", "output_config")
    return ResponseFormat("json_schema", {"schema": given.get("schema")})


def _is_prefill(last: list[dict[str, Any]]) -> bool:
    """True if the answer's beginning is given: it is continued, and not followed by another answer."""
    return any(m["role"] == "assistant" and m["content"] and not m.get("tool_calls") for m in last)


def _messages_of(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Split a message into messages of one kind, in order, since tool results and text may be in the same message."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise RequestError(f"{where}.role={role!r} is not allowed; give user, assistant or system", "messages")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise RequestError(f"{where}.content is neither a text nor a list of blocks", "messages")
    result: list[dict[str, Any]] = []
    for block in content:
        _add_block(result, role, block if isinstance(block, dict) else {}, where)
    for each in result:
        each["content"] = _joined(each["content"])
    return result or [{"role": role, "content": ""}]


def _joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Parts as one text, unless there are images."""
    return "".join(part["text"] for part in parts) if all("text" in part for part in parts) else parts


def _add_block(result: list[dict[str, Any]], role: str, block: dict[str, Any], where: str) -> None:
    kind = block.get("type")
    if kind == "tool_result" and role == "user":
        parts = _parts_of(block.get("content") or "", where)
        result.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": parts})
        return
    if not result or result[-1]["role"] != role:
        result.append({"role": role, "content": []})
    target = result[-1]
    if kind in ("text", "image"):
        target["content"] += _parts_of([block], where)
    elif kind == "thinking" and role == "assistant":
        target["reasoning_content"] = target.get("reasoning_content", "") + str(block.get("thinking") or "")
    elif kind == "redacted_thinking" and role == "assistant":
        return
    elif kind == "tool_use" and role == "assistant":
        given = block.get("input", {})
        if not isinstance(given, dict):
            raise RequestError(f"{where} has a tool_use block whose input is no object: {str(given)[:40]}", "messages")
        function = {"name": block.get("name"), "arguments": json.dumps(given)}
        target.setdefault("tool_calls", []).append({"id": block.get("id"), "type": "function", "function": function})
    else:
        raise RequestError(f"{where}.content has a block of type {kind!r} that this model cannot read", "messages")


def _parts_of(content: Any, where: str) -> list[dict[str, Any]]:
    """Text and image blocks as parts of the OpenAI protocol. Raises RequestError for others."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise RequestError(f"{where} holds content that is neither a text nor a list of blocks", "messages")
    return [_part_of(block if isinstance(block, dict) else {}, where) for block in content]


def _part_of(block: dict[str, Any], where: str) -> dict[str, Any]:
    if block.get("type") == "image":
        return {"type": "image_url", "image_url": {"url": _image_url(block.get("source"), where)}}
    if block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise RequestError(f"{where} holds a block that is neither text nor an image", where.split("[")[0])
    return {"type": "text", "text": block["text"]}


def _image_url(source: Any, where: str) -> str:
    """The URL of an image's source. Raises RequestError."""
    given = source if isinstance(source, dict) else {}
    kind, data, url = given.get("type"), given.get("data"), given.get("url")
    if kind == "base64" and isinstance(data, str):
        return f"data:{given.get('media_type') or 'image/png'};base64,{data}"
    if kind == "url" and isinstance(url, str):
        return url
    raise RequestError(
        f"{where} has an image with a source of type {kind!r}; give {{'type': 'base64', 'media_type': …, 'data': …}} "
        "or {'type': 'url', 'url': …}",
        "messages",
    )


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Functions in the OpenAI protocol. Raises RequestError for tools that the server would have to run."""
    if tools is None:
        return None
    for index, tool in enumerate(tools):
        if not isinstance(tool.get("input_schema"), dict):
            raise RequestError(
                f"tools[{index}] of type {str(tool.get('type'))[:40]!r} has no input_schema; this server runs no "
                "tools: offer your own",
                "tools",
            )
    return [
        {
            "type": "function",
            "function": {
                "name": tool.get("name"),
                "description": tool.get("description") or "",
                "parameters": tool["input_schema"],
            },
        }
        for tool in tools
    ]


def _tool_choice(choice: dict[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool | None]:
    """The OpenAI protocol's ``tool_choice`` and ``parallel_tool_calls``."""
    if choice is None:
        return None, None
    parallel = False if choice.get("disable_parallel_tool_use") else None
    match choice.get("type"):
        case "auto" | "none" as same:
            return same, parallel
        case "any":
            return "required", parallel
        case "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}, parallel
        case other:
            raise RequestError(f"tool_choice.type={other!r} is not known; give auto, any, tool or none", "tool_choice")


_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesBuilder(BlockResponseBuilder):
    """A message, or the events of one."""

    def whole(self) -> dict[str, Any]:
        return self._message([_content(block) for block in self.blocks.done]) | self._stop() | {"usage": self._usage()}

    def opening(self) -> Iterator[bytes]:
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        yield named_event("message_start", {"type": "message_start", "message": message})

    def block_events(self, event: BlockEvent) -> Iterator[bytes]:
        yield _event(event)

    def closing(self) -> Iterator[bytes]:
        yield named_event("message_delta", {"type": "message_delta", "delta": self._stop(), "usage": self._usage()})
        yield named_event("message_stop", {"type": "message_stop"})

    def error_events(self, error: ApiError) -> bytes:
        told = {"type": anthropic_type(error), "message": str(error)}
        return named_event("error", {"type": "error", "error": told})

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        call = self.chat.call
        return {"id": call.id, "type": "message", "role": "assistant", "model": call.model, "content": content}

    def _stop(self) -> dict[str, Any]:
        reason, stop = self.chat.finish_reason, self.chat.stop_reason
        if isinstance(stop, str) and reason == "stop":
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": _STOP_REASONS.get(reason or "", reason), "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        usage = self.chat.call.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        }


def _content(block: Block) -> dict[str, Any]:
    """A whole block."""
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.call is not None:
        return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": json.loads(block.text)}
    return {"type": "text", "text": block.text}


def _event(event: BlockEvent) -> bytes:
    block = event.block
    if event.what == "open":
        if block.call is not None:
            content: dict[str, Any] = {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": {}}
        else:
            content = _content(Block(block.index, block.kind))
        value: dict[str, Any] = {"type": "content_block_start", "index": block.index, "content_block": content}
    elif event.what == "delta":
        kind, name = {
            "text": ("text_delta", "text"),
            "reasoning": ("thinking_delta", "thinking"),
            "call": ("input_json_delta", "partial_json"),
        }[block.kind]
        value = {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: event.delta}}
    else:
        value = {"type": "content_block_stop", "index": block.index}
    return named_event(value["type"], value)
