"""The frame of vision towers: patches in, embeddings for the decoder out.

Job: embed patches, compute rotary angles and attention bounds, and run a family's blocks and merger. Owns: the places
of patches. Does not know: files, requests, where embeddings are kept.

A frame is a grid of patches. The processor lays it out square by square; the ``merge * merge`` patches of a square
become one embedding. Frames of a video do not attend to each other.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from weft.config.vision import VisionConfig
from weft.layers.context import ModelContext
from weft.layers.vision import VisionLinear
from weft.ops.vision import bounded_attention, frame_attention

Grid = tuple[int, int, int]
Attend = Callable[[Tensor], Tensor]
"""``[N, 3, heads, D] -> [N, heads * D]``: attention of all patches, each within its frame."""

NUM_PLACES = 6
"""Numbers in a row of ``patch_places``."""


class PatchEmbedding(nn.Module):
    """``[N, patch_dim] -> [N, hidden_size]``: a convolution whose kernel is its stride, so one product."""

    def __init__(self, config: VisionConfig, context: ModelContext) -> None:
        super().__init__()
        kernel = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
        self.proj = VisionLinear(config.patch_dim, config.hidden_size, context, kernel=kernel)

    def forward(self, patches: Tensor) -> Tensor:
        out: Tensor = self.proj(patches)
        return out


class Tower(nn.Module):
    """Encodes images and videos.

    Attributes:
        config: the geometry.
        dtype: of what it computes.
    """

    def __init__(self, config: VisionConfig, context: ModelContext) -> None:
        super().__init__()
        self.config, self.dtype, self._backend = config, context.dtype, context.backend

    @abstractmethod
    def forward(self, patches: Tensor, places: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        """Encode items together.

        Args:
            patches: ``[N, patch_dim]`` on the tower's device, the items' one after the other. Each item begins with
                ``config.num_class_rows`` rows, which hold anything finite.
            places: ``[N, 6]`` int32 on the same device, as ``patch_places`` makes them.
            lengths: ``frame_lengths`` of the items. If None, as in a graph, the lengths are read from ``places`` on
                the device. Padding patches may follow the real ones then: their places are zeros, and the number of
                real patches in the last two columns.

        Returns:
            ``[N / merge_unit, num_features, out_hidden_size]``: each token's embedding, and then its features for the
            decoder's first layers. Arbitrary for padding, and for the rows before an item.
        """


class VisionTower(Tower):
    """A tower of blocks with attention, rotated by rows and columns.

    Attributes:
        embedding: class of the layer that embeds patches.
    """

    embedding: ClassVar[type[PatchEmbedding]] = PatchEmbedding

    def __init__(self, config: VisionConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        self.patch_embed = self.embedding(config, context)
        quarter = config.hidden_size // config.num_heads // 4
        exponents = torch.arange(quarter, dtype=torch.float32) / quarter
        self._frequencies = (1.0 / config.rope_theta**exponents).to(context.device)

    def forward(self, patches: Tensor, places: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        attend: Attend = partial(bounded_attention, bounds=places[:, 4:], backend=self._backend)
        if lengths is not None:
            attend = partial(frame_attention, lengths=lengths, first_key=max(0, self.config.num_class_rows - 1))
        x = self.patch_embed(patches.to(self.dtype))
        return self.encode(x, places, self._rotation(places[:, :2]), attend)

    @abstractmethod
    def encode(self, x: Tensor, places: Tensor, cos_sin: Tensor, attend: Attend) -> Tensor:
        """Run blocks and merger over embedded patches ``[N, hidden_size]``. Returns what ``forward`` returns."""

    def _rotation(self, places: Tensor) -> Tensor:
        """``[N, 2]`` rows and columns -> ``[N, head_dim]``: cosines, then sines; a half of each turns by the row."""
        angles = (places[:, :, None] * self._frequencies).flatten(1)
        return torch.cat([angles.cos(), angles.sin()], dim=1)


def frame_lengths(grids: Sequence[Grid], class_rows: int = 0) -> list[int]:
    """Rows of each frame of some items; ``class_rows``: those before its patches."""
    return [class_rows + h * w for t, h, w in grids for _ in range(t)]


def patch_places(grids: Sequence[Grid], merge: int, class_rows: int = 0) -> NDArray[np.int32]:
    """Return the places of the items' patches, ``[N, 6]``, in the processor's order.

    The columns are the patch's row and column, the last row and column of its frame, the first row that it attends to,
    and the row after the last. The ``class_rows`` rows before a frame have row and column -1, and the last of them is
    attended to.
    """
    lengths = frame_lengths(grids, class_rows)
    places, first = np.empty((sum(lengths), NUM_PLACES), dtype=np.int32), 0
    for t, h, w in grids:
        length = class_rows + h * w
        frames = places[first : first + t * length].reshape(t, length, NUM_PLACES)
        frames[:, :class_rows, :2] = -1
        frames[:, class_rows:, :2] = _rows_and_columns(h, w, merge)
        frames[:, :, 2:4] = h - 1, w - 1
        starts = first + length * np.arange(t)[:, None]
        frames[:, :, 4], frames[:, :, 5] = starts + max(0, class_rows - 1), starts + length
        first += t * length
    return places


@lru_cache(maxsize=64)
def _rows_and_columns(height: int, width: int, merge: int) -> NDArray[np.int32]:
    """Return row and column of a frame's patches, square by square: ``[height * width, 2]``."""
    squares = np.indices((height, width), dtype=np.int32).reshape(2, height // merge, merge, width // merge, merge)
    return squares.transpose(1, 3, 2, 4, 0).reshape(-1, 2)
