"""The suite of published shapes: sizes follow from a model's config, and a measurement gives complete rows."""

from __future__ import annotations

import pytest

from benchmarks import shapes
from benchmarks.shapes import MODELS, Product, Timed, floor_us, products, suite, worst


def test_products_follow_from_the_config() -> None:
    found = dict(products(MODELS["qwen3.5-27b"], 1))
    assert found["qkv"] == Product(2 * 24 * 256 + 2 * 4 * 256, 5120) and found["o"] == Product(5120, 24 * 256)
    assert found["gate_up"] == Product(2 * 17408, 5120, True) and found["down"] == Product(5120, 17408)
    assert found["linear in"] == Product(2 * 16 * 128 + 2 * 48 * 128, 5120)
    assert found["linear out"] == Product(5120, 48 * 128)


def test_ranks_share_products_and_keep_one_kv_head() -> None:
    found = dict(products(MODELS["qwen3-next-80b-a3b"], 4))
    assert found["qkv"].out == 2 * 4 * 256 + 2 * 1 * 256
    assert "qkv" not in dict(products(MODELS["qwen3-14b"], 16)), "40 heads do not divide"


def test_every_model_has_products_at_one_rank() -> None:
    everything = suite([], [1])
    assert all(any(user.startswith(f"{name} ") for users in everything.values() for user in users) for name in MODELS)


def test_floor_counts_the_weight_once() -> None:
    few, fp8 = floor_us(Product(4096, 4096), 1, False), floor_us(Product(4096, 4096), 1, True)
    assert few == pytest.approx((2 * 4096 * 4096 + 4 * 4096) / 4.25e6) and fp8 < 0.51 * few
    assert floor_us(Product(4096, 4096), 8192, False) == pytest.approx(2 * 8192 * 4096**2 / 785e6)


@pytest.mark.parametrize("form", shapes.FORMATS)
def test_a_measurement_gives_a_row_for_every_number_of_rows(form: str) -> None:
    found = list(Timed(Product(128, 128, True), form, 2).measure([1, 5]))
    assert [row["rows"] for row in found] == [1, 5] and all(row["format"] == form for row in found)


def test_worst_lists_large_products_with_the_smallest_share_first() -> None:
    rows = [
        {"out": 4096, "inner": size, "format": "bf16", "us": us, "floor_us": 5.0}
        for size, us in ((4096, 10.0), (4096, 20.0), (64, 900.0))
    ]
    assert [row["us"] for row in worst(rows, 5)] == [20.0, 10.0]
