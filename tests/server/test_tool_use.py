"""``tool_choice``: which tools an answer may call."""

from __future__ import annotations

import pytest

from weft.assets import MODEL_DIR
from weft.server.protocol import ChatCompletionRequest
from weft.server.structured import forced_calls
from weft.server.tool_use import ToolUse, tool_use
from weft.text.tokenizer import Tokenizer

SCHEMAS = {"add": {"type": "object", "properties": {"a": {"type": "integer"}}}, "now": {"type": "object"}}


def chosen(**fields: object) -> ToolUse:
    tools = [{"type": "function", "function": {"name": name, "parameters": s}} for name, s in SCHEMAS.items()]
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], tools=tools, **fields)  # type: ignore[arg-type]
    return tool_use(request, "auto")


def test_a_named_function_is_the_only_one_that_is_called() -> None:
    """The template shows all of them."""
    found = chosen(tool_choice={"type": "function", "function": {"name": "now"}}, parallel_tool_calls=True)
    assert found.forced == {"now": SCHEMAS["now"]} and not found.several
    assert found.schemas == SCHEMAS and found.shown is not None and len(found.shown) == 2
    grammar = forced_calls(found.forced, Tokenizer.load(MODEL_DIR), several=found.several, max_bytes=10_000).grammar()
    assert "now" in grammar and "add" not in grammar


@pytest.mark.parametrize("several", [True, False])
def test_any_function_is_called_where_one_is_required(several: bool) -> None:
    found = chosen(tool_choice="required", parallel_tool_calls=several)
    assert found.forced == SCHEMAS and found.several is several
    free = chosen(parallel_tool_calls=several)
    assert free.forced is None and free.schemas == SCHEMAS and free.several is several
