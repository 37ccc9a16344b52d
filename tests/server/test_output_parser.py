"""Reasoning, content and tool calls do not depend on how the text was cut, and no markup leaks."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.server.output_parser import OutputParser, Parts, parse_call

PROPERTIES = {
    "a": {"type": "integer"},
    "note": {"type": "string"},
    "name": {"type": ["string", "null"]},
    "size": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
}
TOOLS = {"add": {"properties": PROPERTIES}, "odd": {"properties": None}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=add>\n<parameter=a>\n12\n</parameter>\n"
    "<parameter=note>\n7\n</parameter>\n</function>\n</tool_call>"
)


def parse(pieces: list[str], **options: object) -> tuple[str, str, list[tuple[str, str]]]:
    parser, parts = OutputParser(**options), Parts()  # type: ignore[arg-type]
    for piece in pieces:
        parts.add(parser.feed(piece))
    parts.add(parser.finish())
    return parts.reasoning, parts.content, [(call.name, call.arguments) for call in parts.calls or []]


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        ("plain < text", "", "plain < text", []),
        ("<think>\nfirst\n</think>\n\nthen", "first", "then", []),
        ("  <think> a < b </thin k> </think>c ", "a < b </thin k>", "c ", []),
        ("not at the start <think>x</think>", "", "not at the start <think>x</think>", []),
        (f"I will add.\n{CALL}", "", "I will add.", [("add", '{"a": 1}')]),
        (f"{CALL}\n{CALL}\n done ", "", "done ", [("add", '{"a": 1}')] * 2),
        (f"<think>\nhm\n</think>\n{CALL}", "hm", "", [("add", '{"a": 1}')]),
        (XML, "", "", [("add", '{"a": 12, "note": "7"}')]),
        ("<tool_call>not a call</tool_call>", "", "not a call", []),
        ('<tool_call>{"name": "add", "arguments": {"note": "</tool_call>"}}</tool_call>x', "", "x",
         [("add", '{"note": "</tool_call>"}')]),
        ('<tool_call>{"name": "add", "arguments": {}}', "", "", [("add", "{}")]),
        ("cut off <tool_", "", "cut off", []),
        ("<think>never ends </thi", "never ends", "", []),
    ],
)  # fmt: skip
def test_parts(text: str, reasoning: str, content: str, calls: list[tuple[str, str]]) -> None:
    for pieces in ([text], list(text)):
        assert parse(pieces, reasoning=True, tools=TOOLS) == (reasoning, content, calls)


@pytest.mark.parametrize(("several", "num_calls"), [(True, 2), (False, 1)])
def test_one_call_alone_if_no_more_were_asked_for(several: bool, num_calls: int) -> None:
    text = f"{CALL}\n{CALL.replace('1', '2')}"
    for pieces in ([text], list(text)):
        parser, parts = OutputParser(tools=TOOLS, several=several), Parts()
        for piece in pieces:
            parts.add(parser.feed(piece))
        parts.add(parser.finish())
        arguments = [call.arguments for call in parts.calls or ()]
        assert arguments == ['{"a": 1}', '{"a": 2}'][:num_calls] and parser.num_calls == num_calls


def test_a_prompt_that_has_opened_the_reasoning() -> None:
    assert parse(list("\nhm\n</think>\n\nyes"), reasoning=True, in_reasoning=True) == ("hm", "yes", [])


def test_without_tools_the_markup_of_calls_is_text() -> None:
    assert parse([CALL], reasoning=True) == ("", CALL, [])


FRAGMENTS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    CALL,
    XML,
    "<",
    "\n",
    " ",
    "a",
    "{",
    '"',
    "</",
    "é😀",
]


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join), st.data())
def test_any_cut_gives_the_same_parts(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for options in ({"reasoning": True, "tools": TOOLS}, {"reasoning": True, "in_reasoning": True}, {}):
        assert parse(pieces, **options) == parse([text], **options)


@given(st.text(st.sampled_from('ab {}"\n<'), max_size=20))
def test_tool_markup_never_leaks(text: str) -> None:
    for whole in (f"{text}{CALL}{text}", f"{text}<tool_call>{text}</tool_call>"):
        _, content, _ = parse(list(whole), tools=TOOLS)
        assert "tool_call>" not in content


@pytest.mark.parametrize(
    "body",
    ["", "{", "[]", '{"name": 5}', "<function=>", '{"name": "f", "arguments": "{"}',
     '{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": "5"}', '{"name": "f", "parameters": true}',
     '{"name": "f", "arguments": [NaN]}', '{"name": "f", "arguments": {"a": 1e999}}'],
)  # fmt: skip
def test_what_is_no_call(body: str) -> None:
    assert parse_call(body, TOOLS) is None


def test_arguments_as_a_json_text() -> None:
    call = parse_call(json.dumps({"name": "add", "arguments": '{"a": 2}'}), TOOLS)
    assert call is not None and call.arguments == '{"a": 2}' and call.id.startswith("call_")


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        (r'{"name": "add", "arguments": {"note": "a\ud83d"}}', {"note": "a\ufffd"}),
        (r'{"name": "add", "arguments": {"note": "\ud83d\ude00"}}', {"note": "\U0001f600"}),
        ('{"name": "add", "arguments": null}', {}),
        ("<function=add><parameter=a>NaN</parameter></function>", {"a": "NaN"}),
        ('<function=add><parameter=a>"\\ude00"</parameter></function>', {"a": "\ufffd"}),
        ("<function=add><parameter=name>7</parameter></function>", {"name": "7"}),
        ("<function=add><parameter=name>None</parameter></function>", {"name": None}),
        ("<function=add><parameter=size>7</parameter></function>", {"size": 7}),
        ("<function=add><parameter=size>null</parameter></function>", {"size": None}),
        ("<function=odd><parameter=a>7</parameter></function>", {"a": "7"}),
    ],
)
def test_arguments_can_be_sent(body: str, arguments: object) -> None:
    """A model may escape half a character, or write NaN; the answer is JSON in UTF-8."""
    call = parse_call(body, TOOLS)
    assert call is not None and json.loads(call.arguments.encode(), parse_constant=pytest.fail) == arguments
    halves = parse_call(r'{"name": "\ud83d"}', TOOLS)
    assert halves is not None and halves.name == "\ufffd"
