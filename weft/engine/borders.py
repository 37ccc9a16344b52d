"""Where the next prompts of a conversation will leave this one.

Job: find the token positions at which a recurrent state is worth keeping when a chat is rendered.
Owns: the sentinel rule. Does not know: caches, states, how a position is used.

Chat templates rewrite history: many drop the reasoning of earlier answers, so the end of an answer is often not a
prefix of the next prompt. The rule is exact in tokens and asks the template itself: the border is the longest common
token prefix of the prompt and of the same messages followed by a made-up answer and a made-up user turn. A second
border is the end of the system and tools block, found the same way with another first user turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weft.errors import RequestError

Messages = Sequence[Mapping[str, Any]]

# Two texts that no message is likely to start with; unlike each other, so that neither is a prefix of the other.
_ANSWER, _QUESTION = "\u2042 sentinel answer", "\u2051 sentinel question"


def conversation_borders(
    messages: Messages, token_ids: Sequence[int], encode: Callable[[list[Mapping[str, Any]]], Sequence[int]]
) -> list[int]:
    """Positions in ``token_ids`` where later prompts are likely to leave, ascending.

    Args:
        messages: the conversation that was rendered.
        token_ids: its prompt.
        encode: token ids of other messages rendered in the same way (same tools, variables, generation prompt).
    """
    next_turn = [*messages, {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _QUESTION}]
    system = [message for message in messages[:1] if message.get("role") in ("system", "developer")]
    borders = set()
    for other in (next_turn, [*system, {"role": "user", "content": _QUESTION}]):
        try:
            shared = _common_prefix(token_ids, encode(other))
        except RequestError:
            continue  # a template may refuse made-up turns; then nothing is known of what follows
        borders.add(shared)
    return sorted(borders - {0})


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
