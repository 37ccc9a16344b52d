"""The plan's bytes are the tensors' bytes."""

from __future__ import annotations

import pytest
import torch

from weft.cache.plan import plan_caches
from weft.cache.spec import CacheSpec
from weft.config.model import LinearAttentionConfig
from weft.runner.memory import allocate_caches, cache_tensors

MIB = 2**20


def make_spec(hybrid: bool = True, state_dtype: str = "float32") -> CacheSpec:
    linear = LinearAttentionConfig(2, 4, 16, 32, 4) if hybrid else None
    return CacheSpec(16, 2, 2, 64, "bfloat16", 3 if hybrid else 0, linear, "bfloat16", state_dtype)


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_planned_bytes_are_the_tensors_bytes(hybrid: bool, state_dtype: str) -> None:
    spec = make_spec(hybrid, state_dtype)
    plan = plan_caches(spec, budget_bytes=8 * MIB, max_num_seqs=8, max_model_len=512)
    caches = allocate_caches(spec, plan, ["a", "b"], ["x", "y", "z"] if hybrid else [], torch.device("cpu"))
    assert sum(tensor.nbytes for tensor in cache_tensors(caches).values()) == plan.cache_bytes <= 8 * MIB
