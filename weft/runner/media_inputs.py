"""Images on the device: the encoder cache, the vision tower and its graphs, and the embeddings that a step reads.

Job: run the vision tower, as a CUDA graph by padded number of patches where a captured size fits, and store its
embeddings in the cache. A step's image tokens get ids and positions by which the model finds embeddings, features and
rotary angles; this module fills those rows. Owns: the encoder cache, static inputs of the tower's graphs. Does not
know: which images are in the cache (``scheduler/encoder_cache.py`` assigns its rows), which sizes are captured
(``config/vision_settings.py``).
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Self

import numpy as np
import torch
from torch import Tensor

from weft.config import EngineConfig
from weft.graph.dispatcher import smallest_fitting
from weft.graph.graph import GraphPool
from weft.graph.graph_set import CaptureOptions, FunctionRecorder, GraphSet
from weft.messages import Encoding, ScheduledRequest
from weft.models.vision_language import VisionDecoder, VisionLanguageModel
from weft.models.vision_tower import NUM_PLACES, Grid, Tower, frame_lengths, patch_places
from weft.multimodal.items import MediaItem
from weft.ops.rotary.axes import frequency_axes, rotary_rows
from weft.runner.buffers import to_device
from weft.runner.rows import RowTable
from weft.runner.step_layout import StepLayout


class EncoderGraphs:
    """Runs of ``tower`` for some numbers of patches.

    Args:
        sizes: numbers of patches, ascending; multiples of the tower's ``merge_unit``.
        device: the tower's.

    Attributes:
        graphs: what was captured; None before.
    """

    def __init__(self, tower: Tower, sizes: Sequence[int], device: torch.device) -> None:
        self._tower, self._sizes, self._device = tower, sizes, device
        most = max(sizes, default=0)
        self._patches = torch.zeros(most, tower.config.patch_dim, dtype=tower.dtype, device=device)
        self._places = torch.zeros(most, NUM_PLACES, dtype=torch.int32, device=device)
        self.graphs: GraphSet[Tensor] | None = None

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Return the tensors that the graphs read besides the tower's, by name."""
        return {"patches": self._patches, "places of patches": self._places}

    def walk(self) -> None:
        """Use every kernel that will be captured; they are the same for all sizes."""
        if self._sizes:
            self.encode(self._sizes[0])

    def size_for(self, num_patches: int) -> int | None:
        """The captured size in which ``num_patches`` patches run; None if there is none."""
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
        config = self._tower.config
        places[:count] = torch.from_numpy(patch_places(grids, config.spatial_merge_size, config.num_class_rows))
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


_PART = 1024
"""Tokens of an image where only the sum matters."""


class EncoderTime:
    """The time of one run of the tower, which is known on a GPU once the run is done."""

    def __init__(self, device: torch.device) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        self._started, self._seconds = time.perf_counter(), 0.0
        if self._events:
            self._events[0].record()

    def end(self) -> Self:
        """Note that the run is queued completely."""
        self._seconds = time.perf_counter() - self._started
        if self._events:
            self._events[1].record()
        return self

    def seconds(self) -> float:
        """Wait for the run, and return its seconds."""
        if not self._events:
            return self._seconds
        start, end = self._events
        end.synchronize()
        return start.elapsed_time(end) / 1000


class MediaInputs:
    """Images of one model's steps.

    Attributes:
        merge: side of the squares of patches that become one token.
        embeddings: the encoder cache, ``[encoder_cache_size, num_features, hidden_size]``.
        graphs: of the tower.
    """

    def __init__(self, model: VisionLanguageModel, config: EngineConfig) -> None:
        decoder, vision = model.model, config.model_config.vision
        assert isinstance(decoder, VisionDecoder) and vision is not None
        assert config.encoder_cache_size is not None and config.max_num_encoder_input_tokens is not None
        self._decoder, self._vision = decoder, vision
        self._table = model.rotary_table if vision.mrope_section is not None else None
        self._places = model.pool_places
        self._device, self._base, self._step_tokens = (
            decoder.features.device, config.max_model_len, config.max_num_encoder_input_tokens,
        )  # fmt: skip
        self.merge, self._class_rows = vision.spatial_merge_size, vision.num_class_rows
        self._one_by_one = config.deterministic
        if self._table is not None and vision.mrope_section is not None:
            self._axes = frequency_axes(self._table.shape[1], vision.mrope_section).to(self._device)
        self.embeddings = torch.zeros(
            config.encoder_cache_size, vision.num_features, config.model_config.hidden_size,
            dtype=getattr(torch, config.dtype), device=self._device,
        )  # fmt: skip
        self.graphs = EncoderGraphs(decoder.visual, config.encoder_cuda_graph_patches, self._device)

    def encode(self, encodings: Sequence[Encoding]) -> EncoderTime:
        """Queue the encoding of these images; their embeddings go to the rows that the scheduler chose."""
        took = EncoderTime(self._device)
        for together in self._runs(encodings):
            items = [encoding.item for encoding in together]
            encoded = self.run(self._patches(items), [item.grid for item in items])
            end = 0
            for encoding in together:
                start = end + self._class_rows // self._vision.merge_unit
                end = start + encoding.item.num_tokens
                self.embeddings[encoding.row : encoding.row + end - start].copy_(encoded[start:end])
        return took.end()

    def _runs(self, encodings: Sequence[Encoding]) -> Iterator[Sequence[Encoding]]:
        """Images that are encoded together: rows of class tokens must not make a run larger than ``run_largest``."""
        if self._one_by_one:
            yield from ([encoding] for encoding in encodings)
            return
        if not self._class_rows:
            yield encodings
            return
        most, run, rows = sum(self._lengths(self._largest())), list[Encoding](), 0
        for encoding in encodings:
            more = sum(self._lengths([encoding.item.grid]))
            if run and rows + more > most:
                yield run
                run, rows = [], 0
            run.append(encoding)
            rows += more
        yield run

    def run(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """The tower; as a graph where one is large enough, for more the GPU takes longer than the host."""
        size = self.graphs.size_for(len(patches))
        return self.graphs.replay(patches, grids, size) if size is not None else self.run_eager(patches, grids)

    def run_eager(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """``run`` without a graph."""
        places = to_device(torch.from_numpy(patch_places(grids, self.merge, self._class_rows)), self._device)
        encoded: Tensor = self._decoder.visual(patches, places, self._lengths(grids))
        return encoded

    def _lengths(self, grids: Sequence[Grid]) -> list[int]:
        """Rows of each frame in the tower."""
        return frame_lengths(grids, self._class_rows)

    def _patches(self, items: Sequence[MediaItem]) -> Tensor:
        """The items' patches one after the other, on the device, in the tower's dtype; zeros for class tokens."""
        on_gpu, dtype = self._device.type == "cuda", self.embeddings.dtype
        sizes = [self._class_rows + item.num_patches for item in items]
        together = torch.empty(sum(sizes), self._vision.patch_dim, dtype=dtype, pin_memory=on_gpu)
        for item, block in zip(items, together.split(sizes), strict=True):
            class_rows, rows = block.split([self._class_rows, item.num_patches])
            class_rows.zero_()
            if item.dtype == str(dtype).removeprefix("torch."):
                rows.view(torch.uint8).numpy().reshape(-1)[:] = np.frombuffer(item.pixel_values, np.uint8)
            else:
                rows.copy_(torch.tensor(item.patches()))
        return together.to(self._device, non_blocking=True)

    def load(self, requests: Sequence[ScheduledRequest], rows: RowTable) -> None:
        """Fill the rows of this step's image tokens: those of its flat token axis."""
        starts = [0, *accumulate(request.num_tokens for request in requests)]
        columns: list[np.ndarray] = []
        for request, start in zip(requests, starts, strict=False):
            for position, count, row in request.media:
                first, numbers = start + position - request.start, np.arange(count)
                three = rows.rope_positions[request.row][:, position : position + count]
                ids = rows.known_tokens(request.row, position, position + count)
                columns.append(np.vstack([first + numbers, row + numbers, ids, three]))
        if columns:
            self._fill(*to_device(torch.from_numpy(np.hstack(columns)), self._device).split([1, 1, 1, 3]))

    def _fill(self, target: Tensor, source: Tensor, ids: Tensor, positions: Tensor) -> None:
        target = target[0]
        self._decoder.place_media(target, self.embeddings.index_select(0, source[0]), ids[0])
        if self._table is not None:
            self._table.index_copy_(0, self._base + target, rotary_rows(self._table, positions, self._axes))
        if self._places is not None:
            self._places.place_media(self._base + target, positions)

    def run_largest(self) -> None:
        """Encode as much as a step may, to see what memory that takes."""
        grids = self._largest()
        self.run_eager(self.blank(grids), grids)

    def _largest(self) -> list[Grid]:
        """Return grids of at most ``_PART`` tokens that add up to a step's tokens. A single image would take long."""
        whole, rest = divmod(self._step_tokens, _PART)
        return [(1, self.merge, self.merge * tokens) for tokens in [_PART] * whole + [rest] * (rest > 0)]

    def run_smallest(self) -> None:
        """Use every kernel of the tower once."""
        grids = [(1, self.merge, self.merge)]
        self.run_eager(self.blank(grids), grids)
        self.graphs.walk()

    def blank(self, grids: Sequence[Grid]) -> Tensor:
        """Patches of such items, all zero."""
        return torch.zeros(sum(self._lengths(grids)), self._vision.patch_dim, device=self._device)


def place_media(
    host: Mapping[str, np.ndarray], layout: StepLayout, table: RowTable, first: tuple[int, int] | None
) -> None:
    """Positions of sequences with images; ids and positions of the images' tokens.

    Args:
        host: the step's arrays: ``positions`` is filled for texts, ``input_ids`` for tokens of texts.
        first: token id and position of a step's first token, if it is one of an image; see ``BatchBuilder``.
    """
    ids, positions = host["input_ids"], host["positions"]
    positions[: layout.bounds[-1]] += np.repeat(table.rope_delta[layout.rows], layout.counts)
    for i in (layout.first < table.num_prompt_tokens[layout.rows]).nonzero()[0].tolist():
        r, at = layout.requests[i], int(layout.bounds[i])
        if r.row not in table.rope_positions:
            continue
        prompt = table.rope_positions[r.row][0, r.start : r.start + r.num_tokens]
        positions[at : at + len(prompt)] = prompt
        for position, count, _ in r.media:
            assert first is not None, "an image came to a model without a vision tower"
            begin = at + position - r.start
            numbers = np.arange(begin, begin + count)
            ids[begin : begin + count] = first[0] + numbers
            if table.rotates_images:
                positions[begin : begin + count] = first[1] + numbers
