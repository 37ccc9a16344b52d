"""Incremental detokenization and stop strings.

Job: turn tokens into pieces of text, and find stop strings in the text. Owns: the decision which text of an unfinished
answer may be shown. Does not know: requests, models.
"""

import codecs
import itertools
from collections.abc import Sequence
from typing import Protocol

from weft.text.tokenizer import REPLACEMENT, BytesById, Tokenizer


class Detokenizer(Protocol):
    """The text of a growing list of token ids, piece by piece.

    All pieces together, ``finish()`` included, equal ``Tokenizer.decode`` of prompt and generated ids, without the text
    of the prompt. A character whose bytes are spread over several tokens is held back until it is complete. A character
    that begins in the prompt belongs to the generated text if a generated token completes it, and to neither text
    otherwise.
    """

    def extend(self, token_ids: Sequence[int]) -> str:
        """Append token ids. Returns the text that can be shown now: often empty, sometimes several characters."""
        ...

    def finish(self) -> str:
        """Return the text still held back, with U+FFFD for an incomplete character."""
        ...


def make_detokenizer(
    tokenizer: Tokenizer, *, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()
) -> Detokenizer:
    """Make the detokenizer that fits the vocabulary. Only the last few ids of ``prompt_token_ids`` are read."""
    table = tokenizer.bytes_by_id(skip_special_tokens=skip_special_tokens)
    if table is not None:
        return ByteLevelDetokenizer(table, prompt_token_ids)
    return WindowDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens, prompt_token_ids=prompt_token_ids)


class ByteLevelDetokenizer:
    """The detokenizer of byte-level vocabularies. It decodes the bytes of the ids as UTF-8 while they arrive."""

    _CONTEXT = 16  # the last prompt ids in which an unfinished character begins, special tokens included

    def __init__(self, table: BytesById, prompt_token_ids: Sequence[int] = ()) -> None:
        self._table = table
        self._rest = b""  # bytes of an incomplete character
        self._decode(b"".join([table[i] for i in prompt_token_ids[-self._CONTEXT :]]))
        # The text of an incomplete character of the prompt (two U+FFFD for half a surrogate).
        self._begun = codecs.utf_8_decode(self._rest, "replace", True)[0]

    def extend(self, token_ids: Sequence[int]) -> str:
        table = self._table
        one = len(token_ids) == 1
        text = self._decode(table[token_ids[0]] if one else b"".join([table[i] for i in token_ids]))
        return self._without_begun(text) if self._begun else text

    def finish(self) -> str:
        return self._without_begun(self._decode(b"", is_end=True))

    def _decode(self, content: bytes, is_end: bool = False) -> str:
        content = self._rest + content
        text, num_decoded = codecs.utf_8_decode(content, "replace", is_end)
        self._rest = content[num_decoded:]
        return text

    def _without_begun(self, text: str) -> str:
        """Remove the text of an incomplete character of the prompt."""
        if self._begun and text:
            begun, self._begun = self._begun, ""
            return text.removeprefix(begun)
        return text


class WindowDetokenizer:
    """The detokenizer of any vocabulary.

    Each call decodes a short window of recent tokens, so the cost of a call does not grow with the text. The window
    starts at a character boundary. It keeps some tokens whose text was shown already, since decoders treat the first
    token of a text differently (leading spaces).

    Two kinds of invalid bytes break the equality with ``Tokenizer.decode``. A byte-fallback tokenizer can take back
    characters that were shown when a broken byte follows. More than ``MAX_HELD`` tokens in a row without a complete
    character are shown as they are.
    """

    MAX_HELD = 64
    _CONTEXT = 4
    _MAX_PENDING = 3  # an unfinished UTF-8 character has at most three bytes, hence at most three U+FFFD

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window, pending, self._whole = self._context(prompt_token_ids)  # the text that is final
        self._old = len(self._window)  # ids of the window that belong to the context
        self._window += pending
        self._shown = self._decode(self._window) if pending else self._whole  # the part of the text that was shown
        self._is_all_out = True

    def extend(self, token_ids: Sequence[int]) -> str:
        # Ids that arrive together are decoded together if they end at a character boundary: the result is the same.
        new = [token_id for token_id in token_ids if self._has_text(token_id)]
        return "".join(self._extend(new[i : i + self.MAX_HELD]) for i in range(0, len(new), self.MAX_HELD))

    def _extend(self, new: list[int]) -> str:
        if len(new) > 1:
            text = self._decode(self._window + new)
            if text.startswith(self._shown) and REPLACEMENT not in text[len(self._shown) :]:
                self._window += new
                return self._show(text, len(text))
        return "".join(map(self._append, new))

    def _append(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        stable = len(text)
        if len(self._window) - self._old <= self.MAX_HELD:
            if not text.startswith(self._shown):
                if not text.startswith(self._whole):
                    self._is_all_out = False
                    return ""  # byte fallback decodes a run of bytes as broken until its last character is complete
                self._shown = self._whole
            run = len(text) - len(text.rstrip(REPLACEMENT))
            stable = max(stable - min(run, self._MAX_PENDING), len(self._shown))
        return self._show(text, stable)

    def _show(self, text: str, stable: int) -> str:
        """Set the text of the window. Its first ``stable`` characters can be shown."""
        delta = text[len(self._shown) : stable]
        self._shown = text[:stable]
        if delta:
            self._whole = self._shown
        self._is_all_out = stable == len(text)
        if self._is_all_out:
            self._advance()
        return delta

    def finish(self) -> str:
        if self._is_all_out:
            return ""
        text = self._decode(self._window)
        delta = text[len(self._shown) :]
        self._shown = text
        return delta

    def _context(self, prompt_token_ids: Sequence[int]) -> tuple[list[int], list[int], str]:
        """Split the last few prompt ids at a character boundary. Returns the ids before it, the ids after it, and the
        text of the ids before it."""
        recent = (i for i in reversed(prompt_token_ids[-self.MAX_HELD :]) if self._has_text(i))
        tail = list(itertools.islice(recent, self._CONTEXT + 2 * self._MAX_PENDING))[::-1]
        for end in range(len(tail), max(len(tail) - self._MAX_PENDING, 0) - 1, -1):
            for start in range(max(end - self._CONTEXT, 0) + 1):
                text = self._decode(tail[start:end])
                if not text.startswith(REPLACEMENT) and not text.endswith(REPLACEMENT):
                    return tail[start:end], tail[end:], text
        return tail, [], self._decode(tail)

    def _advance(self) -> None:
        """Move newer tokens into the context once there are enough of them and all text was shown."""
        if len(self._window) - self._old >= self._CONTEXT:
            self._window = self._window[self._old :]
            self._old = len(self._window)
            self._shown = self._whole = self._decode(self._window)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)

    def _has_text(self, token_id: int) -> bool:
        return self._tokenizer.has_text(token_id, skip_special_tokens=self._skip)


class StopStrings:
    """Find the first stop string in a growing text, however the text is cut, and hold back a possible beginning of one.

    The stop string that is complete first counts; if two end together, the longer one. All pieces returned,
    ``finish()`` included, equal the text before the stop string, or the text with the stop string if ``include``.

    Attributes:
        matched: the stop string found, or None. Text after it is dropped.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = list(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def append(self, delta: str, *, may_stop: bool = True) -> str:
        """Append text. Returns the text that can be shown now.

        With ``may_stop=False`` (before ``min_tokens``) a stop string that ends within ``delta`` does not count.
        """
        if self.matched is not None:
            return ""
        text = self._held + delta
        if may_stop:
            found = self._first_match(text)
            if found is not None:
                end, self.matched = found
                self._held = ""
                return text[:end] if self._include else text[: end - len(self.matched)]
        hold = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def finish(self) -> str:
        """Return the text held back, which became no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """The end and the stop string of the match that is complete first, among the matches that end in the new
        text."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                candidate = (start + len(stop), -len(stop), stop)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else (best[0], best[2])


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
