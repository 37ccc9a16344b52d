"""Pictures for tests, made on the spot, and folders of models that read them."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.tiny_tokenizer import GLM_IDS, INKLING_IDS, VISION_IDS, save_tokenizer
from weft.config.vision import VisionConfig, VisionTokens

PATCH, MERGE, FRAMES = 4, 2, 2
SIZE = {"shortest_edge": 64, "longest_edge": 4096}
"""Pixels of a picture after the processor: 1 to 64 tokens of 8 x 8 pixels."""

VISION = VisionConfig(
    depth=1, hidden_size=16, intermediate_size=16, num_heads=2, in_channels=3, patch_size=PATCH,
    temporal_patch_size=FRAMES, spatial_merge_size=MERGE, out_hidden_size=16, num_position_embeddings=16,
    activation="gelu", rope_theta=1e4, mrope_section=(1, 1, 1),
    tokens=VisionTokens(image=5, video=6, start=3, end=4),
)  # fmt: skip
GLM_VISION = replace(VISION, num_position_embeddings=0, activation="silu", mrope_section=None, processor="glm")
INKLING2_VISION = replace(
    VISION, temporal_patch_size=1, mrope_section=None, processor="inkling2", tokens=VisionTokens(image=4),
    class_token=True,
)  # fmt: skip
INKLING_VISION = replace(
    INKLING2_VISION, patch_size=8, temporal_patch_size=2, spatial_merge_size=1, processor="inkling", class_token=False
)


def picture(width: int = 24, height: int = 16, seed: int = 0) -> Image.Image:
    """Smooth noise, so that JPEG changes it little."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def data_uri(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes, kind: str = "png", **fields: Any) -> dict[str, Any]:
    """A content part of the OpenAI API."""
    return {"type": "image_url", "image_url": {"url": data_uri(data, kind)} | fields}


def save_processor(folder: Path) -> None:
    """Tokenizer and processor files as ``save_pretrained`` writes them."""
    save_tokenizer(folder, media="qwen")
    shared = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": FRAMES, "size": SIZE}
    shared |= {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2], "resample": 3}
    images = shared | {"image_processor_type": "Qwen2VLImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    videos = shared | {"video_processor_type": "Qwen3VLVideoProcessor", "fps": 2, "min_frames": 2, "max_frames": 6}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos | {"cap_pixels_per_frame": False}))


def save_glm_processor(folder: Path) -> None:
    """``save_processor`` as for GLM-5.3: 2 to 64 tokens per image, 4 to 120 per video."""
    save_tokenizer(folder, media="glm")
    shared = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": FRAMES, "size": {"longest_edge": 1}}
    shared |= {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2], "resample": 3}
    images = shared | {"image_processor_type": "Glm5NextImageProcessor", "min_image_tokens": 2, "max_image_tokens": 64}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    videos = shared | {"video_processor_type": "Glm5NextVideoProcessor", "fps": 2, "max_frames": 8}
    videos |= {"min_image_tokens": 4, "max_image_tokens": 120}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))


def save_inkling2_processor(folder: Path) -> None:
    """``save_processor`` as for Inkling 2: one token for 8 x 8 pixels."""
    save_tokenizer(folder, media="inkling")
    settings = {"image_processor_type": "Inkling2ImageProcessor", "size": {"height": 8, "width": 8}}
    settings |= {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2]}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def save_inkling_processor(folder: Path, **changes: Any) -> None:
    """``save_processor`` as for Inkling: one token for 8 x 8 pixels, of images of twice the size up to 60 pixels."""
    save_tokenizer(folder, media="inkling")
    settings = {"image_processor_type": "InklingImageProcessor", "size": {"height": 8, "width": 8}, "resample": 1}
    settings |= {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2], "rescale_image_frac": 2.0}
    settings |= {"rescale_image_max_upscaled_long_edge": 60} | changes
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


TOP, GLM_TOP, INKLING_TOP = VISION_IDS, GLM_IDS, INKLING_IDS
"""For ``make_checkpoint(..., top=TOP)``: the ids of this module's tokenizer."""
