"""CUDA graphs of the vision tower, by padded number of patches.

Owns the static inputs of these graphs. Which sizes are captured: ``config/vision_settings.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.graph.capture_sizes import smallest_fitting
from weft.graph.graph import GraphPool
from weft.graph.graph_set import CaptureOptions, FunctionRecorder, GraphSet
from weft.models.qwen_vision import NUM_PLACES, Grid, VisionTower, patch_places
from weft.runner.buffers import to_device


class EncoderGraphs:
    """Runs of ``tower`` for some numbers of patches.

    Args:
        sizes: numbers of patches, ascending; multiples of the tower's ``merge_unit``.
        device: the tower's.

    Attributes:
        graphs: what was captured; None before.
    """

    def __init__(self, tower: VisionTower, sizes: Sequence[int], device: torch.device) -> None:
        self._tower, self._sizes, self._device = tower, sizes, device
        most = max(sizes, default=0)
        self._patches = torch.zeros(most, tower.config.patch_dim, dtype=tower.dtype, device=device)
        self._places = torch.zeros(most, NUM_PLACES, dtype=torch.int32, device=device)
        self.graphs: GraphSet[Tensor] | None = None

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What the graphs read, beside the tower, by name."""
        return {"patches": self._patches, "places of patches": self._places}

    def walk(self) -> None:
        """Use every kernel that will be captured; they are the same for all sizes."""
        if self._sizes:
            self.encode(self._sizes[0])

    def size_for(self, num_patches: int) -> int | None:
        """The captured size in which so many patches run; None if there is none."""
        if self.graphs is None:
            return None
        size = smallest_fitting(self.graphs.sizes, num_patches)
        self.graphs.counters.missed += size is None
        return size

    def fill(self, patches: Tensor, grids: Sequence[Grid], size: int) -> None:
        """Put images into the static inputs of a size.

        Args:
            patches: ``[N, patch_dim]`` on the device, of the items one after the other; ``N <= size``.
        """
        count = len(patches)
        places = torch.zeros(size, NUM_PLACES, dtype=torch.int32)
        places[:count] = torch.from_numpy(patch_places(grids, self._tower.config.spatial_merge_size))
        places[count:, 4:] = count
        self._patches[:count].copy_(patches)
        self._places[:size].copy_(to_device(places, self._device))

    def encode(self, size: int) -> Tensor:
        """The tower over the static inputs, as captured. ``[size / merge_unit, num_features, out_hidden_size]``."""
        encoded: Tensor = self._tower(self._patches[:size], self._places[:size])
        return encoded

    def capture(self, pool: GraphPool, options: CaptureOptions, budget_bytes: int) -> int:
        """Capture all sizes that fit into the budget. Returns the bytes that they hold."""
        if not self._sizes:
            return 0
        recorder = FunctionRecorder(self.encode, pool)
        self.graphs = GraphSet("encoder graphs", recorder, self._sizes, options, budget_bytes)
        return self.graphs.counters.capture_bytes

    def replay(self, patches: Tensor, grids: Sequence[Grid], size: int) -> Tensor:
        """``tower(patches, …)`` by the graph of ``size``; valid until the next replay of any graph."""
        assert self.graphs is not None
        self.fill(patches, grids, size)
        return self.graphs.replay(size, len(patches))
