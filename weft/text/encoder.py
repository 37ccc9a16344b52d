"""Encoding of long texts in parts, so that other threads run in between.

A text is cut only at positions that do not change its tokens. Each part is encoded in a call of its own, which releases
the interpreter lock. One call for the whole text would use 130 times its memory, and would hold the lock while freeing
that memory.
"""

from collections.abc import Iterator
from typing import Any

PIECE = 1 << 14
"""Approximate number of characters in a part."""

_SEARCH = PIECE // 2

SAMPLE = (
    "The 3 cats' tails, don't ask (why)...  two  spaces\n\nlines\n  4 indented\ttabs \n end_of x=1;y+=22 1,234.5 "
    "naïve Grüße: 東京 は 12 度。 한국 어 नम स्ते العر بية 👍🏽 ok ' s 't it's UPPER lowerUPPER a1b2c3 \r\n-- >> !! ?! "
)
"""A text that tests the rule of ``_may_cut``. If the rule holds at every position here, the tokenizer obeys it."""


def cuts(text: str) -> list[int]:
    """Every position at which ``text`` may be cut."""
    return [at for at in range(1, len(text)) if _may_cut(text, at)]


def _may_cut(text: str, at: int) -> bool:
    """Whether no word of a byte-level vocabulary spans the position. Pre-tokenizers begin a new word at a space after
    another character, and at a digit after a letter."""
    left, right = text[at - 1], text[at]
    if right == " ":
        return not left.isspace()
    return right in "0123456789" and left.isascii() and left.isalpha()


def pieces(text: str, size: int = PIECE) -> Iterator[str]:
    """Cut ``text`` into parts of about ``size`` characters. A part without a position to cut at is longer."""
    start = 0
    while len(text) - start > size:
        at = start + size
        end = min(len(text), at + _SEARCH)
        while at < len(text) and not _may_cut(text, at):
            at += 1
            if at == end:  # searching for a space is faster than testing every character
                found = text.find(" ", at)
                at = len(text) if found < 0 else found
                end = min(len(text), at + _SEARCH)
        if at >= len(text):
            break
        yield text[start:at]
        start = at
    yield text[start:]


class TextEncoder:
    """Encodes texts with a tokenizer of the tokenizers library."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._may_cut = self._keeps_rule()
        around, inside = self._encode("x", True), self._encode("x", False)
        at = next((i for i in range(len(around)) if around[i : i + len(inside)] == inside), 0)
        self._longest = max(map(len, backend.get_vocab()))
        self._before, self._after = around[:at], around[at + len(inside) :]

    def _keeps_rule(self) -> bool:
        if any(cuts(token.content) for token in self._backend.get_added_tokens_decoder().values()):
            return False
        whole = self._encode(SAMPLE, False)
        return all(self._encode(SAMPLE[:at], False) + self._encode(SAMPLE[at:], False) == whole for at in cuts(SAMPLE))

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode(self, text: str, *, add_special_tokens: bool, limit: int | None) -> list[int]:
        """Encode ``text``. If ``limit`` is given, stop once there are more tokens: the result is then incomplete and
        longer than ``limit``."""
        if len(text) <= PIECE or not self._may_cut:
            return self._encode(text, add_special_tokens)
        ids = list(self._before) if add_special_tokens else []
        for piece in pieces(text):
            if limit is not None and len(piece) > self._longest * (limit + 1):  # one very long word
                start = self._encode(piece[: self._longest * (limit + 1)], False)
                if len(start) > limit:
                    return ids + start
            ids += self._encode(piece, False)
            if limit is not None and len(ids) > limit:
                return ids
        return ids + self._after if add_special_tokens else ids
