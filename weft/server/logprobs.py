"""Log probabilities in the two shapes of the OpenAI API.

Job: from the engine's entries to JSON values. Owns: both shapes. Does not know: requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from weft.outputs import Logprob, LogprobsDict, RequestOutput

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


BytesOf = Callable[[int], bytes]
"""The bytes that a token stands for."""


def chat_logprobs(entries: Sequence[LogprobsDict], top: int, bytes_of: BytesOf) -> dict[str, Any]:
    """``choices[].logprobs`` of a chat completion. ``top``: alternatives asked for."""
    return {"content": [_chat_entry(entry, top, bytes_of) for entry in entries], "refusal": None}


def _chat_entry(entry: LogprobsDict, top: int, bytes_of: BytesOf) -> dict[str, Any]:
    chosen = next(iter(entry))
    best = sorted(entry, key=lambda token: entry[token].rank)[:top]
    tops = [_chat_token(token, entry[token], bytes_of) for token in best]
    return _chat_token(chosen, entry[chosen], bytes_of) | {"top_logprobs": tops}


def _chat_token(token: int, value: Logprob, bytes_of: BytesOf) -> dict[str, Any]:
    return {"token": value.decoded_token or "", "logprob": clamped(value), "bytes": list(bytes_of(token))}


def prompt_logprobs(output: RequestOutput) -> list[dict[str, Any] | None]:
    """Per prompt token: token id (as text) -> log probability, rank, text; None for the first."""
    return [
        None
        if entry is None
        else {
            str(token): {"logprob": clamped(v), "rank": v.rank, "decoded_token": v.decoded_token}
            for token, v in entry.items()
        }
        for entry in output.prompt_logprobs or []
    ]


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
