"""The compiled template, beside transformers' own call."""

from __future__ import annotations

from typing import Any

import pytest

from tests.small_tokenizers import BYTE_LEVEL
from weft.config import resolve
from weft.errors import ConfigError, RequestError
from weft.text import chat_template
from weft.text.chat_template import ChatTemplate, TemplateOptions
from weft.text.tokenizer import Tokenizer

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2.5, None, True]}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "items": {"keys": "é<"}}}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "be <b>brief</b>"},
    {"role": "user", "content": " {{ hi }} ", "name": "items"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3.5", "tool_call_id": "1"},
    {"role": "assistant", "content": "<think>\n so \n</think>\n\nyes"},
    {"role": "user", "content": [{"type": "text", "text": "part"}]},
]
TEMPLATES = [
    "{% for m in messages %}{{ m.role }}{{ m['content'] }}{{ m.items() | list }}{{ m.get('name') }}{{ m.none }}"
    "{% endfor %}{{ tools | tojson }}{{ pad_token }}{{ mood }}{{ documents }}{{ add_generation_prompt }}",
    "{% for m in messages if m.content is string %}{{ loop.index }}{{ m.content | trim }}{% if loop.index > 2 %}"
    "{% break %}{% endif %}{% endfor %}{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ dict(a=1) }}",
]


@pytest.fixture(scope="module")
def bundled() -> Tokenizer:
    return Tokenizer.load(resolve(device="cpu").tokenizer_path)


def with_template(text: str) -> Tokenizer:
    BYTE_LEVEL.hf.chat_template = text
    return BYTE_LEVEL


@pytest.fixture(autouse=True)
def _no_template_stays() -> Any:
    yield
    BYTE_LEVEL.hf.chat_template = None


@pytest.mark.parametrize("template", [None, *TEMPLATES])
def test_the_compiled_template_gives_what_transformers_gives(
    template: str | None, bundled: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = bundled if template is None else with_template(template)
    cases = [
        (CONVERSATION[:end], TemplateOptions(tools, {"mood": "good", "enable_thinking": on}))
        for end in range(1, len(CONVERSATION) + 1)
        for tools in (None, [TOOL])
        for on in (True, False)
    ]
    ours = [tokenizer.template.render(*case) for case in cases]
    monkeypatch.setattr(chat_template, "_is_prepared", lambda *given: False)
    assert ours == [tokenizer.template.render(*case) for case in cases]


class Text(str):
    """May have methods that write files."""


@pytest.mark.parametrize(
    ("message", "is_prepared"),
    [
        ({"role": "user", "content": "x"}, True),
        ({"role": "user", "content": "x", "tool_calls": [{"a": {"b": (1,)}}]}, False),
        ({"role": "user", "content": Text("x")}, False),
        ({"role": "user", "content": None}, False),
        ({"role": "assistant", "content": "x", "reasoning_content": "y"}, False),
    ],
)
def test_what_transformers_would_change_goes_through_it(
    message: dict[str, Any], is_prepared: bool, bundled: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    template = ChatTemplate(bundled.hf)
    monkeypatch.setattr(type(bundled.hf), "apply_chat_template", lambda *given, **named: calls.append(given) or "")
    template.render([message])
    assert bool(calls) is not is_prepared


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages[0].content.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_holds(template: str) -> None:
    with pytest.raises(RequestError, match=r"refuses these messages: .*unsafe"):
        with_template(template).template.render([{"role": "user", "content": "x"}])


def test_a_template_that_is_none_is_told_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"not a valid template .Expected an expression"):
        with_template("{% if %}").template.compile()
