"""The encoder cache: which images' embeddings are on the device, and which are encoded next.

Job: give every image consecutive rows of the encoder cache, by its content hash, and have it encoded once; say how far
a request can run with what is there. Owns: the rows, and the budget of the vision tower per step. Does not know:
tensors, why a request runs.

An image is held for one step only: the step that uses it has it encoded if it is not there. Between steps any image may
make room for another, the one used longest ago first; so a request that is cut inside an image, or preempted, needs
nothing to be kept for it, and the first of a step always finds room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.messages import Encoding
from weft.multimodal.items import MediaItem


@dataclass(slots=True)
class Entry:
    """An image's rows: ``row`` to ``row + num_rows``."""

    row: int
    num_rows: int


class EncoderCache:
    """Rows of the encoder cache.

    Args:
        num_rows: of the cache; one per token of an image.
        step_budget: most rows that are encoded in a step.

    Attributes:
        seconds: what encoding has taken so far.
    """

    def __init__(self, num_rows: int, step_budget: int) -> None:
        assert step_budget <= num_rows, "what a step encodes fits into the cache"
        self._num_rows, self._step_budget = num_rows, step_budget
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # used longest ago first
        self._in_use: set[bytes] = set()
        self._encodings: list[Encoding] = []
        self._budget = step_budget
        self._num_queries = self._num_hits = 0
        self.seconds = 0.0

    def stats(self) -> dict[str, Any]:
        """Fields of ``SchedulerStats``."""
        return {
            "num_encoder_queries": self._num_queries,
            "num_encoder_hits": self._num_hits,
            "encoder_seconds": self.seconds,
            "encoder_cache_tokens": sum(entry.num_rows for entry in self._entries.values()),
        }

    def begin_step(self) -> None:
        """The images of the last step may go; the budget is whole again. What it was to encode is forgotten if it was
        not launched: whoever asked for it may have gone, and would keep others from being encoded."""
        self.forget(self.take_encodings())
        self._in_use.clear()
        self._budget = self._step_budget

    def reach(self, media: Sequence[MediaItem], start: int, num_tokens: int) -> int:
        """How many of a request's next tokens can run in this step; their images are encoded in it, or there already.

        Args:
            media: of the request, ascending.
            start: position of the first token.
            num_tokens: wanted.
        """
        for item in media:
            first = item.placeholders[0][0]
            if item.end <= start or first >= start + num_tokens:
                continue
            if not self._have(item, counts=start <= first):
                return max(0, first - start)
        return num_tokens

    def sources(self, media: Sequence[MediaItem], start: int, num_tokens: int) -> list[tuple[int, int, int]]:
        """``ScheduledRequest.media`` of tokens that ``reach`` said can run."""
        found: list[tuple[int, int, int]] = []
        for item in media:
            if item.end <= start or item.placeholders[0][0] >= start + num_tokens:
                continue
            row = self._entries[item.content_hash].row
            for offset, length in item.placeholders:
                low, high = max(offset, start), min(offset + length, start + num_tokens)
                if low < high:
                    found.append((low, high - low, row + low - offset))
                row += length
        return found

    def take_encodings(self) -> list[Encoding]:
        """What the step that is launched now encodes."""
        taken, self._encodings = self._encodings, []
        return taken

    def forget(self, encodings: Sequence[Encoding]) -> None:
        """The step that was to encode these broke, or was not launched: nothing is known of their rows."""
        for encoding in encodings:
            self._entries.pop(encoding.item.content_hash, None)

    def _have(self, item: MediaItem, counts: bool) -> bool:
        """Whether the item is there in this step; if need be and possible, it will be."""
        key, num_rows = item.content_hash, item.num_tokens
        found = key in self._entries
        if not found:
            # One item is never too large for a step of its own: the input processor refuses what is.
            row = self._make_room(num_rows) if num_rows <= self._budget else None
            if row is None:
                return False
            self._entries[key] = Entry(row, num_rows)
            self._encodings.append(Encoding(item, row))
            self._budget -= num_rows
        if counts and key not in self._in_use:
            self._num_queries += 1
            self._num_hits += found
        self._in_use.add(key)
        self._entries.move_to_end(key)
        return True

    def _make_room(self, num_rows: int) -> int | None:
        """The first of ``num_rows`` free consecutive rows; None if images of this step are in the way."""
        row = self._gap(num_rows)
        for key in list(self._entries):
            if row is not None:
                break
            if key not in self._in_use:
                del self._entries[key]
                row = self._gap(num_rows)
        return row

    def _gap(self, num_rows: int) -> int | None:
        end = 0
        for entry in sorted(self._entries.values(), key=lambda entry: entry.row):
            if entry.row - end >= num_rows:
                return end
            end = entry.row + entry.num_rows
        return end if self._num_rows - end >= num_rows else None

    def check(self) -> None:
        """Assert that no two images share rows."""
        end = 0
        for entry in sorted(self._entries.values(), key=lambda entry: entry.row):
            assert end <= entry.row and entry.row + entry.num_rows <= self._num_rows, "rows have two owners"
            end = entry.row + entry.num_rows
