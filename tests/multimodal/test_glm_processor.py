"""The processor of GLM-5.3 against transformers' own."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.multimodal.processors import PARAM, ROOM, expand_text, make_processor, replace_torchvision
from tests.pictures import GLM_VISION, picture, save_glm_processor
from weft.errors import RequestError, UnsupportedModelError
from weft.multimodal.parts import prompt_media
from weft.multimodal.processor import MediaProcessor
from weft.multimodal.rules import glm_fit
from weft.multimodal.video import VideoSettings

make, expanded = (partial(f, vision=GLM_VISION) for f in (make_processor, expand_text))
IMAGE = "<|begin_of_image|><|image|><|end_of_image|>"
VIDEO = "<|begin_of_video|><|video|><|end_of_video|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processor")
    save_glm_processor(folder)
    return folder


@pytest.fixture(scope="module")
def processor(folder: Path) -> MediaProcessor:
    return make(folder)


@pytest.fixture
def video_processing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' module, which imports torchvision."""
    replace_torchvision(monkeypatch)
    return import_module("transformers.models.glm5_next.video_processing_glm5_next")


@pytest.fixture
def reference(folder: Path, video_processing: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    from transformers import PreTrainedTokenizerFast
    from transformers.models.glm5_next.image_processing_pil_glm5_next import Glm5NextImageProcessorPil
    from transformers.models.glm5_next.processing_glm5_next import Glm5NextProcessor

    kind = video_processing.Glm5NextVideoProcessor
    monkeypatch.setattr(kind, "convert_to_rgb", lambda self, video: video)
    monkeypatch.setattr(Glm5NextProcessor, "check_argument_for_proper_class", lambda self, *args: None)
    return Glm5NextProcessor(
        Glm5NextImageProcessorPil.from_pretrained(folder),
        PreTrainedTokenizerFast.from_pretrained(folder),
        kind.from_dict(kind.get_video_processor_dict(str(folder))[0]),
    )


def test_images_as_transformers(folder: Path, processor: MediaProcessor, reference: Any) -> None:
    """Sizes that grow, shrink, stay, and stay on a larger canvas; adjacent, first and last in the prompt."""
    sizes = [(24, 16), (3, 3), (300, 9), (31, 97), (64, 64), (1, 50), (70, 90), (20, 30)]
    images = [picture(*size, seed=i) for i, size in enumerate(sizes)]
    text = f"{IMAGE}the quick{IMAGE}{IMAGE} fox{IMAGE * 4}é{IMAGE}"
    wanted = reference(text=[text], images=images, return_tensors="np")
    prompt = expanded(folder, text, processor.process({"image": images}, ROOM, PARAM))
    assert prompt.token_ids == wanted["input_ids"][0].tolist()
    assert [list(item.grid) for item in prompt.media] == wanted["image_grid_thw"].tolist()
    pixels = np.concatenate([item.patches() for item in prompt.media])
    np.testing.assert_array_equal(pixels, wanted["pixel_values"])
    for item in prompt.media:
        ((offset, length),) = item.placeholders
        assert set(prompt.token_ids[offset : offset + length]) == {5} and length == item.num_tokens


@pytest.mark.parametrize(("num_frames", "fps", "size"), [(7, 4.0, (26, 15)), (30, 6.0, (9, 70)), (40, 24.0, (40, 40))])
def test_videos_as_transformers(
    folder: Path, processor: MediaProcessor, reference: Any, num_frames: int, fps: float, size: tuple[int, int]
) -> None:
    """Two frames per second, at most eight; a time follows each pair; images of the same prompt are told apart."""
    from transformers.video_utils import VideoMetadata

    frames = np.stack([np.asarray(picture(*size, seed=i)) for i in range(num_frames)])
    text, image = f"user\n{VIDEO} and {IMAGE}", picture(9, 9)
    metadata = VideoMetadata(total_num_frames=num_frames, fps=fps, duration=None)
    wanted = reference(text=[text], images=[image], videos=[frames], video_metadata=[metadata], return_tensors="np")
    media = prompt_media({"image": image, "video": (frames, {"fps": fps})})
    prompt = expanded(folder, text, processor.process(media, ROOM, PARAM))
    assert prompt.token_ids == wanted["input_ids"][0].tolist()
    item, still = prompt.media
    assert (item.modality, still.modality) == ("video", "image")
    assert [list(item.grid)] == wanted["video_grid_thw"].tolist() and item.grid[0] == len(item.placeholders)
    np.testing.assert_allclose(item.patches(), wanted["pixel_values_videos"], atol=1e-6)
    for offset, length in item.placeholders:
        assert set(prompt.token_ids[offset : offset + length]) == {5}


def test_sizes_are_those_of_the_reference() -> None:
    from transformers.models.glm5_next.image_processing_pil_glm5_next import smart_resize

    rng = np.random.default_rng(0)
    for _ in range(3000):
        frames, height, width = int(rng.integers(1, 9)), *(int(side) for side in rng.integers(1, 1500, 2))
        low, high = int(rng.integers(1, 50)), int(rng.integers(1, 400))
        keys = {"step": 2, "factor": 28, "min_pixels": low * 2 * 28**2, "max_pixels": high * 2 * 28**2}
        try:
            wanted = smart_resize(frames, height, width, 2, 28, low, high)
        except ValueError:
            with pytest.raises(ValueError, match="fewer than one square"):
                glm_fit(frames, height, width, **keys)
        else:
            assert glm_fit(frames, height, width, **keys).canvas == wanted


def test_frames_are_those_of_the_reference(folder: Path, video_processing: Any) -> None:
    from transformers.video_utils import VideoMetadata

    kind = video_processing.Glm5NextVideoProcessor
    theirs = kind.from_dict(kind.get_video_processor_dict(str(folder))[0])
    ours, rng = VideoSettings.read(folder, GLM_VISION), np.random.default_rng(0)
    sample = ours.rules.sample
    for _ in range(300):
        total, fps, most = int(rng.integers(2, 300)), float(rng.integers(1, 70)), int(rng.integers(2, 60))
        theirs.max_frames = most
        wanted = theirs.sample_frames(VideoMetadata(total_num_frames=total, fps=fps, duration=None))
        assert sample(total, fps, replace(ours, max_frames=most)) == wanted.tolist()


def test_refused(folder: Path, tmp_path: Path) -> None:
    save_glm_processor(tmp_path)
    config = tmp_path / "video_preprocessor_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_duration": 300}))
    with pytest.raises(UnsupportedModelError, match="max_duration=300 is not supported"):
        make(tmp_path)
    with pytest.raises(RequestError, match="64 x 64 pixels becomes 64 tokens, more than the 63"):
        make(folder, max_tokens=63).process({"image": [picture(64, 64)]}, ROOM, PARAM)
    video = prompt_media({"video": (np.zeros((300, 8, 8, 3), np.uint8), {"do_sample_frames": False})})
    with pytest.raises(RequestError, match="300 frames; at most 8 are used"):
        make(folder).process(video, ROOM, PARAM)


def test_a_folder_without_processor_files_has_the_published_settings(tmp_path: Path) -> None:
    """Dummy weights need no processor files. Images have at least 16 tokens and are normalised as for CLIP."""
    processor = make(tmp_path, vision=replace(GLM_VISION, patch_size=14))
    (item,) = processor.process({"image": [picture(28, 28)]}, ROOM, PARAM)
    assert item.grid == (1, 8, 8)
    assert processor.patch_maker.videos.longest_edge == 240_000 * 2 * 28**2
    assert processor.patch_maker.videos.image_mean[0] == 0.48145466
