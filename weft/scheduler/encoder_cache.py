"""The encoder cache: the images whose embeddings are on the device, and the images that are encoded next.

Job: give every image consecutive rows of the encoder cache by its content hash, have it encoded once, and tell how far
a request can run with the cached embeddings. Owns: the rows, and the budget of the vision tower per step. Does not
know: tensors, or why a request runs.

An image is held for one step only. A step that uses a missing image has the image encoded first. Between steps any
image may be evicted for another, the least recently used first. A request that is cut inside an image, or preempted,
therefore holds nothing, and the first request of a step always finds room.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.messages import Encoding
from weft.multimodal.items import MediaItem


@dataclass(slots=True)
class Entry:
    """The rows of an image, ``row`` to ``row + num_rows``."""

    row: int
    num_rows: int


class EncoderCache:
    """Rows of the encoder cache.

    Args:
        num_rows: number of rows in the cache; an image has one per token.
        step_budget: upper bound on rows that are encoded in a step.

    Attributes:
        seconds: total seconds spent on encoding.
    """

    def __init__(self, num_rows: int, step_budget: int) -> None:
        assert step_budget <= num_rows, "what a step encodes fits into the cache"
        self._num_rows, self._step_budget = num_rows, step_budget
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # least recently used first
        self._in_use: set[bytes] = set()
        self._encodings: list[Encoding] = []
        self._budget = step_budget
        self._num_queries = self._num_hits = 0
        self.seconds = 0.0

    def stats(self) -> dict[str, Any]:
        return {
            "num_encoder_queries": self._num_queries,
            "num_encoder_hits": self._num_hits,
            "encoder_seconds": self.seconds,
            "encoder_cache_tokens": sum(entry.num_rows for entry in self._entries.values()),
        }

    def begin_step(self) -> None:
        """Begin a step with the whole budget. Images of the last step become evictable. Encodings that were planned but
        not launched are discarded, since their requests may be gone and would keep others from being encoded."""
        self.discard(self.take_encodings())
        self._in_use.clear()
        self._budget = self._step_budget

    def reach(self, media: Sequence[MediaItem], start: int, num_tokens: int) -> int:
        """Find how many of a request's next tokens can run in this step. Missing images of these are encoded in it.

        Args:
            media: the items of the request, ascending.
            start: position of the first token.
            num_tokens: number of tokens that the request wants to run.
        """
        for item in media:
            first = item.placeholders[0][0]
            if item.end <= start or first >= start + num_tokens:
                continue
            if not self._have(item, counts=start <= first):
                return max(0, first - start)
        return num_tokens

    def sources(self, media: Sequence[MediaItem], start: int, num_tokens: int) -> list[tuple[int, int, int]]:
        """``ScheduledRequest.media`` of tokens that can run according to ``reach``."""
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

    def clear(self) -> None:
        """Drop all embeddings, between two steps."""
        self._entries.clear()
        self._encodings.clear()

    def take_encodings(self) -> list[Encoding]:
        """The encodings of the step that is launched now."""
        taken, self._encodings = self._encodings, []
        return taken

    def discard(self, encodings: Sequence[Encoding]) -> None:
        """Discard encodings whose step raised, or was not launched. The content of their rows is undefined."""
        for encoding in encodings:
            self._entries.pop(encoding.item.content_hash, None)

    def _have(self, item: MediaItem, counts: bool) -> bool:
        """Whether the item is available in this step, encoding it if needed and possible."""
        key, num_rows = item.content_hash, item.num_tokens
        found = key in self._entries
        if not found:
            # The input processor refuses items that are too large for a step of their own.
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
        """Find ``num_rows`` free consecutive rows, evicting images. Returns the first; None if images of this step are
        in the way."""
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
