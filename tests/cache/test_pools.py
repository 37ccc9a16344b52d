"""Pools hand out what they have, once, and notice misuse."""

from __future__ import annotations

import random

import pytest

from weft.cache.pools import PagePool, StatePool


def test_pages_are_handed_out_once_and_never_page_zero() -> None:
    pool = PagePool(8)
    pages = pool.allocate(7)
    assert pages is not None and sorted(pages) == list(range(1, 8))
    assert pool.allocate(1) is None
    pool.check()


def test_too_many_takes_nothing() -> None:
    pool = PagePool(8)
    assert pool.allocate(8) is None and pool.num_free == 7


def test_page_is_free_after_its_last_user() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2)
    assert pages is not None and pool.num_evictable == 0
    pool.unpin(pages)
    assert pool.num_evictable == 2
    pool.retain(pages[:1])
    pool.release(pages)
    assert pool.num_free == 2 and pool.references(pages[0]) == 1
    pool.release(pages[:1])
    assert pool.num_free == 3
    pool.check()


def test_misuse_is_noticed() -> None:
    pool = PagePool(4)
    with pytest.raises(AssertionError):
        pool.release([1])
    with pytest.raises(AssertionError):
        pool.retain([0])
    slots = StatePool(3)
    with pytest.raises(AssertionError):
        slots.release(2)
    with pytest.raises(AssertionError):
        slots.release(0)


def test_random_use_keeps_the_books() -> None:
    rng = random.Random(0)
    pool, slots = PagePool(30), StatePool(6)
    held: list[int] = []
    taken: list[int] = []
    for _ in range(2000):
        if rng.random() < 0.5:
            held += pool.allocate(rng.randint(0, 4)) or []
            slot = slots.allocate()
            taken += [] if slot is None else [slot]
        else:
            rng.shuffle(held)
            ended = [held.pop() for _ in range(min(len(held), rng.randint(0, 4)))]
            pool.unpin(ended)
            pool.release(ended)
            if taken:
                slots.release(taken.pop(rng.randrange(len(taken))))
        assert len(held) + pool.num_free == pool.capacity
        assert len(taken) + slots.num_free == slots.capacity
        pool.check()
        slots.check()


def test_pool_without_slots() -> None:
    slots = StatePool(1)
    assert slots.allocate() is None and slots.capacity == 0
    slots.check()
