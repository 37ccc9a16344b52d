"""Conversations: from the API's messages to a prompt.

Job: render and tokenize messages off the event loop. Does not know: sampling, responses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from weft.engine.async_engine import AsyncEngine
from weft.engine.borders import conversation_borders
from weft.engine.conversation import template_message
from weft.engine.inputs import PreparedPrompt
from weft.errors import RequestError
from weft.server.answers import THINK
from weft.server.errors import ApiError
from weft.server.protocol import SamplingFields
from weft.server.service import Service
from weft.tokenizer import Tokenizer

NO_SAMPLING = SamplingFields()


def need_tokenizer(engine: AsyncEngine) -> Tokenizer:
    """Raises ApiError if the engine runs without one."""
    if engine.tokenizer is None:
        raise ApiError(400, "this server runs without a tokenizer; use /v1/completions with token ids")
    return engine.tokenizer


async def prepare_chat(
    service: Service,
    engine: AsyncEngine,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    sampling: SamplingFields = NO_SAMPLING,
    cache_salt: str | None = None,
) -> PreparedPrompt:
    """Render and tokenize a conversation, off the event loop. Raises RequestError."""
    tokenizer, inputs = need_tokenizer(engine), engine.inputs
    plain = [template_message(message, i) for i, message in enumerate(messages)]
    render = partial(tokenizer.render_chat, tools=tools, chat_template_kwargs=template_kwargs)
    wants_borders = service.keeps_states and not continue_final_message

    def prepare() -> PreparedPrompt:
        text, shown = _rendered(
            plain,
            partial(render, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message),
        )
        ids = tokenizer.encode(text, add_special_tokens=False)
        fields: dict[str, Any] = {"prompt": text, "prompt_token_ids": ids, "cache_salt": cache_salt}
        was_cut = truncate(service, engine, fields, sampling)
        fields["checkpoint_positions"] = sampling.checkpoint_positions
        prepared = inputs.prepare_prompt(fields)
        if not wants_borders or was_cut:
            return prepared
        encode = partial(tokenizer.encode, add_special_tokens=False)
        borders = conversation_borders(shown, ids, lambda other: encode(render(other)))
        return replace(prepared, checkpoint_positions=sorted({*prepared.checkpoint_positions, *borders}))

    return await service.render.run_limited(prepare)


def truncate(service: Service, engine: AsyncEngine, fields: dict[str, Any], request: SamplingFields) -> bool:
    """Keep the last ``truncate_prompt_tokens`` of a prompt, -1: as many as leave room for ``max_tokens``.

    Returns True if something was cut off. Raises RequestError for a number out of range.
    """
    keep, limit = request.truncate_prompt_tokens, service.capacity.max_model_len - 1
    if keep is None:
        return False
    if keep != -1 and not 1 <= keep <= limit:
        raise RequestError(
            f"truncate_prompt_tokens={keep} is out of range; allowed: 1 to {limit}, or -1 for what the context holds",
            "truncate_prompt_tokens",
        )
    if keep == -1:
        keep = max(1, limit + 1 - (request.max_tokens or 1))
    ids = fields["prompt_token_ids"]
    if len(ids) <= keep:
        return False
    fields["prompt_token_ids"] = ids[-keep:]
    if "prompt" in fields:
        fields["prompt"] = need_tokenizer(engine).decode(ids[-keep:], skip_special_tokens=False)
    return True


Messages = list[dict[str, Any]]


def _rendered(messages: Messages, render: Callable[[Messages], str]) -> tuple[str, Messages]:
    """The conversation as text, and the messages that the template took.

    Some templates refuse a system message behind the first place, which agents send between turns: there it is shown
    as the user's. Raises RequestError.
    """
    try:
        return render(messages), messages
    except RequestError:
        moved = messages[:1] + [m | {"role": "user"} if m["role"] == "system" else m for m in messages[1:]]
        if moved == messages:
            raise
        return render(moved), moved


def opens_reasoning(prompt: PreparedPrompt) -> bool:
    """True if the template has already written the tag that begins the reasoning."""
    return prompt.text is not None and prompt.text.rstrip().endswith(THINK)


def tool_schemas(tools: Any) -> dict[str, Any]:
    """Parameters by function name. Raises RequestError for tools that are not functions."""
    schemas: dict[str, Any] = {}
    for i, tool in enumerate(tools or ()):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"tools[{i}] is not {{'type': 'function', 'function': {{'name': …}}}}", "tools")
        schemas[function["name"]] = function.get("parameters") or {}
    return schemas
