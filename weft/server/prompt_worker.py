"""The worker process for large bodies: ``python -m weft.server.prompt_worker``, see ``worker.serve``."""

import logging
from array import array
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from weft.engine.chat_messages import template_messages
from weft.engine.chat_prompts import ChatPrompt, ChatPrompts
from weft.engine.input_processor import InputProcessor
from weft.errors import RequestError
from weft.server import anthropic_messages, responses
from weft.server.chat_completions import template_options
from weft.server.completions import prepare_prompts, prompt_list
from weft.server.large_bodies import BodyRead, PromptSetup, ReadBody, ReadPrompt
from weft.server.protocol import (
    BodyReader,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from weft.server.rendering import render_in_worker
from weft.server.sampling import completion_params
from weft.server.tool_use import tool_use
from weft.server.utility import check_tokenize, detokenized, tokenize_options, tokenized
from weft.server.worker import Result, decode, encode, serve
from weft.text.chat_template import TemplateOptions
from weft.text.tokenizer import Tokenizer


class PromptWorker:
    """Reads bodies of one engine's requests."""

    def __init__(self, setup: bytes) -> None:
        logging.disable()  # the server warns of unknown fields
        self._setup = decode(setup, PromptSetup)
        config = self._setup.config
        self._tokenizer = Tokenizer.load(config.tokenizer_path)
        self._inputs = InputProcessor(config, self._tokenizer, self._setup.max_model_len)
        self._chats = ChatPrompts(self._tokenizer)
        self._bodies = BodyReader(self._setup.settings.strict)
        self._readers: dict[str, Callable[[bytes], Result]] = {
            "/v1/chat/completions": self._chat_completion,
            "/v1/completions": self._completion,
            "/v1/responses": self._responses,
            "/v1/messages": self._messages,
            "/v1/messages/count_tokens": self._count_tokens,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }

    def __call__(self, content: bytes, body: bytes) -> Result:
        task = decode(content, ReadBody)
        try:
            return self._readers[task.path](body)
        except OverflowError as error:
            raise RequestError("a number of the body is out of range; allowed are 64-bit integers") from error
        except UnicodeEncodeError as error:
            raise RequestError(f"the body is not valid Unicode: {error.reason}") from error
        except RecursionError as error:
            raise RequestError("the body is nested too deeply") from error

    def _chat_completion(self, body: bytes) -> Result:
        request = self._bodies.read(body, ChatCompletionRequest)
        prompt = self._chat_prompt(request)
        shown = request.messages[-1:] if request.echo else []
        request.messages = shown or [{"role": "user", "content": ""}]
        return self._found(request, prompt)

    def _responses(self, body: bytes) -> Result:
        request = self._bodies.read(body, responses.ResponsesRequest)
        prompt = self._chat_prompt(responses.to_chat(request))
        request.input = ""
        return self._found(request, prompt)

    def _messages(self, body: bytes) -> Result:
        return self._anthropic(self._bodies.read(body, anthropic_messages.MessagesRequest), has_limit=True)

    def _count_tokens(self, body: bytes) -> Result:
        return self._anthropic(self._bodies.read(body, anthropic_messages.CountTokensRequest), has_limit=False)

    def _anthropic(self, request: anthropic_messages.CountTokensRequest, *, has_limit: bool) -> Result:
        prompt = self._chat_prompt(anthropic_messages.to_chat(request), has_limit=has_limit)
        request.messages, request.system = [{"role": "user", "content": ""}], None
        return self._found(request, prompt)

    def _chat_prompt(self, request: ChatCompletionRequest, *, has_limit: bool = True) -> ChatPrompt | None:
        tools = tool_use(request, self._setup.settings.tool_call_parser)
        limit = self._setup.max_model_len if has_limit and request.truncate_prompt_tokens is None else None
        return self._rendered(request.messages, template_options(request, tools), limit)

    def _rendered(
        self, messages: list[dict[str, Any]], options: TemplateOptions, limit: int | None
    ) -> ChatPrompt | None:
        """The prompt; None: there are images."""
        setup = self._setup
        plain, media = template_messages(messages, setup.text_only)
        if media:
            return None
        chat = render_in_worker(
            lambda: self._chats.render(plain, options, turn_boundaries=setup.keeps_states),
            setup.settings.template_timeout_s,
        )
        return self._chats.encode(chat, limit)

    def _found(self, request: Any, prompt: ChatPrompt | None) -> Result:
        prompts = None if prompt is None else [(prompt.text, prompt.token_ids, prompt.turn_boundaries)]
        return self._read(request, prompts)

    def _completion(self, body: bytes) -> Result:
        request = self._bodies.read(body, CompletionRequest)
        params = completion_params(request, self._setup.settings)
        given = prompt_list(request.prompt, self._setup.settings.max_prompts)
        prompts = prepare_prompts(self._inputs, self._tokenizer, request, params, given)
        request.prompt = ""
        return self._read(request, [(p.text, p.token_ids, p.checkpoint_positions) for p in prompts])

    def _tokenize(self, body: bytes) -> Result:
        request = self._bodies.read(body, TokenizeRequest)
        check_tokenize(request, self._tokenizer)
        if request.prompt is not None:
            special = request.add_special_tokens is not False
            ids = self._tokenizer.encode(request.prompt, add_special_tokens=special)
        else:
            assert request.messages is not None
            chat = self._rendered(request.messages, tokenize_options(request), None)
            if chat is None:
                return self._read(request, None)
            ids = chat.token_ids
        token_text = self._tokenizer.token_text if request.return_token_strs else None
        return self._answer(request.model, tokenized(ids, self._setup.max_model_len, token_text))

    def _detokenize(self, body: bytes) -> Result:
        request = self._bodies.read(body, DetokenizeRequest)
        limit = self._setup.config.model_config.vocab_size
        return self._answer(request.model, {"prompt": detokenized(self._tokenizer, limit, request.tokens)})

    def _read(self, request: Any, prompts: Iterable[tuple[str | None, list[int], list[int]]] | None) -> Result:
        if prompts is None:
            return BodyRead(b"", None, []), b""
        heads, ids = [], array("I")
        for text, token_ids, positions in prompts:
            heads.append(ReadPrompt(text, len(token_ids), positions))
            ids.extend(token_ids)
        return BodyRead(encode(request), request.model, self._bodies.unknown, heads), ids.tobytes()

    def _answer(self, model: str | None, value: dict[str, Any]) -> Result:
        return BodyRead(b"", model, self._bodies.unknown), msgspec.json.encode(value)


if __name__ == "__main__":
    serve(PromptWorker)
