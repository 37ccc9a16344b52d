"""Helpers for tests of processors: processors, expanded prompts, and transformers' processors without torchvision."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from weft.config.media_limits import MediaLimits
from weft.config.vision import VisionConfig
from weft.multimodal.media import ReadLimits
from weft.multimodal.placeholders import expand
from weft.multimodal.processor import MediaProcessor
from weft.text.tokenizer import Tokenizer

PARAM, ROOM = "messages", 100_000


def make_processor(folder: Path, **changes: Any) -> MediaProcessor:
    """A processor of a folder's files; ``vision`` among the arguments."""
    arguments = {
        "folder": folder, "limits": ReadLimits(), "limit_per_prompt": MediaLimits(), "max_tokens": 500,
        "cache_bytes": 1 << 20,
    }  # fmt: skip
    return MediaProcessor(**(arguments | changes))


def expand_text(folder: Path, text: str, processed: list[Any], vision: VisionConfig) -> Any:
    tokenizer = Tokenizer.load(folder)
    return expand(tokenizer.encode(text), [], processed, vision, tokenizer.encode, PARAM)


def replace_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have transformers resize by Pillow, as Weft does. Functions of torchvision that it calls are written here, where
    torchvision is not installed."""
    from transformers import image_processing_backends as backends

    monkeypatch.setattr(backends.TorchvisionBackend, "resize", _resize)
    if find_spec("torchvision") is not None:
        return
    module: Any = ModuleType("torchvision.transforms.v2")
    module.functional = SimpleNamespace(
        pad=_pad,
        normalize=_normalize,
        grayscale_to_rgb=lambda image: image,
        pil_to_tensor=lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1),
    )
    for name in ("torchvision", "torchvision.transforms"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "torchvision.transforms.v2", module)
    monkeypatch.setattr(backends, "tvF", module.functional, raising=False)


def _resize(self: Any, image: torch.Tensor, size: Any, resample: Any, **_: Any) -> torch.Tensor:
    flat = image.reshape(-1, *image.shape[-3:]).permute(0, 2, 3, 1).numpy()
    resized = [np.asarray(Image.fromarray(f).resize((size.width, size.height), resample=resample)) for f in flat]
    stacked = torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2)
    return stacked.reshape(*image.shape[:-2], size.height, size.width)


def _pad(images: torch.Tensor, sides: Sequence[int], fill: float, padding_mode: str = "constant") -> torch.Tensor:
    left, top, right, bottom = sides
    return torch.nn.functional.pad(images, (left, right, top, bottom), mode=padding_mode, value=fill)


def _normalize(image: torch.Tensor, mean: Any, std: Any, inplace: bool = False) -> torch.Tensor:
    return (image - torch.as_tensor(mean).view(-1, 1, 1)) / torch.as_tensor(std).view(-1, 1, 1)
