"""Log probabilities in the two shapes of the OpenAI API."""

from collections.abc import Callable, Sequence
from typing import Any

from weft.outputs import Logprob, LogprobsDict, RequestOutput

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


BytesOf = Callable[[int], bytes]
"""The bytes that a token stands for."""


def chat_logprobs(entries: Sequence[LogprobsDict], top: int, bytes_of: BytesOf, *, as_ids: bool) -> dict[str, Any]:
    """``choices[].logprobs`` of a chat completion.

    Args:
        entries: of some tokens.
        top: alternatives asked for; -1: all.
        bytes_of: see ``BytesOf``.
        as_ids: name tokens ``token_id:N`` instead of by their text, which two tokens may share.
    """
    return {"content": [_chat_entry(entry, top, bytes_of, as_ids) for entry in entries], "refusal": None}


def _chat_entry(entry: LogprobsDict, top: int, bytes_of: BytesOf, as_ids: bool) -> dict[str, Any]:
    chosen = next(iter(entry))
    tops = [_chat_token(token, entry[token], bytes_of, as_ids) for token in _likeliest(entry, top)]
    return _chat_token(chosen, entry[chosen], bytes_of, as_ids) | {"top_logprobs": tops}


def _chat_token(token: int, value: Logprob, bytes_of: BytesOf, as_ids: bool) -> dict[str, Any]:
    return {"token": _name(token, value, as_ids), "logprob": clamped(value), "bytes": list(bytes_of(token))}


def _name(token: int, value: Logprob, as_ids: bool) -> str:
    """Without a tokenizer tokens have no text; equal names would take each other's place."""
    return f"token_id:{token}" if as_ids or value.decoded_token is None else value.decoded_token


def _likeliest(entry: LogprobsDict, top: int) -> list[int]:
    """The likeliest tokens, in order; -1: all."""
    return sorted(entry, key=lambda token: entry[token].rank)[: None if top == -1 else top]


def _with_chosen(entry: LogprobsDict, top: int) -> list[int]:
    """The chosen token, and the likeliest ones."""
    return list(dict.fromkeys([next(iter(entry)), *_likeliest(entry, top)]))


def prompt_logprobs(output: RequestOutput, top: int) -> list[dict[str, Any] | None]:
    """Per prompt token: token id (as text) -> log probability, rank, text; None for the first. ``top``: as above."""
    return [
        None
        if entry is None
        else {
            str(token): {"logprob": clamped(v), "rank": v.rank, "decoded_token": v.decoded_token}
            for token, v in ((token, entry[token]) for token in _with_chosen(entry, top))
        }
        for entry in output.prompt_logprobs or []
    ]


def completion_logprobs(
    entries: Sequence[LogprobsDict | None], top: int, offset: int = 0, *, as_ids: bool
) -> tuple[dict[str, list[Any]], int]:
    """``choices[].logprobs`` of a completion, and the text offset behind its last token; arguments as above. The chosen
    token is the first of its alternatives.

    The first token of a prompt has no log probability: its entry is None, as in the OpenAI API.
    """
    result: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for entry in entries:
        result["text_offset"].append(offset)
        alternatives: dict[str, float] | None = None
        if entry is None:
            name, logprob = "", None
        else:
            chosen = next(iter(entry))
            name, logprob = _name(chosen, entry[chosen], as_ids), clamped(entry[chosen])
            alternatives = {}
            for token in _with_chosen(entry, top):  # several may have one name: the chosen one goes first
                alternatives.setdefault(_name(token, entry[token], as_ids), clamped(entry[token]))
            offset += len(entry[chosen].decoded_token or "")
        result["tokens"].append(name)
        result["token_logprobs"].append(logprob)
        result["top_logprobs"].append(alternatives)
    return result, offset


def clamped(value: Logprob) -> float:
    return max(value.logprob, LOWEST)
