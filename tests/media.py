"""Images by hand: tiny vision checkpoints, items of random pixels, prompts, and what transformers makes of them.

Does not know: image files, processors.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.tiny import make_checkpoint, make_model
from weft.config import resolve
from weft.engine.core import EngineCore
from weft.messages import RowSampling
from weft.multimodal.items import MediaItem, Modality
from weft.request import Request, RequestSpec

IMAGE, VIDEO, START, END, VIDEO_START, VIDEO_END = range(200, 206)
MERGE, PATCH = 2, 4
PATCH_DIM = 3 * 2 * PATCH**2
VISION = {
    "depth": 3, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2,
    "spatial_merge_size": MERGE, "num_position_embeddings": 25, "initializer_range": 0.15,
}  # fmt: skip
TOP = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
VL, VL_MOE, HYBRID = (
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
)
HYBRID_MOE = "Qwen3_5MoeForConditionalGeneration"
INDEXED = "Qwen4ExpForConditionalGeneration"
GLM = "Glm5NextForConditionalGeneration"
GLM_VISION = {
    "depth": 3, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2,
    "spatial_merge_size": MERGE, "projection_intermediate_size": 56, "rms_norm_eps": 1e-3, "swiglu_limit": 0.5,
    "initializer_range": 0.15,
}  # fmt: skip
GLM_TOP = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "image_start_token_id": START, "image_end_token_id": END,
    "video_start_token_id": VIDEO_START, "video_end_token_id": VIDEO_END,
}  # fmt: skip
INKLING2 = "Inkling2ForConditionalGeneration"
INKLING = "InklingForConditionalGeneration"
INKLING_VISION = {"n_layers": 3, "patch_size": 8, "temporal_patch_size": 2, "rms_norm_eps": 1e-2}
INKLING_TOP = {"image_token_id": IMAGE, "audio_config": {"n_mel_bins": 4, "mel_vocab_size": 8}}
IMAGES_ALONE = (INKLING2, INKLING)
"""Architectures without videos."""
INKLING2_VISION = {
    "num_hidden_layers": 3, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 2, "patch_size": 4,
    "spatial_merge_size": MERGE, "posemb_grid_size": 5, "projection_hidden_dim": 56, "projector_bias": True,
    "layer_norm_eps": 1e-3, "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
    "initializer_range": 0.15,
}  # fmt: skip


_INDEXED_KEYS = {
    "indexer_budget": 16,
    "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
    "silent": (IMAGE, VIDEO),
}
"""Prompts are longer than what is selected; indexers share positions. A sampled placeholder would be an image to the
reference, and another token in its place would have other n-grams."""


def overrides(arch: str) -> dict[str, Any]:
    """Keys for ``make_checkpoint`` and ``make_model``."""
    if arch == GLM:
        return {"vision": GLM_VISION, "top": GLM_TOP}
    if arch == INKLING:
        return {"vision": INKLING_VISION, "top": INKLING_TOP}
    if arch == INKLING2:
        return {"vision": INKLING2_VISION, "top": {"image_token_id": IMAGE}}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True}
    if "VL" in arch:
        rope |= {"mrope_section": [4, 2, 2]}
        return {"vision": VISION | {"deepstack_visual_indexes": [0, 2]}, "top": TOP, "rope_parameters": rope}
    rope |= {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    keys = {"vision": VISION, "top": TOP, "rope_parameters": rope}
    return keys | _INDEXED_KEYS if arch == INDEXED else keys


def make_vision_checkpoint(arch: str, folder: Path, seed: int = 0) -> tuple[Path, Any]:
    """The checkpoint and the transformers model."""
    return make_checkpoint(arch, folder, seed, **overrides(arch)), make_model(arch, seed, **overrides(arch))


def pixels(seed: int, grid: tuple[int, int, int], patch_dim: int = PATCH_DIM) -> np.ndarray:
    t, h, w = grid
    return np.random.default_rng(seed).standard_normal((t * h * w, patch_dim)).astype(np.float32)


@dataclass
class Prompt:
    """Token ids with images in them; ``arch``: the architecture whose videos and patches these are."""

    token_ids: list[int] = field(default_factory=list)
    media: list[MediaItem] = field(default_factory=list)
    arch: str = VL

    @classmethod
    def of(cls, arch: str) -> Prompt:
        """An empty prompt for an architecture."""
        return cls(arch=arch)

    def text(self, count: int, seed: int = 0) -> Prompt:
        """Random text."""
        ids = np.random.default_rng(1000 * seed + count).integers(0, 190, count).tolist()
        return replace(self, token_ids=self.token_ids + ids)

    def image(self, height: int, width: int, seed: int = 0, *, bare: bool = False) -> Prompt:
        """An image of so many patches; ``bare``: nothing stands around its placeholders."""
        count = height * width // MERGE**2
        before = self.token_ids + ([] if bare else [START])
        made = item("image", (1, height, width), seed, [(len(before), count)], self.arch)
        ids = before + [IMAGE] * count + ([] if bare else [END])
        return replace(self, token_ids=ids, media=[*self.media, made])

    def video(self, frames: int, height: int, width: int, seed: int = 0) -> Prompt:
        """A video: before every frame (after it for GLM-5.3) a timestamp, of one token here. Inkling reads its frames
        as images."""
        if self.arch in IMAGES_ALONE:
            first, *more = range(frames)
            prompt = self.image(height, width, seed + first)
            return prompt.video(len(more), height, width, seed + 1) if more else prompt
        glm = self.arch == GLM
        ids, runs, count = self.token_ids + [VIDEO_START] * glm, [], height * width // MERGE**2
        for frame in range(frames):
            ids += [START] if glm else [100 + frame, START]
            runs.append((len(ids), count))
            ids += [IMAGE] * count + [END, 100 + frame] if glm else [VIDEO] * count + [END]
        ids += [VIDEO_END] * glm
        made = item("video", (frames, height, width), seed, runs, self.arch)
        return replace(self, token_ids=ids, media=[*self.media, made])


def item(
    modality: Modality, grid: tuple[int, int, int], seed: int, runs: list[tuple[int, int]], arch: str = VL
) -> MediaItem:
    """An image or video of random pixels. Inkling has a patch in place of ``MERGE`` times ``MERGE``."""
    content = pixels(seed, grid, PATCH_DIM // 2 if arch == INKLING2 else PATCH_DIM).tobytes()
    if arch == INKLING:
        grid = grid[0], grid[1] // MERGE, grid[2] // MERGE
    return MediaItem(modality, hashlib.sha256(f"{grid}".encode() + content).digest(), runs, grid, content)


def reference_logits(reference: Any, tokens: Sequence[int], media: Sequence[MediaItem]) -> Tensor:
    """``[len(tokens), vocab_size]`` of one uncached pass."""
    with torch.no_grad():
        out = reference(**reference_inputs(reference, tokens, media))
    logits: Tensor = out.logits[0]
    return logits


def reference_inputs(reference: Any, tokens: Sequence[int], media: Sequence[MediaItem]) -> dict[str, Any]:
    """Arguments of the transformers model for one uncached pass."""
    device = reference.device
    if "Inkling" in type(reference).__name__:
        return _inkling_inputs(reference, tokens, media)
    types = torch.zeros(1, len(tokens), dtype=torch.int32, device=device)
    given: dict[str, Tensor] = {}
    for kind, modality in enumerate(("image", "video"), 1):
        items = [item for item in media if item.modality == modality]
        for offset, length in itertools.chain(*(item.placeholders for item in items)):
            types[0, offset : offset + length] = kind
        if items:
            values = torch.cat([torch.from_numpy(item.patches().copy()) for item in items]).to(device, reference.dtype)
            given["pixel_values" if kind == 1 else "pixel_values_videos"] = values
            given[f"{modality}_grid_thw"] = torch.tensor([item.grid for item in items], device=device)
    ids = torch.tensor([list(tokens)], device=device)
    return {"input_ids": ids, "mm_token_type_ids": types if given else None, "use_cache": False} | given


def _inkling_inputs(reference: Any, tokens: Sequence[int], media: Sequence[MediaItem]) -> dict[str, Any]:
    """Return arguments like ``reference_inputs``. Inkling 2 takes the pixels of a square of patches together, and
    counts squares. Inkling takes patches."""
    given: dict[str, Any] = {"input_ids": torch.tensor([list(tokens)], device=reference.device), "use_cache": False}
    if media and type(reference).__name__ == INKLING:
        patches = torch.cat([torch.from_numpy(item.patches().copy()) for item in media])
        given["pixel_values"] = patches.view(-1, 2, 8, 8, 3).to(reference.device, reference.dtype)
    elif media:
        patches = torch.cat([torch.from_numpy(item.patches().copy()) for item in media])
        squares = patches.view(-1, MERGE, MERGE, PATCH, PATCH, 3).transpose(2, 3)
        squares = squares.reshape(-1, MERGE * PATCH, MERGE * PATCH, 3)
        given["pixel_values"] = squares.to(reference.device, reference.dtype)
        grids = [(t, h // MERGE, w // MERGE) for t, h, w in (item.grid for item in media)]
        given["image_grid_thw"] = torch.tensor(grids, device=reference.device)
    return given


class Engine:
    """An engine that takes requests made by hand."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.config = resolve(model=str(folder), skip_tokenizer_init=True, **settings)
        self.core = EngineCore(self.config)
        self._numbers = itertools.count()

    def request(self, prompt: Prompt, max_tokens: int = 4, **sampling: Any) -> Request:
        salt = sampling.pop("cache_salt", None)
        spec = RequestSpec(
            f"r{next(self._numbers)}", array("I", prompt.token_ids), RowSampling(temperature=0.0, **sampling),
            max_tokens, arrival=next(self._numbers), media=prompt.media, cache_salt=salt,
        )  # fmt: skip
        return Request.of(spec)

    def run(
        self, *prompts: Prompt, max_tokens: int = 4, each_step: Callable[[], None] | None = None, **sampling: Any
    ) -> list[Request]:
        """Run prompts together; ``each_step`` is called after every step."""
        requests = [self.request(prompt, max_tokens, **sampling) for prompt in prompts]
        for request in requests:
            self.core.add(request)
        while not all(request.is_finished for request in requests):
            self.core.step()
            self.core.scheduler.check()
            if each_step is not None:
                each_step()
        assert all(request.finish_reason == "length" for request in requests)
        return requests


def assert_reference(reference: Any, prompt: Prompt, request: Request) -> None:
    """Log probabilities of the sampled tokens (if the request asked for all) within 1e-4, and greedy tokens equal."""
    output = request.output_token_ids
    logits = reference_logits(reference, prompt.token_ids + output, prompt.media)[len(prompt.token_ids) - 1 : -1]
    assert logits.argmax(-1).tolist() == output
    want = logits.log_softmax(-1)
    for row, entry in zip(want, request.logprobs, strict=bool(request.logprobs)) if request.logprobs else ():
        ids, values = torch.tensor(entry.token_ids), torch.tensor(entry.logprobs)
        assert (row[ids] - values).abs().max().item() < 1e-4
