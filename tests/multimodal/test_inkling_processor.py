"""The image processors of Inkling and Inkling 2 against transformers' own."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.multimodal.processors import PARAM, ROOM, expand_text, make_processor, replace_torchvision
from tests.pictures import (
    INKLING2_VISION,
    INKLING_VISION,
    encoded,
    picture,
    save_inkling2_processor,
    save_inkling_processor,
)
from weft.errors import ConfigError, RequestError
from weft.multimodal.inkling import inkling2_processor, inkling_processor
from weft.multimodal.processor import MediaProcessor

make, expanded = (partial(f, vision=INKLING2_VISION) for f in (make_processor, expand_text))
IMAGE = "<|content_image|><|unused_200054|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processor")
    save_inkling2_processor(folder)
    return folder


@pytest.fixture(scope="module")
def processor(folder: Path) -> MediaProcessor:
    return make(folder)


@pytest.fixture
def reference(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    replace_torchvision(monkeypatch)
    from transformers import PreTrainedTokenizerFast
    from transformers.models.inkling2.processing_inkling2 import Inkling2Processor

    kind = import_module("transformers.models.inkling2.image_processing_inkling2").Inkling2ImageProcessor
    monkeypatch.setattr(Inkling2Processor, "check_argument_for_proper_class", lambda self, *args: None)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    return Inkling2Processor(kind.from_dict(settings), PreTrainedTokenizerFast.from_pretrained(folder))


def translucent(width: int, height: int, seed: int, mode: str = "RGBA") -> Image.Image:
    image = picture(width, height, seed).convert("RGBA")
    alpha = np.random.default_rng(seed).integers(0, 256, (height, width), dtype=np.uint8)
    image.putalpha(Image.fromarray(alpha))
    return image.convert(mode)


def of_reference(squares: Any) -> np.ndarray:
    """Squares of pixels as rows of patches."""
    tiles = torch.as_tensor(squares).view(-1, 2, 4, 2, 4, 3).transpose(2, 3)
    return tiles.reshape(-1, 48).numpy()


def test_images_as_transformers(folder: Path, processor: MediaProcessor, reference: Any) -> None:
    """Sizes of whole squares and others; transparency of several kinds over a checkerboard."""
    sizes = [(24, 16), (3, 3), (8, 9), (31, 97), (64, 64), (1, 50)]
    images = [picture(*size, seed=i) for i, size in enumerate(sizes)]
    palette = picture(20, 20, 9).quantize(16)
    palette.info["transparency"] = 3
    images += [translucent(37, 30, 7), translucent(20, 12, 8, "LA"), palette]
    text = f"{IMAGE}the quick{IMAGE}{IMAGE} fox{IMAGE * 5}é{IMAGE}"
    wanted = reference(text=[text], images=images, return_tensors="pt")
    prompt = expanded(folder, text, processor.process({"image": images}, ROOM, PARAM))
    assert prompt.token_ids == wanted["input_ids"][0].tolist()
    grids = [[t, h // 2, w // 2] for t, h, w in (item.grid for item in prompt.media)]
    assert grids == wanted["image_grid_thw"].tolist()
    pixels = np.concatenate([item.patches() for item in prompt.media])
    np.testing.assert_allclose(pixels, of_reference(wanted["pixel_values"]), atol=1e-6)
    for item in prompt.media:
        ((offset, length),) = item.placeholders
        assert set(prompt.token_ids[offset : offset + length]) == {4} and length == item.num_tokens


@pytest.mark.parametrize("fraction", [2.0, 0.4, None])
def test_images_of_inkling_as_transformers(fraction: float | None, tmp_path: Path, monkeypatch: Any) -> None:
    """Images that grow, grow no further than the longest side, stay and shrink; a column more than is needed."""
    replace_torchvision(monkeypatch)
    kind = import_module("transformers.models.inkling.image_processing_inkling").InklingImageProcessor
    save_inkling_processor(tmp_path, rescale_image_frac=fraction)
    sizes = [(24, 16), (3, 5), (47, 9), (31, 97), (64, 64), (8, 50)]
    images = [picture(*size, seed=i) for i, size in enumerate(sizes)]
    wanted = kind.from_dict(json.loads((tmp_path / "preprocessor_config.json").read_text()))(images)
    processed = make(tmp_path, vision=INKLING_VISION).process({"image": images}, ROOM, PARAM)
    assert [item.grid[1] * item.grid[2] for item in processed] == [int(count) for count in wanted["num_patches"]]
    prompt = expanded(tmp_path, IMAGE * len(images), processed, vision=INKLING_VISION)
    assert [item.num_tokens for item in prompt.media] == [int(count) for count in wanted["num_patches"]]
    pixels = np.concatenate([item.patches() for item in prompt.media])
    np.testing.assert_allclose(pixels, np.stack(wanted["pixel_values"]).reshape(len(pixels), -1), atol=1e-6)


def test_defaults_of_inkling_are_those_of_transformers(tmp_path: Path, monkeypatch: Any) -> None:
    replace_torchvision(monkeypatch)
    for name, own in (("inkling", inkling_processor()), ("inkling2", inkling2_processor())):
        theirs = import_module(f"transformers.models.{name}.image_processing_{name}")
        kind = next(value for key, value in vars(theirs).items() if key.endswith("ImageProcessor") and "ling" in key)
        for key in ("image_mean", "image_std", "size", "do_rescale", "do_normalize", "rescale_image_frac",
                    "rescale_image_max_upscaled_long_edge", *(["resample"] if name == "inkling" else [])):  # fmt: skip
            ours, wanted = (getattr(each, key, None) for each in (own, kind))
            assert (list(ours) == list(wanted)) if isinstance(ours, (list, tuple)) else (ours == wanted), (name, key)


def test_an_image_of_inkling_that_shrinks_to_nothing_is_refused(tmp_path: Path) -> None:
    save_inkling_processor(tmp_path, rescale_image_frac=0.1)
    with pytest.raises(RequestError, match=r"40 x 3 pixels cannot be processed \(0\.1 times its size has no"):
        make(tmp_path, vision=INKLING_VISION).process({"image": [picture(40, 3)]}, ROOM, PARAM)


def test_encoded_images_have_the_same_background(processor: MediaProcessor) -> None:
    image = translucent(37, 30, 7)
    decoded, read = processor.process({"image": [image, encoded(image)]}, ROOM, PARAM)
    assert decoded == read
    black, white = (Image.new("RGBA", (16, 16), color) for color in ((0, 0, 0, 0), (255, 255, 255, 255)))
    clear, opaque = processor.process({"image": [black, white]}, ROOM, PARAM)
    shades, whites = (
        np.unique(np.frombuffer(item.pixel_values, np.float32).reshape(-1, 3)[:, 0]) for item in (clear, opaque)
    )
    np.testing.assert_allclose(shades, [0.2, 0.6], rtol=1e-6)
    np.testing.assert_allclose(whites, [1.0])


def test_refused(folder: Path, processor: MediaProcessor, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="64 x 63 pixels becomes 64 tokens, more than the 63"):
        make(folder, max_tokens=63).process({"image": [picture(64, 63)]}, ROOM, PARAM)
    with pytest.raises(RequestError, match="this model reads images and no videos; send frames"):
        processor.process({"video": [[picture()] * 4]}, ROOM, PARAM)
    save_inkling2_processor(tmp_path)
    with pytest.raises(ConfigError, match=r"say {'size': .*8.*config.json says {'size': {'height': 10, 'width': 10}}"):
        make(tmp_path, vision=replace(INKLING2_VISION, patch_size=5))


def test_a_folder_without_processor_files_has_the_published_settings(tmp_path: Path) -> None:
    """Settings are those of dummy weights: a token for 40 x 40 pixels, and numbers from -1 to 1. Numbers outside of an
    image are beyond this range."""
    processor = make(tmp_path, vision=replace(INKLING2_VISION, patch_size=20))
    (item,) = processor.process({"image": [Image.new("RGB", (41, 40), "white")]}, ROOM, PARAM)
    assert item.grid == (1, 2, 4)
    values, counts = np.unique(np.frombuffer(item.pixel_values, np.float32), return_counts=True)
    np.testing.assert_allclose(values, [-1 - 2 / 255, 1.0], rtol=1e-6)
    assert counts.tolist() == [3 * 40 * 39, 3 * 40 * 41]
