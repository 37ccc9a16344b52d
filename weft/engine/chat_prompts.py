"""Prompts of conversations. Each is rendered once, and only its new part is encoded.

Job: the text of a conversation, its token ids, and its turn boundaries. Turn boundaries are token positions at which
later prompts are likely to diverge, where storing a recurrent state pays. Owns: the encodings of parts of earlier
conversations, and what is known of the template. Does not know: caches, states, or how a position is used.

Chat templates rewrite history. Many drop the reasoning of earlier answers, so the end of an answer is often no prefix
of the next prompt. The template itself is asked: the same messages are rendered with a made-up answer and a made-up
user turn. A turn boundary is the end of the longest common token prefix of both prompts. A second boundary is the end
of the system and tools block, found with another first user turn. A made-up conversation is rendered once per shape,
since the end of the answer's header depends on the template alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import msgspec

from weft.errors import RequestError
from weft.multimodal.items import MediaItem
from weft.text.chat_template import DEFAULT_OPTIONS, TemplateOptions
from weft.text.encoder import SAMPLE
from weft.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]

# Two texts that no message is likely to start with. They differ at once, so neither is a prefix of the other.
_ANSWER = {"role": "assistant", "content": "\u2042 sentinel answer"}
_QUESTION = {"role": "user", "content": "\u2051 sentinel question"}

MAX_CACHED_TOKENS = 500_000
"""Token limit of one generation of cached encodings. Two generations are kept; encodings that the later one does not
use are dropped."""

_MAX_REMEMBERED = 256
_MAX_TAIL = 2000


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a prompt whose tokens do not depend on the text around it: an added token, or the text between two
    added tokens."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of prompts of one shape: the text from the boundary's segment on, and the tokens after the boundary."""

    text: str
    num_tokens: int


@dataclass(slots=True)
class RenderedChat:
    """A conversation as text, with texts for comparison that show its turn boundaries.

    Attributes:
        next_turn: the text with a made-up next turn, or the end of prompts of its shape; None: not wanted, or refused.
        system: the system and tools block with another first turn, as text or encoded; None as above.
        shape, system_key: the keys under which both are remembered.
    """

    text: str
    next_turn: str | Tail | None = None
    system: str | list[Segment] | None = None
    shape: bytes | None = None
    system_key: bytes = b""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as a prompt.

    Attributes:
        turn_boundaries: positions in ``token_ids``, ascending; none if the text was longer than the limit.
        media: its images and videos, once their placeholders are in ``token_ids`` (``InputProcessor.with_media``).
    """

    text: str
    token_ids: list[int]
    turn_boundaries: list[int]
    media: list[MediaItem] = field(default_factory=list)


class ChatPrompts:
    """Makes the prompts of one tokenizer. Several threads may use it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._segments = Segments(tokenizer)
        self._tails: dict[bytes, Tail] = {}
        self._systems: dict[bytes, list[Segment]] = {}
        self._other: tuple[str, ChatPrompts] | None = None

    def with_template(self, template: str) -> ChatPrompts:
        """Return the maker of prompts with another template, made once while callers keep to it."""
        if self._other is None or self._other[0] != template:
            self._other = template, ChatPrompts(self._tokenizer.with_template(template))
        return self._other[1]

    def make(
        self, messages: Sequence[Message], options: TemplateOptions = DEFAULT_OPTIONS, *, turn_boundaries: bool = False
    ) -> ChatPrompt:
        """Render and encode a conversation."""
        return self.encode(self.render(messages, options, turn_boundaries=turn_boundaries))

    def render(
        self,
        messages: Sequence[Message],
        options: TemplateOptions = DEFAULT_OPTIONS,
        *,
        turn_boundaries: bool = False,
    ) -> RenderedChat:
        """Run the chat template.

        Args:
            messages: messages from ``chat_messages.template_messages``.

        Raises:
            RequestError: there is no template, there are no messages, or the template refuses them.
        """
        render = self._tokenizer.template.render
        text, shown = _rendered(messages, partial(render, options=options))
        chat = RenderedChat(text)
        if turn_boundaries and not options.continue_final_message:
            plain = partial(render, options=replace(options, add_generation_prompt=True))
            variables = _encoded([options.tools, options.chat_template_kwargs, options.add_generation_prompt])
            self._look_up_next_turn(chat, shown, plain, variables)
            self._look_up_system(chat, shown, plain, variables)
        return chat

    def _look_up_next_turn(
        self, chat: RenderedChat, messages: Sequence[Message], render: Render, variables: bytes
    ) -> None:
        chat.shape = _shape(messages, variables)
        tail = self._tails.get(chat.shape) if chat.shape is not None else None
        is_known = tail is not None and chat.text.endswith(tail.text)
        chat.next_turn = tail if is_known else _made_up(render, [*messages, _ANSWER, _QUESTION])

    def _look_up_system(
        self, chat: RenderedChat, messages: Sequence[Message], render: Render, variables: bytes
    ) -> None:
        system = [message for message in messages[:1] if message["role"] in ("system", "developer")]
        chat.system_key = variables + _encoded(system)
        chat.system = self._systems.get(chat.system_key) or _made_up(render, [*system, _QUESTION])

    def encode(self, chat: RenderedChat, limit: int | None = None) -> ChatPrompt:
        """Encode a rendered conversation. ``limit``: the caller rejects more tokens than that, see
        ``Tokenizer.encode``."""
        segments = self._segments.encode(chat.text, limit)
        token_ids = list(chain.from_iterable(segment.token_ids for segment in segments))
        if limit is not None and len(token_ids) > limit:
            return ChatPrompt(chat.text, token_ids, [])
        boundaries = {self._next_turn(chat, segments, len(token_ids)), self._system_end(chat, segments)}
        return ChatPrompt(chat.text, token_ids, sorted(boundaries - {0}))

    def _next_turn(self, chat: RenderedChat, segments: list[Segment], num_tokens: int) -> int:
        """The position at which the next turn diverges from the prompt; 0 if unknown. New shapes are remembered."""
        if chat.next_turn is None:
            return 0
        if isinstance(chat.next_turn, Tail):
            return num_tokens - chat.next_turn.num_tokens
        shared = _common_prefix(segments, self._segments.encode(chat.next_turn))
        tail = _tail(segments, num_tokens - shared)
        if chat.shape is not None and len(tail.text) <= _MAX_TAIL:
            _remember(self._tails, chat.shape, tail)
        return shared

    def _system_end(self, chat: RenderedChat, segments: list[Segment]) -> int:
        """The position at which another first turn diverges from the prompt; 0 if unknown."""
        if chat.system is None:
            return 0
        if isinstance(chat.system, str):
            chat.system = self._segments.encode(chat.system)
            _remember(self._systems, chat.system_key, chat.system)
        return _common_prefix(segments, chat.system)


class Segments:
    """Encode texts segment by segment, with a bounded cache of encoded segments.

    Most tokenizers encode the text between two added tokens (``<|im_start|>``) independently of its surroundings. A
    sample detects other tokenizers, for which the whole text is one segment.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = _split_pattern(tokenizer)
        self._new: dict[str, Segment] = {}
        self._old: dict[str, Segment] = {}
        self._num_new_tokens = 0

    def encode(self, text: str, limit: int | None = None) -> list[Segment]:
        parts = [text] if self._added is None else filter(None, self._added.split(text))
        segments, left = [], limit
        for part in parts:
            segments.append(self._segment(part, left))
            if left is not None:
                left -= len(segments[-1].token_ids)
                if left < 0:
                    break
        return segments

    def _segment(self, text: str, limit: int | None) -> Segment:
        found = self._new.get(text)
        if found is not None:
            return found
        found = self._old.get(text)
        if found is None:
            found = Segment(text, tuple(self._tokenizer.encode(text, add_special_tokens=False, limit=limit)))
        if limit is None or len(found.token_ids) <= limit:  # an encoding that exceeds the limit may be incomplete
            self._keep(found)
        return found

    def _keep(self, segment: Segment) -> None:
        self._num_new_tokens += len(segment.token_ids)
        if self._num_new_tokens > MAX_CACHED_TOKENS:
            self._old, self._new = self._new, {}
            self._num_new_tokens = len(segment.token_ids)
        self._new[segment.text] = segment


def _split_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """A pattern that finds the added tokens of a text; None if the text between two of them is not encoded
    independently."""
    added = tokenizer.hf.backend_tokenizer.get_added_tokens_decoder().values()
    if not added or any(t.lstrip or t.rstrip or t.single_word for t in added):
        return None
    names = sorted((token.content for token in added), key=len, reverse=True)
    pattern = re.compile("(" + "|".join(map(re.escape, names)) + ")")
    sample = "".join(f"{name}user\n{SAMPLE}{name}\n{name} x{name}{name}é" for name in names[:4])
    encode = partial(tokenizer.encode, add_special_tokens=False)
    return pattern if encode(sample) == [i for part in pattern.split(sample) if part for i in encode(part)] else None


def _rendered(messages: Sequence[Message], render: Render) -> tuple[str, Sequence[Message]]:
    """Render a conversation. Returns the text, and the messages that the template accepted.

    Some templates refuse a system message after the first position, which agents send between turns. The message is
    rendered as a user message instead. Raises RequestError.
    """
    try:
        return render(messages), messages
    except RequestError:
        moved = [{**m, "role": "user"} if i and m["role"] == "system" else m for i, m in enumerate(messages)]
        if moved == list(messages):
            raise
        return render(moved), moved


def _made_up(render: Render, messages: Sequence[Message]) -> str | None:
    """Render a made-up conversation. Returns None if the template refuses it, so that nothing is known of the next
    turn."""
    try:
        return render(messages)
    except RequestError:
        return None


def _shape(messages: Sequence[Message], variables: bytes) -> bytes | None:
    """The shape of a conversation, which decides how a template continues it. Returns None if the texts may matter as
    well, as reasoning does that the template drops from the history."""
    last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=0)
    turn = messages[last_user:]
    if any(m.get("reasoning_content") or "</think>" in str(m.get("content")) for m in turn if m["role"] == "assistant"):
        return None
    kinds = [message["role"] + ("!" if message.get("tool_calls") else "") for message in turn]
    return variables + _encoded([sorted(set(kinds)), kinds[-1:]])


def _encoded(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value, enc_hook=repr)
    except UnicodeEncodeError as error:
        message = f"messages, tools or chat_template_kwargs are not valid Unicode: {error}"
        raise RequestError(message, "messages") from None


def _tail(segments: list[Segment], num_tokens: int) -> Tail:
    """The end of a prompt, from the segment in which its last ``num_tokens`` begin; at least the last segment."""
    start, left = len(segments) - 1, num_tokens
    while start > 0 and left > len(segments[start].token_ids):
        left -= len(segments[start].token_ids)
        start -= 1
    return Tail("".join(segment.text for segment in segments[start:]), num_tokens)


def _common_prefix(a: Sequence[Segment], b: Sequence[Segment]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x is not y and x.token_ids != y.token_ids:
            pairs = zip(x.token_ids, y.token_ids, strict=False)
            same = next((i for i, (s, t) in enumerate(pairs) if s != t), min(len(x.token_ids), len(y.token_ids)))
            return count + same
        count += len(x.token_ids)
    return count


def _remember(table: dict[bytes, Any], key: bytes, value: Any) -> None:
    if len(table) >= _MAX_REMEMBERED:
        table.clear()
    table[key] = value
