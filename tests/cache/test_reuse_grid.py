"""A cache with a grid: others reuse prefills of whole chunks, and nothing else."""

from __future__ import annotations

import pytest

from tests.specs import make_spec
from weft.cache.lease import Lease
from weft.cache.manager import Manager
from weft.cache.reuse_grid import ReuseGrid
from weft.cache.state_plan import CheckpointPolicy

GRID = 8


def make_manager(linear: int, policy: CheckpointPolicy = "exact") -> Manager:
    return Manager(
        make_spec(page_size=4, linear=linear, head_dim=8), num_pages=100, num_slots=20 if linear else 1,
        enable_prefix_caching=True, checkpoint_policy=policy, grid=ReuseGrid(GRID),
    )  # fmt: skip


def run(manager: Manager, prompt: list[int], generated: int = 0) -> Lease:
    """Prefill ``prompt`` in one step, and ``generated`` decodes. Returns the lease, ended."""
    lease = manager.lease(manager.match(prompt))
    assert lease is not None
    start = lease.num_cached_tokens
    for end in (len(prompt), *range(len(prompt) + 1, len(prompt) + generated + 1)):
        manager.allocate(lease, end)
        stored = manager.allocate_checkpoints(lease, start, end - start)
        assert all(position % GRID == 0 and position <= len(prompt) for position, _ in stored)
        manager.commit(lease, end)
        manager.confirm(lease, end)
        manager.check()
        start = end
    manager.release(lease, [*prompt, *([99] * generated)])
    manager.check()
    return lease


@pytest.mark.parametrize("linear", [0, 1])
@pytest.mark.parametrize(("length", "reused"), [(1, 0), (8, 0), (9, 0), (10, 8), (17, 8), (18, 16), (30, 24)])
def test_an_identical_prompt_leaves_two_tokens_at_least(linear: int, length: int, reused: int) -> None:
    manager, prompt = make_manager(linear), list(range(length))
    run(manager, prompt)
    assert manager.match(prompt).num_tokens == reused
    assert run(manager, prompt).num_cached_tokens == reused


@pytest.mark.parametrize("linear", [0, 1])
def test_generated_tokens_are_not_reused(linear: int) -> None:
    manager, prompt = make_manager(linear), list(range(18))
    run(manager, prompt, generated=20)
    assert manager.match([*prompt, *([99] * 20)]).num_kv_tokens == 16


@pytest.mark.parametrize("linear", [0, 1])
def test_a_resumed_request_reuses_its_prompt_alone(linear: int) -> None:
    """Another prompt may have the same tokens, computed as a prompt's."""
    manager, whole = make_manager(linear), list(range(40))
    run(manager, whole)
    assert manager.match(whole, num_prompt_tokens=20).num_tokens <= 16
    assert manager.match(whole).num_tokens == 32


def test_a_state_is_stored_where_prompts_part() -> None:
    """At the last point of the grid before; the third prompt finds it."""
    manager, prompt = make_manager(1), list(range(60))
    run(manager, prompt)
    other = [*prompt[:29], *([77] * 31)]
    assert manager.match(other).num_tokens == 0, "no state there"
    run(manager, other)
    assert manager.match([*prompt[:29], 78, 79, 80]).num_tokens == 24


@pytest.mark.parametrize("policy", ["aligned", "finish_only"])
def test_decodes_store_no_states(policy: CheckpointPolicy) -> None:
    manager = make_manager(1, policy)
    run(manager, list(range(18)), generated=20)
    assert manager.match(list(range(18))).num_tokens == (16 if policy == "aligned" else 0)


@pytest.mark.parametrize("linear", [0, 1])
def test_a_preempted_request_leaves_whole_chunks(linear: int) -> None:
    manager, prompt = make_manager(linear), list(range(18))
    lease = manager.lease(manager.match(prompt))
    assert lease is not None
    manager.allocate(lease, 21)
    manager.allocate_checkpoints(lease, 0, 18)
    manager.commit(lease, 18)
    manager.commit(lease, 21)
    manager.preempt(lease, [*prompt, 99, 99, 99])
    manager.check()
    assert manager.match([*prompt, 99, 99, 99, 99]).num_kv_tokens == 16
