"""Conversations: from the API's messages to a prompt."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from weft.engine.async_engine import AsyncEngine
from weft.engine.chat_messages import template_messages
from weft.engine.chat_prompts import ChatPrompt
from weft.engine.prompts import PreparedPrompt
from weft.errors import RequestError
from weft.server.errors import ApiError
from weft.server.output_parser import THINK
from weft.server.service import Service
from weft.text.chat_template import DEFAULT_OPTIONS, TemplateOptions
from weft.text.tokenizer import Tokenizer


def check_special_tokens(tokenizer: Tokenizer, wanted: bool | None) -> None:
    """Raises RequestError where special tokens are wanted on top of those of the chat template, and there are some."""
    if wanted and tokenizer.encode(""):
        raise RequestError(
            "add_special_tokens=true is not supported for messages: the chat template says which special tokens there "
            "are; leave it out",
            "add_special_tokens",
        )


def need_tokenizer(engine: AsyncEngine) -> Tokenizer:
    """Raises ApiError if the engine runs without one."""
    if engine.tokenizer is None:
        raise ApiError(400, "this server runs without a tokenizer; use /v1/completions with token ids")
    return engine.tokenizer


def options_of(
    tools: Sequence[Mapping[str, Any]] | None, variables: Mapping[str, Any] | None, adds: bool | None,
    continues: bool | None,
) -> TemplateOptions:  # fmt: skip
    """The template options of a request. With ``adds`` None a generation prompt follows, unless the last message is to
    be continued."""
    return TemplateOptions(tools, variables, not continues if adds is None else adds, bool(continues))


async def chat_prompt(
    service: Service,
    engine: AsyncEngine,
    messages: Sequence[Mapping[str, Any]],
    options: TemplateOptions = DEFAULT_OPTIONS,
    *,
    limit: int | None = None,
    caller: str = "",
) -> ChatPrompt:
    """Render and tokenize a conversation and read its images, off the event loop.

    Args:
        limit: more tokens than that are of no use; see ``ChatPrompts.encode``.
        caller: see ``Client.queue``.

    Raises:
        RequestError: the template refuses it or takes too long, or an image cannot be read.
        ApiError: there is no tokenizer.
    """
    need_tokenizer(engine)
    chats = engine.chats
    assert chats is not None
    plain, media = template_messages(messages, engine.inputs.text_only)
    render = partial(chats.render, plain, options, turn_boundaries=service.keeps_states)
    size = sum(_num_characters(message["content"]) for message in plain)
    chat = await service.render.run_limited(
        render, lambda chat: chats.encode(chat, limit), size=size, size_of=lambda chat: len(chat.text)
    )
    if not media or engine.inputs.media is None:
        return chat
    if limit is not None:
        engine.inputs.check_length(chat.text, chat.token_ids)
    processed = await service.media.process(engine.inputs.media, media, service.capacity.max_model_len, caller)
    expanded = engine.inputs.with_media(chat.token_ids, chat.turn_boundaries, processed, "messages")
    return ChatPrompt(chat.text, expanded.token_ids, expanded.positions, expanded.media)


def _num_characters(content: str | list[dict[str, Any]]) -> int:
    return len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content)


def opens_reasoning(prompt: PreparedPrompt) -> bool:
    """True if the template has already written the tag that begins the reasoning."""
    return prompt.text is not None and prompt.text.rstrip().endswith(THINK)
