"""Drafts without a model: what followed the sequence's latest tokens the last time that they stood in it.

Job: find the latest earlier occurrence of the longest suffix of prompt and output, and propose what came after it
(prompt lookup; A. Saxena, "Prompt Lookup Decoding"). Owns: every request's tokens as one growing array. Does not know:
states, verification.
"""

from __future__ import annotations

import numpy as np

from weft.request import Request


class NgramProposer:
    """Args: ``low``, ``high``: tokens of a suffix that is looked up."""

    def __init__(self, low: int, high: int) -> None:
        self._low, self._high = low, high
        self._histories: dict[str, History] = {}

    def propose(self, request: Request, count: int) -> list[int]:
        """Up to ``count`` tokens that may follow the known tokens of ``request``; none if no suffix came before."""
        history = self._histories.get(request.request_id)
        if history is None:
            history = self._histories[request.request_id] = History(request.prompt_token_ids)
        history.extend(request.output_token_ids[history.length - request.num_prompt_tokens :])
        return continuation(history.tokens, self._low, self._high, count)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._histories.pop(request_id, None)


class History:
    """Token ids in an array that doubles when it is full; ``length`` of them are there."""

    def __init__(self, token_ids: list[int]) -> None:
        self._array = np.zeros(0, dtype=np.int32)
        self.length = 0
        self.extend(token_ids)

    def extend(self, token_ids: list[int]) -> None:
        """Append them."""
        end = self.length + len(token_ids)
        if end > len(self._array):
            self._array = np.concatenate([self.tokens, np.zeros(2 * end - self.length, dtype=np.int32)])
        self._array[self.length : end] = token_ids
        self.length = end

    @property
    def tokens(self) -> np.ndarray:
        """``[length]`` int32."""
        return self._array[: self.length]


def continuation(tokens: np.ndarray, low: int, high: int, count: int) -> list[int]:
    """What followed the latest earlier occurrence of the longest suffix of ``tokens``.

    Args:
        tokens: ``[N]`` integers.
        low, high: shortest and longest suffix that counts.
        count: tokens wanted. Where the occurrence is nearer to the end than that, what follows repeats.

    Returns:
        ``count`` tokens, or none if no suffix of ``low`` tokens stands there twice.
    """
    last, length = len(tokens) - 1, 1
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # where the suffix of ``length`` tokens ends
    while len(ends) and length < min(high, last):
        earlier = ends[ends >= length]
        longer = earlier[tokens[earlier - length] == tokens[last - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    if not len(ends) or length < low:
        return []
    start = int(ends[-1]) + 1
    return tokens[start + np.arange(count) % (len(tokens) - start)].tolist()
