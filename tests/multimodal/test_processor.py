"""The processor against transformers' own, and what it refuses."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from tests.multimodal.processors import PARAM, ROOM, expand_text, make_processor, replace_torchvision
from tests.pictures import (
    GLM_VISION,
    INKLING2_VISION,
    INKLING_VISION,
    PATCH,
    VISION,
    data_uri,
    encoded,
    picture,
    save_glm_processor,
    save_inkling2_processor,
    save_inkling_processor,
    save_processor,
)
from weft.config.media_limits import MediaLimits
from weft.config.transport import decode_other, encode_other
from weft.config.vision import VisionConfig
from weft.errors import ConfigError, ContextLengthError, RequestError
from weft.multimodal import patch_maker, rules
from weft.multimodal import processor as processor_module
from weft.multimodal.items import pixel_bytes
from weft.multimodal.media import MediaUrl, ReadLimits, decode_image
from weft.multimodal.parts import prompt_media
from weft.multimodal.patch_maker import PatchMaker
from weft.multimodal.placeholders import expand
from weft.multimodal.processor import MediaProcessor
from weft.multimodal.video import Video

make, expanded = partial(make_processor, vision=VISION, max_tokens=64), partial(expand_text, vision=VISION)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processor")
    save_processor(folder)
    return folder


@pytest.fixture(scope="module")
def processor(folder: Path) -> MediaProcessor:
    return make(folder)


@pytest.fixture
def reference(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    replace_torchvision(monkeypatch)
    monkeypatch.setattr(Qwen3VLVideoProcessor, "convert_to_rgb", lambda self, video: video)
    monkeypatch.setattr(Qwen3VLProcessor, "check_argument_for_proper_class", lambda self, *args: None)
    videos = Qwen3VLVideoProcessor.from_dict(Qwen3VLVideoProcessor.get_video_processor_dict(str(folder))[0])
    return Qwen3VLProcessor(
        Qwen2VLImageProcessorPil.from_pretrained(folder), PreTrainedTokenizerFast.from_pretrained(folder), videos
    )


IMAGE, VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_patches_in_the_models_dtype(dtype: str, folder: Path) -> None:
    """Rounded as the tower would round them."""
    images = {"image": [picture(40, 24, seed) for seed in range(3)]}
    for narrow, wide in zip(
        make(folder, dtype=dtype).process(images, ROOM, PARAM), make(folder).process(images, ROOM, PARAM), strict=True
    ):
        assert (narrow.content_hash, narrow.dtype, 2 * len(narrow.pixel_values)) == (
            wide.content_hash,
            dtype,
            len(wide.pixel_values),
        )
        want = torch.frombuffer(bytearray(wide.pixel_values), dtype=torch.float32).to(getattr(torch, dtype))
        assert torch.equal(torch.frombuffer(bytearray(narrow.pixel_values), dtype=want.dtype), want)
    halfway = 1 + np.array([1, 3, -1, -3], np.float32) / {"bfloat16": 256, "float16": 2048}[dtype]
    want = torch.from_numpy(halfway).to(getattr(torch, dtype))
    assert torch.equal(torch.frombuffer(bytearray(pixel_bytes(halfway, dtype)), dtype=want.dtype), want)


def test_images_as_transformers(folder: Path, processor: MediaProcessor, reference: Any) -> None:
    """Sizes that grow, shrink, and stay; odd shapes; adjacent, first and last in the prompt."""
    images = [picture(*size, seed=i) for i, size in enumerate([(24, 16), (3, 3), (200, 9), (31, 97), (64, 64)])]
    text = f"{IMAGE}the quick{IMAGE}{IMAGE} fox{IMAGE}é{IMAGE}"
    wanted = reference(text=[text], images=images, return_tensors="np")
    done = processor.process({"image": images}, ROOM, PARAM)
    prompt = expanded(folder, text, done)
    assert prompt.token_ids == wanted["input_ids"][0].tolist()
    assert [list(item.grid) for item in prompt.media] == wanted["image_grid_thw"].tolist()
    pixels = np.concatenate([item.patches() for item in prompt.media])
    np.testing.assert_array_equal(pixels, wanted["pixel_values"])
    for item in prompt.media:
        ((offset, length),) = item.placeholders
        assert set(prompt.token_ids[offset : offset + length]) == {5}
        assert prompt.token_ids[offset - 1] == 3 and prompt.token_ids[offset + length] == 4


@pytest.mark.parametrize(("num_frames", "fps"), [(7, 4.0), (30, 6.0), (40, None)])
def test_videos_as_transformers(
    folder: Path, processor: MediaProcessor, reference: Any, num_frames: int, fps: float | None
) -> None:
    """Frames sampled to two per second (and at least two, at most six), odd numbers padded, timestamps between."""
    from transformers.video_utils import VideoMetadata

    frames = np.stack([np.asarray(picture(26, 15, seed=i)) for i in range(num_frames)])
    text = f"user\n{VIDEO} and {IMAGE}"
    image = picture(9, 9)
    metadata = VideoMetadata(total_num_frames=num_frames, fps=fps, duration=None)
    wanted = reference(text=[text], images=[image], videos=[frames], video_metadata=[metadata], return_tensors="np")
    video: Any = frames if fps is None else (frames, {"fps": fps})
    prompt = expanded(folder, text, processor.process(prompt_media({"image": image, "video": video}), ROOM, PARAM))
    assert prompt.token_ids == wanted["input_ids"][0].tolist()
    item, still = prompt.media
    assert (item.modality, still.modality) == ("video", "image")
    assert [list(item.grid)] == wanted["video_grid_thw"].tolist() and item.grid[0] == len(item.placeholders)
    np.testing.assert_allclose(item.patches(), wanted["pixel_values_videos"], atol=1e-6)


def test_sources_are_equal(tmp_path: Path, processor: MediaProcessor) -> None:
    """A picture has the same hash and one result, whatever its source."""
    image = picture(40, 20)
    path = tmp_path / "x.webp"
    path.write_bytes(encoded(image, "WEBP", lossless=True))
    sources = [
        image,
        np.asarray(image),
        path,
        str(path),
        encoded(image),
        encoded(image, "GIF") and encoded(image, "PNG"),
    ]
    sources.append(MediaUrl(data_uri(encoded(image))))
    done = processor.process(prompt_media({"image": sources}), ROOM, PARAM)
    assert len({item.content_hash for item in done}) == 1
    assert len({id(item) for item in done}) == 1, "processed once"
    shapes = [np.zeros((height, width, 3), np.uint8) for height, width in ((40, 80), (80, 40))]
    others = processor.process({"image": [picture(40, 20, seed=1), *shapes]}, ROOM, PARAM)
    assert len({item.content_hash for item in (done[0], *others)}) == 4, "equal pixels in another shape are another"


def test_videos_of_equal_patches_in_another_shape_are_others(processor: MediaProcessor) -> None:
    """Frames of one colour: the bytes of their patches do not say where a row, or a frame, ends."""
    shapes = [(2, 16, 24), (2, 24, 16), (4, 8, 24), (4, 24, 8), (6, 8, 16)]
    black = [(np.zeros((*shape, 3), np.uint8), {"do_sample_frames": False}) for shape in shapes]
    done = [processor.process(prompt_media({"video": frames}), ROOM, PARAM)[0] for frames in black]
    assert len({item.pixel_values for item in done}) == 1, "otherwise this tests nothing"
    assert len({item.grid for item in done}) == len({item.content_hash for item in done}) == len(shapes)
    again = processor.process(prompt_media({"video": black[0]}), ROOM, PARAM)[0]
    assert again.content_hash == done[0].content_hash


def test_detail_low_is_a_smaller_copy(folder: Path) -> None:
    url = data_uri(encoded(picture(1024, 256)))
    processor = make(folder, vision=VISION)
    high, low = processor.process({"image": [MediaUrl(url), MediaUrl(url, "low")]}, ROOM, PARAM)
    by_hand = processor.process({"image": [picture(1024, 256).resize((512, 128), reducing_gap=2.0)]}, ROOM, PARAM)[0]
    assert low.content_hash != high.content_hash and low.grid == by_hand.grid


def test_the_cache_is_bounded(folder: Path) -> None:
    images = [picture(32, 32, seed=i) for i in range(5)]
    size = len(make(folder).process({"image": images[:1]}, ROOM, PARAM)[0].pixel_values)
    processor = make(folder, cache_bytes=2 * size)
    first = processor.process({"image": images}, ROOM, PARAM)
    again = processor.process({"image": images[::-1]}, ROOM, PARAM)[::-1]
    assert [a is b for a, b in zip(first, again, strict=True)] == [False, False, False, True, True]
    assert first == again
    kept, other, new = images[1], images[0], images[2]  # ``kept`` came first and is used last
    for image in (other, kept, new):
        processor.process({"image": [image]}, ROOM, PARAM)
    assert list(processor._cache._items) == [first[1].content_hash, first[2].content_hash]
    for i in range(60):
        processor.process({"image": [encoded(picture(32, 32, seed=i))]}, ROOM, PARAM)
    assert len(processor._cache._hashes) <= 4 * 2 + 16


def test_positions_move_with_the_images(folder: Path, processor: MediaProcessor) -> None:
    item = processor.process({"image": [picture(32, 32)]}, ROOM, PARAM)[0]
    num = VISION.num_tokens(item.grid)
    prompt = expand([7, 3, 5, 4, 8], [1, 2, 3, 5], [item], VISION, None, PARAM)
    assert prompt.token_ids == [7, 3, *[5] * num, 4, 8] and prompt.positions == [1, 2, 2 + num, 4 + num]


@pytest.mark.parametrize(
    ("ids", "media", "error"),
    [
        ([1, 5], {}, r"1 image placeholders \(token 5\) and 0 images; write one"),
        ([1], {"image": 1}, "0 image placeholders .* and 1 images"),
        ([5, 5, 1], {"image": 1}, "2 image placeholders .* and 1 images"),
        ([6], {"image": 1}, "0 image placeholders"),
        ([5, 6], {"image": 1}, "1 video placeholders .* and 0 videos"),
    ],
)
def test_placeholders_must_match(processor: MediaProcessor, ids: list[int], media: dict[str, int], error: str) -> None:
    done = processor.process({"image": [picture()] * media.get("image", 0)}, ROOM, PARAM)
    with pytest.raises(RequestError, match=error):
        expand(ids, [], done, VISION, None, PARAM)


class TestRefusals:
    @pytest.mark.parametrize(
        ("source", "error"),
        [
            ([1, 2], "given as list; give a PIL image"),
            ("path", "given as str"),
            (np.zeros((4, 4, 3)), r"float64 \[4, 4, 3\]; give \[height, width, 3\] of uint8"),
            (np.zeros((3, 4, 4), np.uint8), r"uint8 \[3, 4, 4\]"),
            (np.zeros((0, 4, 3), np.uint8), "4 x 0 pixels"),
            (Path("/nowhere/x.png"), "cannot be read"),
            (Path("/dev/zero"), "is not a file"),
            (b"", "nothing"),
            (Image.new("RGB", (201, 1)), "201 x 1 pixels cannot be processed"),
            (Image.new("I;16", (4, 4)), "more than 8 bits"),
        ],
    )
    def test_sources(self, processor: MediaProcessor, source: Any, error: str) -> None:
        with pytest.raises(RequestError, match=error):
            processor.process({"image": [source]}, ROOM, PARAM)

    @pytest.mark.parametrize(
        ("video", "error"),
        [
            ("clip.mp4", "given as str; give frames"),
            ([picture()], "1 frames; it needs at least 2"),
            ([picture(8, 8), picture(8, 9)], "different sizes"),
            (([picture()] * 4, {"fps": 0}), "fps=0 is not a number above 0"),
            (([picture()] * 4, {"codec": 1}), r"unknown keys \['codec'\]"),
            (([picture()] * 7, {"do_sample_frames": False}), "7 frames; at most 6 are used"),
        ],
    )
    def test_videos(self, processor: MediaProcessor, video: Any, error: str) -> None:
        with pytest.raises(RequestError, match=error):
            processor.process(prompt_media({"video": video}), ROOM, PARAM)

    def test_limits(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        image = picture(64, 64)
        few = make(folder, limit_per_prompt=MediaLimits(image=1, video=0))
        with pytest.raises(RequestError, match="2 images; at most 1 are allowed") as refused:
            few.process({"image": [image, image]}, ROOM, "multi_modal_data")
        assert refused.value.param == "multi_modal_data"
        with pytest.raises(RequestError, match="1 videos; at most 0 are allowed"):
            few.process(prompt_media({"video": np.zeros((4, 8, 8, 3), np.uint8)}), ROOM, PARAM)
        with pytest.raises(RequestError, match="64 x 64 pixels becomes 64 tokens, more than the 63"):
            make(folder, max_tokens=63).process({"image": [image]}, ROOM, PARAM)
        with pytest.raises(ContextLengthError, match="first 2 of the prompt's 3 images"):
            make(folder).process({"image": [image] * 3}, 127, PARAM)
        monkeypatch.setattr(processor_module, "MAX_PROMPT_BYTES", 200_000)
        with pytest.raises(RequestError, match=r"first 3 of the prompt's 9 images .* more than 200,000 bytes"):
            make(folder).process({"image": [image] * 9}, ROOM, PARAM)
        with pytest.raises(RequestError, match="larger than the 1,000 bytes"):
            frames = Video([encoded(picture(20, 20, seed=i)) for i in range(4)], is_sampled=True)
            make(folder, limits=ReadLimits(max_bytes=1000)).process({"video": [frames]}, ROOM, PARAM)

    def test_all_frames_of_a_video_have_a_limit_together(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        decoded: list[bytes] = []

        def decode(data: bytes, *args: Any) -> Image.Image:
            decoded.append(data)
            return decode_image(data, *args)

        monkeypatch.setattr(patch_maker, "decode_image", decode)
        frames = Video([encoded(picture(40, 30, seed=i)) for i in range(4)], is_sampled=True)
        with pytest.raises(RequestError, match="4 frames of 40 x 30 pixels, together more than the 4,799"):
            make(folder, limits=ReadLimits(max_video_pixels=4799)).process({"video": [frames]}, ROOM, PARAM)
        assert len(decoded) == 1
        assert make(folder, limits=ReadLimits(max_video_pixels=4800)).process({"video": [frames]}, ROOM, PARAM)

    def test_folders(self, folder: Path, tmp_path: Path) -> None:
        save_processor(tmp_path)
        config = tmp_path / "preprocessor_config.json"
        config.write_text(re.sub(f'"patch_size": {PATCH}', '"patch_size": 14', config.read_text()))
        with pytest.raises(ConfigError, match=r"say \{'patch_size': 14\}, config.json says"):
            make(tmp_path)
        config.write_text("{")
        with pytest.raises(ConfigError, match="cannot be read"):
            make(tmp_path)

    def test_a_folder_without_processor_files_has_the_published_settings(self, tmp_path: Path) -> None:
        """Dummy weights need no processor files."""
        assert make(tmp_path, max_tokens=1024).process({"image": [picture(64, 64)]}, ROOM, PARAM)[0].grid == (1, 64, 64)


@pytest.mark.parametrize("given", [5, ["x"], {"audio": 1}, {"image": 1, 3: 4}])
def test_multi_modal_data_is_checked(given: Any) -> None:
    with pytest.raises(RequestError, match="must be a dict with image, video or both"):
        prompt_media(given)


@pytest.mark.parametrize("image", [picture(), np.zeros((4, 4, 3), np.uint8), b"", Path("a.png")], ids=type)
def test_one_image_needs_no_list(image: Any) -> None:
    found = prompt_media({"image": image})["image"]
    assert len(found) == 1 and found[0] is image
    assert prompt_media({"image": []}) == prompt_media({"image": ()}) == prompt_media({"image": None}) == {}


def test_sizes_are_those_of_the_reference() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    rng = np.random.default_rng(0)
    for _ in range(3000):
        height, width = (int(side) for side in rng.integers(1, 3000, 2))
        limits = int(rng.integers(1, 200)) * 1024, int(rng.integers(200, 20_000)) * 1024
        try:
            expected = smart_resize(height, width, 32, *limits)
        except ValueError:
            with pytest.raises(ValueError, match="aspect ratio"):
                rules.resized_size(height, width, 32, *limits)
        else:
            assert rules.resized_size(height, width, 32, *limits) == expected


@pytest.mark.parametrize(
    ("save", "vision"),
    [(save_processor, VISION), (save_glm_processor, GLM_VISION), (save_inkling_processor, INKLING_VISION),
     (save_inkling2_processor, INKLING2_VISION)],
    ids=["qwen", "glm", "inkling", "inkling2"],
)  # fmt: skip
def test_a_copy_for_another_process_gives_the_same(save: Any, vision: VisionConfig, tmp_path: Path) -> None:
    save(tmp_path)
    data, maker = encoded(picture(70, 50)), make(tmp_path, vision=vision, max_tokens=500).patch_maker
    sent = msgspec.msgpack.encode(maker, enc_hook=encode_other)
    again = msgspec.msgpack.decode(sent, type=PatchMaker, dec_hook=decode_other)
    assert again == maker and again.image(data, False, PARAM) == maker.image(data, False, PARAM)
