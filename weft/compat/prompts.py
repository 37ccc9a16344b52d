"""Prompts as typed dicts. A plain dict with the same keys does as well."""

from typing import Any, TypedDict

from weft.engine.prompts import Prompt as PromptType

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]


class _Shared(TypedDict, total=False):
    multi_modal_data: dict[str, Any]
    checkpoint_positions: list[int]
    cache_salt: str


class TextPrompt(_Shared):
    """A prompt as text."""

    prompt: str


class TokensPrompt(_Shared, total=False):
    """A prompt as token ids, with its text if that is known."""

    prompt_token_ids: list[int]
    prompt: str
