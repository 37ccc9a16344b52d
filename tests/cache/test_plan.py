"""Pool sizes: what fits, what is clamped and why."""

from __future__ import annotations

import pytest

from tests import specs
from tests.runner.test_memory import MIB, make_spec
from weft.cache.plan import plan_caches
from weft.config.gated_delta_net import GatedDeltaNetConfig
from weft.config.layer_spec import CacheDtypes
from weft.errors import CapacityError


def test_geometry_of_qwen3_next_80b() -> None:
    """The figures of the published model: 75.5 MB of recurrent state a slot in float32, 24,576 bytes of KV a token."""
    spec = specs.make_spec(
        page_size=16,
        attention=12,
        linear=36,
        kv_heads=2,
        head_dim=256,
        geometry=GatedDeltaNetConfig(16, 32, 128, 128, 4),
        dtypes=CacheDtypes("bfloat16", "bfloat16", "float32"),
    )
    assert spec.kv_bytes_per_token == 24_576
    assert spec.slot_bytes == 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)


def test_roomy_budget_gives_every_request_its_slot_and_no_useless_pages() -> None:
    plan = plan_caches(make_spec(), budget_bytes=1 << 30, max_num_seqs=4, max_model_len=100)
    assert (plan.num_slots, plan.num_pages) == (5, 4 * 7 + 1)
    assert (plan.max_num_seqs, plan.max_model_len) == (4, 100)
    assert set(plan.reasons) == {"num_state_slots", "num_kv_pages"}


def test_tight_budget_clamps_requests_and_context_with_reasons() -> None:
    spec = make_spec()
    plan = plan_caches(spec, budget_bytes=spec.slot_bytes * 8, max_num_seqs=100, max_model_len=100_000)
    assert plan.max_num_seqs == 3 and "clamped" in plan.reasons["max_num_seqs"]
    assert plan.max_model_len == (plan.num_pages - 1) * 16 and "clamped" in plan.reasons["max_model_len"]


def test_given_sizes_are_taken() -> None:
    plan = plan_caches(
        make_spec(), budget_bytes=MIB, max_num_seqs=9, max_model_len=64, num_kv_pages=7, num_state_slots=3
    )
    assert (plan.num_pages, plan.num_slots, plan.max_num_seqs) == (7, 3, 2)


def test_too_little_is_refused_with_the_remedy() -> None:
    with pytest.raises(CapacityError, match="cpu_cache_gib"):
        plan_caches(make_spec(), budget_bytes=100, max_num_seqs=1, max_model_len=64)
    with pytest.raises(CapacityError, match="KV pages"):
        plan_caches(make_spec(hybrid=False), budget_bytes=100, max_num_seqs=1, max_model_len=64)


def test_prefix_cache_gets_room_of_its_own() -> None:
    sizes = {"budget_bytes": 2**30, "max_num_seqs": 100, "max_model_len": 128}
    spec = make_spec()
    plain, keeping = plan_caches(spec, **sizes), plan_caches(spec, **sizes, keeps_prefixes=True)
    assert plain.num_slots - 1 == plain.max_num_seqs == keeping.max_num_seqs == 100
    assert keeping.num_slots - 1 == 100 + 400 and "400 for the prefix cache" in keeping.reasons["num_state_slots"]
    assert keeping.num_pages - 1 == 4 * (plain.num_pages - 1)
    small = plan_caches(spec, **(sizes | {"max_num_seqs": 1}), keeps_prefixes=True)
    assert small.num_slots - 1 == 1 + 256


@pytest.mark.parametrize("hybrid", [True, False])
def test_requests_at_the_full_context(hybrid: bool) -> None:
    sizes = {"budget_bytes": MIB, "max_num_seqs": 9, "max_model_len": 100}
    plan = plan_caches(make_spec(hybrid), **sizes, num_kv_pages=36, num_state_slots=5 if hybrid else None)
    assert plan.num_full_contexts(16) == (4 if hybrid else 5)  # 35 pages, 7 of which hold 100 tokens; 4 slots


def test_every_draft_of_a_running_request_has_a_slot() -> None:
    spec = make_spec()
    sizes = {"budget_bytes": 1 << 30, "max_num_seqs": 4, "max_model_len": 100}
    plan = plan_caches(spec, **sizes, num_drafts_at=lambda num_seqs: 3)
    assert plan.num_slots == 4 * 4 + 1 and plan.max_num_seqs == 4
    assert "12 for drafts" in plan.reasons["num_state_slots"]
    tight = plan_caches(
        spec, budget_bytes=spec.slot_bytes * 20, max_num_seqs=4, max_model_len=100, num_drafts_at=lambda num_seqs: 3
    )
    assert tight.max_num_seqs == 2 and "6 of them for drafts" in tight.reasons["max_num_seqs"]
    assert plan_caches(make_spec(hybrid=False), **sizes, num_drafts_at=lambda num_seqs: 3).num_slots == 1
    assert plan_caches(spec, **sizes, num_drafts_at=lambda num_seqs: 3, num_state_slots=3).max_num_seqs == 1


def test_slots_follow_the_drafts_of_every_batch_size() -> None:
    """4 drafts alone, 1 up to 3 requests: three with one each need 6 slots, and while a second request is admitted the
    first still holds 5."""
    few = {1: 4, 2: 1, 3: 1}
    sizes = {"budget_bytes": 1 << 30, "max_model_len": 100, "num_drafts_at": lambda n: few.get(n, 0)}
    assert [plan_caches(make_spec(), max_num_seqs=n, **sizes).num_slots - 1 for n in (1, 2, 3, 4, 9)] == [5, 6, 6, 7, 9]
    assert plan_caches(make_spec(), max_num_seqs=9, **sizes, num_state_slots=7).max_num_seqs == 3
