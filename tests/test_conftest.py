"""The shared fixtures do what they promise."""

from __future__ import annotations

import importlib

import pytest
import torch

from tests.conftest import OF_GPUS


@pytest.mark.skipif(torch.cuda.is_available(), reason="they are collected")
def test_modules_of_the_gpu_tiers_can_be_imported() -> None:
    for path in (path for folder in OF_GPUS for path in folder.glob("test_*.py")):
        importlib.import_module(f"tests.{path.parent.name}.{path.stem}")


def test_uninitialised_buffers_are_nan() -> None:
    like = torch.zeros(3)
    for tensor in (torch.empty(63), torch.empty(2, 3, dtype=torch.bfloat16), torch.empty_like(like), like.new_empty(5)):
        assert tensor.isnan().all()


def test_integer_and_meta_buffers_are_left_alone() -> None:
    assert torch.empty(3, dtype=torch.int64).shape == (3,)
    assert torch.empty(3, device="meta").is_meta
