"""Anthropic's usage counts a cached prompt token once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from weft.server.anthropic_messages import MessagesBuilder


def test_cached_tokens_are_not_input_tokens_too() -> None:
    usage = {"prompt_tokens": 30, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 12}}
    builder: Any = SimpleNamespace(chat=SimpleNamespace(call=SimpleNamespace(usage=lambda: usage)))
    found = MessagesBuilder._usage(builder)
    assert (found["input_tokens"], found["cache_read_input_tokens"], found["output_tokens"]) == (18, 12, 7)
