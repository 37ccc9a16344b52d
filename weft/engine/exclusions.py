"""Detection of options that together exclude every token.

It runs only after the sampling of a request failed, so steps of other requests pay nothing. Biases and logits
processors exclude no token here, since a bias is finite.
"""

from collections.abc import Sequence

import numpy as np

from weft.messages import RowSampling


def no_token_left(
    sampling: RowSampling, output_token_ids: Sequence[int], mask: bytes | None, vocab_size: int
) -> str | None:
    """Name the options that leave no token after ``output_token_ids``, as an error message; None if a token is left.

    Args:
        mask: the tokens that the request's grammar allows, as in ``Grammars``; None without a grammar.
    """
    allowed: dict[str, np.ndarray] = {}  # option -> [V] bool
    if mask is not None:
        bits = np.frombuffer(mask, dtype=np.uint8)
        allowed["the structured output"] = np.unpackbits(bits, count=vocab_size, bitorder="little").astype(bool)
    if sampling.allowed_token_ids is not None:
        allowed["allowed_token_ids"] = _only(sampling.allowed_token_ids, vocab_size)
    blocked = [word[-1] for word in sampling.bad_words or () if _comes_next(word, output_token_ids)]
    if blocked:
        allowed["bad_words"] = ~_only(blocked, vocab_size)
    if len(output_token_ids) < sampling.min_tokens and sampling.blocked_before_min:
        allowed["min_tokens"] = ~_only(sampling.blocked_before_min, vocab_size)
    if not allowed or _any(allowed):
        return None
    for name in list(allowed):  # an option is not to blame if no token is left without it
        others = {other: tokens for other, tokens in allowed.items() if other != name}
        if others and not _any(others):
            allowed = others
    return (
        f"after {len(output_token_ids)} generated tokens, {' and '.join(allowed)} leave no token that may come next; "
        "allow more tokens (the end of the text is one too), or leave one of these options out"
    )


def _only(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    tokens = np.zeros(vocab_size, dtype=bool)
    tokens[token_ids] = True
    return tokens


def _any(allowed: dict[str, np.ndarray]) -> bool:
    return bool(np.logical_and.reduce(list(allowed.values())).any())


def _comes_next(word: list[int], output_token_ids: Sequence[int]) -> bool:
    """Whether only the last token of the bad word is missing."""
    start = len(word) - 1
    return start == 0 or list(output_token_ids[-start:]) == word[:-1]
