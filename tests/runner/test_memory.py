"""The plan's bytes are the tensors' bytes."""

from __future__ import annotations

import pytest
import torch

from tests import specs
from weft.cache.plan import plan_caches
from weft.cache.spec import CacheSpec
from weft.config.gated_delta_net import GatedDeltaNetConfig
from weft.config.layer_spec import CacheDtypes
from weft.runner.memory import allocate_caches, cache_tensors

MIB = 2**20


def make_spec(hybrid: bool = True, state_dtype: str = "float32") -> CacheSpec:
    return specs.make_spec(
        page_size=16,
        attention=2,
        linear=3 if hybrid else 0,
        kv_heads=2,
        head_dim=64,
        geometry=GatedDeltaNetConfig(2, 4, 16, 32, 4),
        dtypes=CacheDtypes("bfloat16", "bfloat16", state_dtype),
    )


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_planned_bytes_are_the_tensors_bytes(hybrid: bool, state_dtype: str) -> None:
    spec = make_spec(hybrid, state_dtype)
    plan = plan_caches(spec, budget_bytes=8 * MIB, max_num_seqs=8, max_model_len=512)
    caches = allocate_caches(spec, plan, torch.device("cpu"))
    assert sum(tensor.nbytes for tensor in cache_tensors(caches).values()) == plan.cache_bytes <= 8 * MIB
