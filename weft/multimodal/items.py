"""One image or video of a request, on its way from the input processor to the vision encoder.

Job: the frozen, serialisable ``MediaItem``, and the ids of its tokens in the prefix cache. Owns: their fields. Does not
know: files, processors, models, tensors (numpy is imported when pixels are read).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Modality = Literal["image", "video"]


class MediaItem(msgspec.Struct, frozen=True):
    """One image or video, ready for the vision encoder.

    Attributes:
        modality: image or video.
        content_hash: 32 bytes (SHA-256) over the pixels, the grid and the processor's settings. Items with equal hashes
            have equal embeddings.
        placeholders: ``(offset, length)`` of its placeholder runs in the prompt's token ids, ascending. An image has
            one run; a video has one per temporal patch, with timestamps between them. In total there is one token per
            embedding.
        grid: temporal, vertical and horizontal patches ``(t, h, w)``.
        pixel_values: ``[t * h * w, channels * temporal_patch * patch * patch]`` in C order, in the order of the
            checkpoint's processor.
        dtype: dtype of ``pixel_values``: the model's, to which the encoder rounds them first.
    """

    modality: Modality
    content_hash: bytes
    placeholders: list[tuple[int, int]]
    grid: tuple[int, int, int]
    pixel_values: bytes
    dtype: str = "float32"

    @property
    def num_patches(self) -> int:
        t, h, w = self.grid
        return t * h * w

    @property
    def num_tokens(self) -> int:
        """Number of placeholder tokens in all runs."""
        return sum(length for _, length in self.placeholders)

    @property
    def end(self) -> int:
        """Position after its last placeholder."""
        offset, length = self.placeholders[-1]
        return offset + length

    @property
    def name(self) -> str:
        """A name for people: modality and the first digits of the hash."""
        return f"{self.modality} {self.content_hash.hex()[:8]}"

    @property
    def cache_token_id(self) -> int:
        """The id of each placeholder in the keys of the prefix cache: negative, 63 bits of the hash."""
        return -1 - (int.from_bytes(self.content_hash[:8]) >> 1)

    def runs(self) -> list[tuple[int, int, int, int]]:
        """The ``(position, tokens, height, width)`` of its runs of placeholders, as in ``NewRequest.media_runs``."""
        return [(offset, length, *self.grid[1:]) for offset, length in self.placeholders]

    def without_pixels(self) -> MediaItem:
        """The item without pixels, for use after it was encoded."""
        return msgspec.structs.replace(self, pixel_values=b"")

    def patches(self) -> NDArray[np.float32]:
        """``pixel_values`` as ``[num_patches, patch_dim]`` float32, read only."""
        import numpy as np

        if self.dtype == "bfloat16":  # bfloat16 is the upper half of a float32; numpy has no name for it
            values = (np.frombuffer(self.pixel_values, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(self.pixel_values, self.dtype).astype(np.float32, copy=False)
        return values.reshape(self.num_patches, -1)


def pixel_bytes(values: NDArray[np.float32], dtype: str) -> bytes:
    """Round finite float32 values to the nearest number of ``dtype`` (float32, float16, bfloat16), ties to even."""
    import numpy as np

    if dtype != "bfloat16":
        return values.astype(dtype, copy=False).tobytes()
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16).tobytes()


def media_name(cache_token_id: int) -> str:
    """The name of the item with a (negative) id in the keys of the prefix cache: the first digits of its hash, without
    modality."""
    return f"{(-1 - cache_token_id) >> 31:08x}"


def cache_token_ids(token_ids: Sequence[int], items: Iterable[MediaItem]) -> list[int]:
    """The keys of the prefix cache for a prompt: its token ids, with each item's own id for its placeholders.

    Equal prefixes of keys are equal text with equal items at equal positions, so cached results can be reused. An
    item's id is negative, so it is no token's.
    """
    keys = list(token_ids)
    for item in items:
        for offset, length in item.placeholders:
            keys[offset : offset + length] = [item.cache_token_id] * length
    return keys
