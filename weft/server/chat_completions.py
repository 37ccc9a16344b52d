"""``/v1/chat/completions``.

Job: a conversation in, messages out, whole or streamed, with reasoning and tool calls told apart.
Owns: the response's shape. Does not know: how the parts are found (``output_parser.py``).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from msgspec.json import encode

from weft.engine.async_engine import AsyncEngine
from weft.engine.chat_messages import template_message
from weft.engine.chat_prompts import ChatPrompt
from weft.engine.output_processor import CompletionDelta
from weft.engine.prompts import PreparedPrompt
from weft.engine.response_stream import PromptDelta
from weft.errors import RequestError
from weft.outputs import CompletionOutput, LogprobsDict
from weft.server.api_call import ApiCall, Context, check_model, read_request, submit_call
from weft.server.chat import chat_prompt, check_special_tokens, need_tokenizer, opens_reasoning, options_of
from weft.server.client import Client
from weft.server.logprobs import chat_logprobs, prompt_logprobs
from weft.server.output_parser import END_THINK, OutputParser, Parts, ToolCall
from weft.server.protocol import ChatCompletionRequest
from weft.server.response_builder import OpenAIResponseBuilder
from weft.server.sampling import chat_params, names_ids
from weft.server.sse import JsonResponse, StreamResponse
from weft.server.structured import check_end, constraint_of, forced_calls
from weft.server.tool_use import ToolUse, tool_use
from weft.text.chat_template import TemplateOptions


@dataclass(slots=True)
class Chat:
    """A running chat, in the terms that every chat protocol shares.

    Attributes:
        tools: which tools are shown and read.
        n: completions.
        top_logprobs: alternatives of each token that were asked for; None: no log probabilities.
        names_ids: tokens of log probabilities are named by their ids.
        hides_reasoning: the caller wants none.
        finish_reason, stop_reason, reasoning: of the only completion, once ``parts`` has had its end.
    """

    call: ApiCall
    tools: ToolUse
    n: int
    top_logprobs: int | None = None
    names_ids: bool = False
    hides_reasoning: bool = False
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    reasoning: str = ""
    _parser: OutputParser | None = None
    _unsent_logprobs: list[dict[str, Any]] = field(default_factory=list)

    def parser(self) -> OutputParser:
        reads = self.call.context.settings.reasoning_parser != "none"
        opened = reads and opens_reasoning(self.call.prompts[0])
        tools = self.tools
        return OutputParser(reasoning=reads, in_reasoning=opened, tools=tools.schemas, several=tools.several)

    def parts(self, deltas: list[PromptDelta]) -> Iterator[Parts]:
        """Parse the deltas of the only completion."""
        parser = self._parser = self._parser or self.parser()
        for _, delta in deltas:
            self.call.check_error(delta)
            parts = parser.feed(delta.text)
            if delta.finish_reason is not None:
                parts.add(parser.finish(is_cut_off=delta.finish_reason == "length"))
                self.finish_reason = _finish_reason(delta.finish_reason, parser)
                self.stop_reason = delta.stop_reason
            self.reasoning += parts.reasoning
            if self.hides_reasoning:
                parts.reasoning = ""
            if self.top_logprobs is not None:
                self._unsent_logprobs += self.logprobs(delta.logprobs)["content"]
                if parts:
                    parts.logprobs, self._unsent_logprobs = _of_content(self._unsent_logprobs, parts.content)
            yield parts

    def num_reasoning_tokens(self) -> int:
        """Tokens of the only completion's reasoning, with the mark that ends it, once ``parts`` has ended."""
        if not self.reasoning:
            return 0
        tokenizer = need_tokenizer(self.call.engine)
        mark = tokenizer.encode(END_THINK, add_special_tokens=False)
        if len(mark) > 1:  # where it ends cannot be seen in the tokens
            return len(tokenizer.encode(self.reasoning, add_special_tokens=False))
        tokens = self.call.stream.requests[0].output_token_ids
        return tokens.index(mark[0]) + 1 if mark[0] in tokens else len(tokens)

    def logprobs(self, entries: Sequence[LogprobsDict] | None) -> dict[str, Any]:
        """``choices[].logprobs`` of some tokens."""
        bytes_of = need_tokenizer(self.call.engine).token_bytes
        return chat_logprobs(entries or (), self.top_logprobs or 0, bytes_of, as_ids=self.names_ids)


def _of_content(entries: list[dict[str, Any]], content: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split entries into those of ``content`` and later ones. Earlier entries, of reasoning and markup, are dropped.

    Held back space among the later entries may still become content.
    """
    start = "".join(entry["token"] for entry in entries).rfind(content)
    if start < 0:  # a character is spread over several tokens
        return entries, []
    ends = list(accumulate(len(entry["token"]) for entry in entries))
    first, behind = bisect_right(ends, start), 1 + bisect_left(ends, start + len(content))
    return entries[first:behind], entries[behind:]


async def start_chat(
    context: Context,
    request: ChatCompletionRequest,
    client: Client,
    read: list[ChatPrompt] | None = None,
    *,
    prefix: str = "chatcmpl",
    clamps: bool = True,
) -> Chat:
    """Check, render and submit a chat. Raises RequestError or ApiError.

    ``read``: its prompt, if it was rendered already. ``clamps``: ``max_tokens`` beyond the context is lowered to the
    room there is, not refused.
    """
    model = check_model(context, request.model)
    params = chat_params(request, context.settings)
    if request.add_special_tokens:
        check_special_tokens(need_tokenizer(context.service.engine), True)
    if request.logprobs:
        context.service.engine.inputs.sampling.num_logprobs("top_logprobs", request.top_logprobs)
    tools = tool_use(request, context.settings.tool_call_parser)
    constraint = constraint_of(request, context.settings.max_schema_bytes)
    if tools.forced is not None:
        # A response_format is about the content, and a forced call has none.
        if constraint is not None and constraint.param != "response_format":
            raise RequestError(
                f"tool_choice={request.tool_choice!r} and {constraint.param} exclude each other", "tools"
            )
        check_end(request, "tool_choice")
        constraint = forced_calls(
            tools.forced,
            need_tokenizer(context.service.engine),
            several=tools.several,
            max_bytes=context.settings.max_schema_bytes,
        )

    async def prepare(engine: AsyncEngine) -> Sequence[PreparedPrompt]:
        limit = context.service.capacity.max_model_len if params.truncate_prompt_tokens is None else None
        chat = read[0] if read else await render_chat(context, engine, request, tools, client, limit)
        salt = client.cache_salt(request.cache_salt)
        prompts = [engine.inputs.encoded_chat(chat, request.checkpoint_positions or (), salt, params)]
        if not clamps:
            engine.inputs.check_room(prompts, params)
        return prompts

    call = await submit_call(
        context,
        client,
        request,
        prefix,
        params,
        1,
        prepare,
        model=model,
        constraint=constraint,
    )
    top_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    hides_reasoning = request.include_reasoning is False
    return Chat(call, tools, params.n, top_logprobs, names_ids(request, context.settings), hides_reasoning)


async def chat_completions(context: Context, body: bytes, client: Client) -> JsonResponse | StreamResponse:
    """Handle one request. Raises RequestError or ApiError."""
    request, read = await read_request(context, "/v1/chat/completions", body, ChatCompletionRequest, client)
    chat = await start_chat(context, request, client, read, clamps=False)
    return ChatResponseBuilder(chat, request).response(request.stream)


async def render_chat(
    context: Context,
    engine: AsyncEngine,
    request: ChatCompletionRequest,
    tools: ToolUse,
    client: Client,
    limit: int | None = None,
) -> ChatPrompt:
    """The text and the tokens of a chat; ``limit`` as for ``chat_prompt``. Raises RequestError."""
    return await chat_prompt(
        context.service,
        engine,
        request.messages,
        template_options(request, tools),
        limit=limit,
        caller=client.queue,
    )


def template_options(request: ChatCompletionRequest, tools: ToolUse) -> TemplateOptions:
    """Collect the template options of a request. Raises RequestError."""
    return options_of(
        tools.shown, _template_kwargs(request), request.add_generation_prompt, request.continue_final_message
    )


_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def _template_kwargs(request: ChatCompletionRequest) -> dict[str, Any] | None:
    """The template's variables: ``reasoning_effort`` is one of them, and ``"none"`` switches thinking off."""
    effort = request.reasoning_effort
    if effort is None:
        return request.chat_template_kwargs
    if effort not in _EFFORTS:
        raise RequestError(
            f"reasoning_effort={str(effort)[:40]!r} is not known; allowed: {', '.join(_EFFORTS)}", "reasoning_effort"
        )
    implied = {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})
    return implied | (request.chat_template_kwargs or {})


_NO_MORE = b'},"logprobs":null,"finish_reason":null'
"""How the choice of a chunk ends that has content only; see ``ChatResponseBuilder._delta_choice``."""


class ChatResponseBuilder(OpenAIResponseBuilder):
    def __init__(self, chat: Chat, request: ChatCompletionRequest) -> None:
        super().__init__(chat.call, request, "chat.completion", "chat.completion.chunk")
        self._chat, self._request = chat, request
        self._echo = _last_answer(request.messages) if request.echo else ""
        self._parsers = [chat.parser() for _ in range(chat.n)]
        self._has_begun = [False] * chat.n
        self._first = {"prompt_token_ids": self.call.prompts[0].token_ids} if request.return_token_ids else {}

    async def body(self) -> dict[str, Any]:
        output, top = (await self.call.stream.results())[0], self._request.prompt_logprobs
        return self.whole(
            [self._choice(completion) for completion in output.outputs],
            prompt_logprobs=prompt_logprobs(output, top) if top is not None else None,
            prompt_token_ids=output.prompt_token_ids if self._request.return_token_ids else None,
        )

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        self.call.check_error(completion)
        parser = self._parsers[completion.index]
        parts = parser.feed(completion.text)
        parts.add(parser.finish(is_cut_off=completion.finish_reason == "length"))
        if self._chat.hides_reasoning:
            parts.reasoning = ""
        content = self._echo + parts.content
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if parts.calls else "")}
        message |= {"refusal": None, "reasoning": parts.reasoning or None}
        if parts.reasoning:
            message["reasoning_content"] = parts.reasoning
        if parts.calls:
            message["tool_calls"] = [_whole_call(call) for call in parts.calls]
        choice = {
            "index": completion.index,
            "message": message,
            "logprobs": self._logprobs(completion.logprobs),
            "finish_reason": _finish_reason(completion.finish_reason, parser),
            "stop_reason": completion.stop_reason,
        }
        choice["token_ids"] = completion.token_ids if self._request.return_token_ids else None
        return choice

    def _logprobs(self, entries: Any) -> dict[str, Any] | None:
        if not self._request.logprobs or entries is None:
            return None
        return self._chat.logprobs(entries)

    def content(self, deltas: list[PromptDelta]) -> bytes:
        content = b""
        for _, delta in deltas:
            content += self._event(delta)
        return content

    def _event(self, delta: CompletionDelta) -> bytes:
        if self._is_text(delta):
            ids = b',"token_ids":' + encode(delta.token_ids) if self._request.return_token_ids else b""
            return self.chunks.text_event(b'{"index":%d,"delta":{"content":' % delta.index, delta.text, _NO_MORE + ids)
        choice = self._delta_choice(delta)
        if choice is None:
            return b""
        usage = {"usage": self.call.usage()} if self.usage_always else {}
        first, self._first = self._first, {}
        return self.chunks.event(choice, first | usage)

    def _is_text(self, delta: CompletionDelta) -> bool:
        """More content, as it stands, is all that there is to send."""
        is_text = delta.text and delta.finish_reason is None and not delta.logprobs and not self.usage_always
        return bool(is_text) and self._has_begun[delta.index] and self._parsers[delta.index].is_plain

    def _delta_choice(self, delta: CompletionDelta) -> dict[str, Any] | None:
        """A chunk's choice, or None if there is nothing to send yet."""
        self.call.check_error(delta)
        parser = self._parsers[delta.index]
        num_calls = parser.num_calls
        parts = parser.feed(delta.text)
        if delta.finish_reason is not None:
            parts.add(parser.finish(is_cut_off=delta.finish_reason == "length"))
        if self._chat.hides_reasoning:
            parts.reasoning = ""
        logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
        wants_ids = bool(self._request.return_token_ids)
        if not (parts or delta.finish_reason or logprobs or wants_ids or self.usage_always):
            return None
        choice = {
            "index": delta.index,
            "delta": self._delta(delta, parts, num_calls),
            "logprobs": logprobs,
            "finish_reason": _finish_reason(delta.finish_reason, parser),
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if wants_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _delta(self, delta: CompletionDelta, parts: Parts, num_calls: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        if not self._has_begun[delta.index]:
            self._has_begun[delta.index] = True
            result["role"] = "assistant"
            parts.content = self._echo + parts.content
            if not parts:
                result["content"] = ""
        if parts.reasoning:
            result |= {"reasoning": parts.reasoning, "reasoning_content": parts.reasoning}
        if parts.content:
            result["content"] = parts.content
        if parts.calls:
            result["tool_calls"] = [{"index": num_calls + i} | _whole_call(c) for i, c in enumerate(parts.calls)]
        return result


def _last_answer(messages: list[dict[str, Any]]) -> str:
    """The text of the last message if it is the assistant's, which ``echo`` puts before the answer."""
    if messages[-1]["role"] != "assistant":
        return ""
    content = template_message(messages[-1], len(messages) - 1, {})["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _whole_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finish_reason(reason: str | None, parser: OutputParser) -> str | None:
    return "tool_calls" if reason == "stop" and parser.num_calls else reason
