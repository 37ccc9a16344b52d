"""Parsing an answer as it grows: reasoning, content, tool calls.

Job: a state machine over the text of one completion. Owns: the markup of Qwen models (``<think>``, ``<tool_call>`` with
JSON inside, as Hermes writes it, or with XML inside, as Qwen3-Coder writes it). Does not know: HTTP, tokens.

The parts depend on the text alone, never on how it was cut into pieces, and the markup itself is in none of them.
Whitespace next to markup belongs to the markup. A tool call is reported once it is complete.
"""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function. ``arguments`` is a JSON object as text, as the OpenAI API wants it."""

    name: str
    arguments: str
    id: str


@dataclass(slots=True)
class Parts:
    """New output: texts to append, calls in order. ``logprobs`` are those of the content, if they were requested."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] | None = None
    logprobs: Sequence[dict[str, Any]] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def add(self, other: Parts) -> None:
        self.content += other.content
        self.reasoning += other.reasoning
        if other.calls:
            self.calls = (self.calls or []) + other.calls


class OutputParser:
    """Parses one completion.

    Args:
        reasoning: tell reasoning apart.
        in_reasoning: the prompt has already opened the reasoning.
        tools: JSON schema of the parameters by function name; None: tool calls are ordinary text.
        several: False: calls after the first are left out.
    """

    def __init__(
        self,
        *,
        reasoning: bool = False,
        in_reasoning: bool = False,
        tools: Mapping[str, Any] | None = None,
        several: bool = True,
    ) -> None:
        self._tools, self._several = tools, several
        self._state = "reasoning" if in_reasoning else "start" if reasoning else "content"
        self._buffer = ""
        self._skip_space = in_reasoning
        self.num_calls = 0

    @property
    def is_plain(self) -> bool:
        """True if all further text is content as it stands."""
        return self._state == "content" and self._tools is None and not self._skip_space

    def feed(self, text: str) -> Parts:
        """Take in more text; what can be sent now."""
        if self.is_plain:
            return Parts(content=text)
        self._buffer += text
        parts = Parts()
        while self._advance(parts):
            pass
        return parts

    def finish(self, *, is_cut_off: bool = False) -> Parts:
        """The text has ended: what was held back. ``is_cut_off``: by ``max_tokens``; half a call is then dropped."""
        parts, rest = Parts(), self._buffer
        self._buffer = ""
        if self._state == "call":
            if not is_cut_off or parse_call(rest, self._tools or {}) is not None:
                self._end_call(rest, parts)
        elif self._state != "reasoning" and not rest.lstrip().startswith(("<thi", "<tool")):
            parts.content = rest  # in the other cases it is the beginning of a tag, cut off
        return parts

    def _advance(self, parts: Parts) -> bool:
        """One step of the machine. Returns False if it needs more text."""
        if self._skip_space:
            self._buffer = self._buffer.lstrip()
            self._skip_space = not self._buffer
        if not self._buffer:
            return False
        match self._state:
            case "start":
                return self._start()
            case "reasoning":
                return self._reasoning(parts)
            case "content":
                return self._content(parts)
            case _:
                return self._call(parts)

    def _start(self) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(THINK):
            self._buffer, self._state, self._skip_space = text[len(THINK) :], "reasoning", True
            return True
        if THINK.startswith(text):
            return False
        self._state = "content"
        return True

    def _reasoning(self, parts: Parts) -> bool:
        text, found = self._until(END_THINK)
        parts.reasoning += text
        if found:
            self._state, self._skip_space = "content", True
        return found

    def _content(self, parts: Parts) -> bool:
        if self._tools is None:
            parts.content += self._buffer
            self._buffer = ""
            return False
        text, found = self._until(CALL)
        parts.content += text
        if found:
            self._state = "call"
        return found

    def _call(self, parts: Parts) -> bool:
        start = 0
        while (end := self._buffer.find(END_CALL, start)) >= 0:
            body = self._buffer[:end]
            if not _inside_string(body):
                self._buffer = self._buffer[end + len(END_CALL) :]
                self._end_call(body, parts)
                self._state, self._skip_space = "content", True
                return True
            start = end + 1
        return False

    def _end_call(self, body: str, parts: Parts) -> None:
        """Take a complete call. A text that is no call becomes content, without the markup."""
        call = parse_call(body, self._tools or {})
        if call is None:
            parts.content += body.replace(CALL, "").replace(END_CALL, "").strip()
        elif self._several or not self.num_calls:
            parts.calls = [*(parts.calls or []), call]
            self.num_calls += 1

    def _until(self, marker: str) -> tuple[str, bool]:
        """Text before ``marker``, without the space in front of it, and whether the marker was there; what may belong
        to the marker stays in the buffer."""
        at = self._buffer.find(marker)
        if at >= 0:
            text, self._buffer = self._buffer[:at].rstrip(), self._buffer[at + len(marker) :]
            return text, True
        end = len(self._buffer) - _overlap(self._buffer, marker)
        end = len(self._buffer[:end].rstrip())
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        return text, False


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` that begins ``marker``."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:n])), 0)


def _inside_string(body: str) -> bool:
    """True if JSON stops within a string: an end tag there is part of an argument."""
    if not body.lstrip().startswith("{"):
        return False
    try:
        json.JSONDecoder(strict=False).raw_decode(body.strip())
    except (json.JSONDecodeError, RecursionError) as error:
        return "Unterminated string" in str(error)
    return False


def parse_call(body: str, tools: Mapping[str, Any]) -> ToolCall | None:
    """The call between the tags, in either format; None if it is neither."""
    text = body.strip()
    parsed = _parse_xml(text, tools) if text.startswith("<function=") else _parse_json(text)
    if parsed is None:
        return None
    name, arguments = parsed
    return ToolCall(_whole(name), _whole(json.dumps(arguments, ensure_ascii=False)), new_call_id())


def _whole(text: str) -> str:
    """Without halves of a character, which an escape in JSON can name but no answer can hold."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _loads(text: str, *, strict: bool = True) -> Any:
    """Decode a JSON text. Raises ValueError, also for NaN and infinity, and RecursionError."""
    return json.loads(text, strict=strict, parse_constant=_finite, parse_float=_finite)


def _finite(text: str) -> float:
    if math.isfinite(value := float(text)):
        return value
    raise ValueError(f"{text} is not finite")


def _parse_json(text: str) -> tuple[str, dict[str, Any]] | None:
    """Arguments that are no object are no arguments: callers pass them on by name, and the Anthropic protocol has no
    place for others. ``null`` means none."""
    try:
        call = _loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the arguments as a JSON text
        try:
            arguments = _loads(arguments)
        except (ValueError, RecursionError):
            return None
    arguments = {} if arguments is None else arguments
    return (call["name"], arguments) if isinstance(arguments, dict) else None


_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


def _parse_xml(text: str, tools: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    function = _FUNCTION.match(text)
    if function is None:
        return None
    name = function.group(1).strip()
    schema = tools.get(name)
    properties = schema.get("properties") if isinstance(schema, dict) else None
    schemas = properties if isinstance(properties, dict) else {}
    arguments = {
        key.strip(): _typed(value.removeprefix("\n").removesuffix("\n"), schemas.get(key.strip()))
        for key, value in _PARAMETER.findall(function.group(2))
    }
    return name, arguments


def _typed(value: str, schema: Any) -> Any:
    """A parameter's text as its schema wants it. Where a text is allowed it stays one, but for the word for null where
    null is allowed too."""
    kinds, word = _kinds(schema), value.strip().lower()
    if "null" in kinds and word in ("null", "none"):
        return None
    if not kinds or "string" in kinds:
        return value
    try:
        return _loads(value)
    except (ValueError, RecursionError):
        return {"true": True, "false": False, "none": None}.get(word, value)


def _kinds(schema: Any) -> list[Any]:
    """The types that a schema allows, its alternatives' included; none if it names none."""
    if not isinstance(schema, dict):
        return []
    kinds = schema.get("type")
    if kinds is not None:
        return kinds if isinstance(kinds, list) else [kinds]
    choices = schema.get("anyOf") or schema.get("oneOf")
    return [kind for one in choices for kind in _kinds(one)] if isinstance(choices, list) else []
