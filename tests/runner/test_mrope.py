"""Positions of prompts with images, and rotary rows, against transformers' own functions."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel, Qwen3VLTextRotaryEmbedding

from tests.media import IMAGE, MERGE, VIDEO, Prompt
from tests.tiny import make_config
from weft.config.rope import RopeConfig
from weft.ops.rotary import rotary_table
from weft.ops.rotary.axes import frequency_axes, rotary_rows
from weft.runner.mrope import mrope_positions

PROMPTS = [
    Prompt().text(9),
    Prompt().image(4, 6, bare=True),
    Prompt().image(2, 2).text(3),
    Prompt().text(2).image(2, 20).image(8, 2).text(1).video(3, 4, 2).text(5).image(6, 6),
]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_positions(prompt: Prompt) -> None:
    ids = torch.tensor([prompt.token_ids])
    grids = {
        f"{modality}_grid_thw": torch.tensor([i.grid for i in prompt.media if i.modality == modality])
        .view(-1, 3)
        .long()
        for modality in ("image", "video")
    }
    owner = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=MERGE)))
    owner.get_vision_position_ids = lambda *args, **kw: Qwen3VLModel.get_vision_position_ids(owner, *args, **kw)
    types = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    want, delta = Qwen3VLModel.get_rope_index(owner, ids, types, **grids)
    runs = [run for item in prompt.media for run in item.runs()]
    got, later = mrope_positions(len(prompt.token_ids), runs, MERGE)
    assert np.array_equal(got, want[:, 0].numpy()) and later == delta.item()
    assert (got <= np.arange(got.shape[1])).all()  # rows of the table for text suffice


def test_rotary_rows() -> None:
    section = (4, 2, 2)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section)}
    config = make_config("Qwen3VLForConditionalGeneration", rope_parameters=rope).text_config
    positions = torch.randint(0, 50, (3, 20))
    cos, sin = Qwen3VLTextRotaryEmbedding(config)(torch.zeros(1), positions[:, None])
    table = rotary_table(RopeConfig(1e4, 16), 512, 50, "cpu")
    rows = rotary_rows(table, positions, frequency_axes(16, section))
    torch.testing.assert_close(rows, torch.cat([cos[0, :, :8], sin[0, :, :8]], dim=1))
