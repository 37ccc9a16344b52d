"""Log probabilities in the two shapes of the OpenAI API.

Job: from the engine's entries to JSON values. Owns: both shapes. Does not know: requests.
"""

from __future__ import annotations

from typing import Any

from weft.outputs import Logprob, LogprobsDict

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def chat_logprobs(entries: list[LogprobsDict], top: int) -> dict[str, Any]:
    """``choices[].logprobs`` of a chat completion. ``top``: alternatives asked for."""
    return {"content": [_chat_entry(entry, top) for entry in entries], "refusal": None}


def _chat_entry(entry: LogprobsDict, top: int) -> dict[str, Any]:
    chosen = next(iter(entry.values()))
    return _chat_token(chosen) | {"top_logprobs": [_chat_token(value) for value in _top(entry, top)]}


def _chat_token(value: Logprob) -> dict[str, Any]:
    text = value.decoded_token or ""
    return {"token": text, "logprob": clamped(value), "bytes": list(text.encode("utf-8", "replace"))}


def completion_logprobs(
    entries: list[LogprobsDict | None], top: int, offset: int = 0
) -> tuple[dict[str, list[Any]], int]:
    """``choices[].logprobs`` of a completion, and the text offset behind its last token.

    The first token of a prompt has no log probability: its entry is None, as in the OpenAI API.
    """
    result: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for entry in entries:
        chosen = None if entry is None else next(iter(entry.values()))
        text = "" if chosen is None else chosen.decoded_token or ""
        result["tokens"].append(text)
        result["token_logprobs"].append(None if chosen is None else clamped(chosen))
        result["top_logprobs"].append(
            None if entry is None else {value.decoded_token or "": clamped(value) for value in _with_chosen(entry, top)}
        )
        result["text_offset"].append(offset)
        offset += len(text)
    return result, offset


def clamped(value: Logprob) -> float:
    return max(value.logprob, LOWEST)


def _top(entry: LogprobsDict, top: int) -> list[Logprob]:
    """The likeliest tokens, in order."""
    return sorted(entry.values(), key=lambda value: value.rank)[:top]


def _with_chosen(entry: LogprobsDict, top: int) -> list[Logprob]:
    """The likeliest tokens and the chosen one, as completions report them."""
    best = _top(entry, top)
    chosen = next(iter(entry.values()))
    return best if chosen in best else [*best, chosen]
