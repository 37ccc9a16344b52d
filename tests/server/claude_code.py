"""The first calls of Claude Code 2.1, in their wire form: the same fields, blocks and sizes; the texts are made up."""

from __future__ import annotations

from typing import Any

HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,"
    "mid-conversation-system-2026-01-12,prompt-caching-scope-2026-01-05",
    "x-app": "cli",
    "user-agent": "claude-cli/2.1.197 (external, cli)",
    "authorization": "Bearer none",
}
PATH = "/v1/messages?beta=true"
CACHED = {"cache_control": {"type": "ephemeral"}}
WORDS = "The tool reads what it is given and says what it found, line by line, or why it could not. "


def tools(count: int = 24, sentences: int = 40) -> list[dict[str, Any]]:
    return [
        {
            "name": f"Tool{number}",
            "description": WORDS * sentences,
            "input_schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {
                    "path": {"type": "string", "description": WORDS},
                    "limit": {"type": "integer", "exclusiveMinimum": 0, "description": WORDS},
                    "mode": {"type": "string", "enum": ["content", "count"]},
                },
                "required": ["path"],
                "additionalProperties": False,
            },
        }
        for number in range(count)
    ]


def main_call(**fields: Any) -> dict[str, Any]:
    """The call that works: a long system prompt in blocks, many tools, and a system message between the turns."""
    return {
        "model": "weft-mini",
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197; cc_entrypoint=cli;"},
            {"type": "text", "text": "You are an agent in a terminal.", **CACHED},
            {"type": "text", "text": WORDS * 400, **CACHED},
        ],
        "messages": [
            {"role": "user", "content": [
                {"type": "text", "text": f"<system-reminder>\n{WORDS * 20}\n</system-reminder>"},
                {"type": "text", "text": "count the files", **CACHED},
            ]},
            {"role": "system", "content": [{"type": "text", "text": "Today is a day.", **CACHED}]},
            {"role": "user", "content": "one two three"},
        ],
        "tools": tools(),
        "metadata": {"user_id": "user_0_account__session_0"},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "temperature": 1,
        "stream": True,
    } | fields  # fmt: skip


def title_call() -> dict[str, Any]:
    """The call for a title of the conversation: a schema, and no tools."""
    schema = {
        "type": "object",
        "properties": {"title": {"type": "string"}},
        "required": ["title"],
        "additionalProperties": False,
    }
    return {
        "model": "weft-mini",
        "system": [{"type": "text", "text": "Make a title of at most six words."}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "count the files"}]}],
        "tools": [],
        "metadata": {"user_id": "user_0_account__session_0"},
        "max_tokens": 32000,
        "temperature": 1,
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
        "stream": True,
    }


def quota_call() -> dict[str, Any]:
    return {
        "model": "weft-mini",
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "quota"}],
        "metadata": {"user_id": "user_0_account__session_0"},
    }
