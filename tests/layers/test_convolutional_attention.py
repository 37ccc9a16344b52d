"""Weights of attention behind convolutions: loaded into memory that was given back, on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness import Harness
from tests.layers.test_tensor_parallel import Group
from tests.tiny import make_checkpoint
from weft.weights.loader import load_weights

ARCH = "ZayaForCausalLM"


def test_weights_after_a_sleep(tmp_path: Path) -> None:
    """Memory of weights that were dropped comes back as zeros, and what is constant beside them is set again."""
    harness = Harness(make_checkpoint(ARCH, tmp_path))
    tokens = list(range(40))
    before = harness.run([(harness.sequence(tokens), 40)])[0]
    for parameter in harness.model.parameters():
        memory = parameter.untyped_storage()
        torch.empty(0, dtype=torch.uint8).set_(memory).zero_()
    load_weights(harness.model, harness.config, tmp_path, "auto", 0)
    assert torch.equal(harness.run([(harness.sequence(tokens), 40)])[0], before)


@pytest.mark.parametrize(("kv_heads", "delayed"), [(1, [8]), (2, [0, 16]), (4, [0, 0, 16, 16])])
def test_delayed_channels_of_each_rank(kv_heads: int, delayed: list[int], tmp_path: Path) -> None:
    """The second half of all value channels is delayed, so a rank may have delayed ones alone, or none."""
    folder = make_checkpoint(ARCH, tmp_path, num_key_value_heads=kv_heads)
    group = Group(kv_heads)
    for rank, count in enumerate(delayed):
        attention = Harness(folder, tp=group.rank(rank)).model.get_submodule("model.layers.0.self_attn")
        mask = attention.conv_qk.conv.delayed  # type: ignore[union-attr]
        assert mask.sum() == count == mask[len(mask) - count :].sum()
