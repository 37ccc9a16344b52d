"""Conversations: from messages to a prompt.

Job: convert messages to the form that chat templates read, and make the prompt. Content becomes one text, or a list of
parts if there are images. Tool arguments become objects; roles and reasoning get the names that templates know. Owns:
that form, for the offline interface and the server. Does not know: engines, or how images are read.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from weft.engine.chat_prompts import ChatPrompts
from weft.errors import RequestError
from weft.multimodal.parts import Media, media_part
from weft.text.chat_template import TemplateOptions

Messages = Sequence[Mapping[str, Any]]

_ROLES = {"developer": "system", "function": "tool"}


def render_chat(
    chats: ChatPrompts | None,
    messages: Messages,
    options: TemplateOptions,
    *,
    text_only: str | None,
    chat_template: str | None,
    turn_boundaries: bool,
) -> dict[str, Any]:
    """Render a conversation: ``{"prompt": text, "prompt_token_ids": ids}``, with ``checkpoint_positions``
    if turn boundaries were asked for and found, and ``multi_modal_data`` if there are images or videos.

    Args:
        text_only: the reason why the model reads text only; None if it reads images.
        chat_template: the text of a template, instead of the checkpoint's.

    Raises:
        RequestError: there is no tokenizer or chat template, or the template refuses the messages.
    """
    if chats is None:
        raise RequestError(
            "chat needs the tokenizer, but skip_tokenizer_init=True; give token ids to generate()", "messages"
        )
    _check_options(options.tools, options.chat_template_kwargs)
    plain, media = template_messages(messages, text_only)
    chats = chats if chat_template is None else chats.with_template(chat_template)
    chat = chats.make(plain, options, turn_boundaries=turn_boundaries)
    positions = {"checkpoint_positions": chat.turn_boundaries} if chat.turn_boundaries else {}
    images = {"multi_modal_data": media} if media else {}
    return {"prompt": chat.text, "prompt_token_ids": chat.token_ids} | positions | images


def conversations_of(messages: Any) -> list[Messages]:
    """Return the conversations as a list. A list of dicts is one conversation."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError(
            "messages must be a non-empty list of {'role', 'content'} dicts, or a list of such lists", "messages"
        )
    return [messages] if isinstance(messages[0], Mapping) else list(messages)


def _check_options(tools: Any, chat_template_kwargs: Any) -> None:
    if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, Mapping):
        kind = type(chat_template_kwargs).__name__
        raise RequestError(f"chat_template_kwargs is a {kind}; give a dict", "chat_template_kwargs")
    if tools is None:
        return
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError(f"tools={tools!r} is not a list of function descriptions (dicts)", "tools")


def template_messages(messages: Messages, text_only: str | None) -> tuple[list[dict[str, Any]], Media]:
    """Convert messages for the template. Returns them, and the sources of their images and videos.

    ``text_only``: the reason why the model reads text only; None if it reads images.

    Raises:
        RequestError: ``messages`` is no list, or ``template_message`` refuses one.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise RequestError(
            f"a conversation is a {type(messages).__name__}; give a list of {{'role', 'content'}} dicts", "messages"
        )
    media: Media = {}
    return [template_message(message, i, media, text_only) for i, message in enumerate(messages)], media


def template_message(
    message: Mapping[str, Any], index: int, media: Media, text_only: str | None = None
) -> dict[str, Any]:
    """Convert one message for the template: content as one text, tool arguments as objects, reasoning under one name.

    Content with images or videos stays a list of parts, with ``{"type": "image"}`` and the like for media.

    Args:
        message: a message as in the OpenAI API. Its content is a text, or a list of texts and parts like ``{"type":
            "text", "text": …}`` and ``{"type": "image_url", "image_url": {"url": …}}``.
        index: the position of the message, for errors.
        media: receives the sources of images and videos.
        text_only: the reason why the model reads text only; None if it reads images.

    Raises:
        RequestError: there is no role, a user's message has no content, or the model cannot read a part.
    """
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str):
        raise RequestError(
            f"messages[{index}] has no role; every message must be a dict with at least a 'role': system, user, "
            "assistant or tool",
            "messages",
        )
    if role == "user" and "content" not in message:
        raise RequestError(f"messages[{index}] has no content; give a text, or a list of parts", "messages")
    result = {key: value for key, value in message.items() if value is not None and key != "reasoning"}
    result["role"] = _ROLES.get(role, role)
    result["content"] = _content(message.get("content"), index, media, text_only)
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise RequestError(f"messages[{index}].reasoning is not a text", "messages")
        result["reasoning_content"] = reasoning
    if message.get("tool_calls"):
        result["tool_calls"] = _tool_calls(message["tool_calls"], index)
    return result


def _content(content: Any, index: int, media: Media, text_only: str | None) -> str | list[dict[str, Any]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise RequestError(f"messages[{index}].content is neither a text nor a list of parts", "messages")
    parts = [_part(part, index, media, text_only) for part in content]
    if all(isinstance(part, str) for part in parts):
        return "".join(map(str, parts))
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def _part(part: Any, index: int, media: Media, text_only: str | None) -> str | dict[str, Any]:
    """Convert a part to its text, or to the mark of an image or video for the template."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    name = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}.get(str(kind))
    if name is not None:
        text = part.get(name)
        if not isinstance(text, str):
            raise RequestError(f"messages[{index}].content has a part of type {kind!r} without {name}", "messages")
        return text
    if "audio" in str(kind):
        raise RequestError(
            f"messages[{index}].content has a part of type {str(kind)[:40]!r}; audio is not supported: send a "
            "transcript as text",
            "messages",
        )
    if text_only is not None:
        why = f": {text_only}" if text_only else ""
        raise RequestError(
            f"messages[{index}].content has a part of type {kind!r}; this model reads text only{why}", "messages"
        )
    found = media_part(part, f"messages[{index}].content") if isinstance(part, Mapping) else None
    if found is None:
        raise RequestError(
            f"messages[{index}].content has a part of type {kind!r}; known are text, image_url and video_url",
            "messages",
        )
    media.setdefault(found[0], []).append(found[1])
    return {"type": found[0]}


def _tool_calls(calls: Any, index: int) -> list[dict[str, Any]]:
    """Convert the arguments of tool calls to objects if they are JSON objects, since templates iterate over them."""
    if not isinstance(calls, list):
        raise RequestError(f"messages[{index}].tool_calls is not a list", "messages")
    result = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"messages[{index}].tool_calls holds a call without a function name", "messages")
        result.append({**call, "function": {**function, "arguments": _arguments(function.get("arguments", "{}"))}})
    return result


def _arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
