"""The tuner of tables in whole steps: its search, what it forces products to run, and what it writes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import step_tuner
from benchmarks.step_tuner import Choices, candidates, descend, install
from weft.ops.triton import skinny_linear
from weft.ops.triton.skinny_linear import Config

A_QKV = ("linear", 4096, 1024, False, False)


def test_products_are_improved_together() -> None:
    """The best choice of ``b`` depends on that of ``a``, and is found in the second pass."""

    def time_of(choices: Mapping[Any, Any]) -> float:
        return 1 + 0.02 * abs(choices["a"] - 3) + 0.005 * abs(choices["b"] - choices["a"])

    def timed(reference: Mapping[Any, Any], variants: list[Mapping[Any, Any]], carefully: bool) -> list[float]:
        return [time_of(variant) / time_of(reference) for variant in variants]

    all_of = list(range(6))
    best, log = descend({"a": 0, "b": 0}, {"a": all_of, "b": all_of}, timed)  # type: ignore[dict-item]
    assert best == {"a": 3, "b": 3}
    assert [row["pass"] for row in log] == [0, 0, 1, 1]


def test_small_gains_and_what_does_not_run_change_nothing() -> None:
    times = {0: 1.0, 1: 0.998, 2: float("inf")}
    best, _ = descend({"a": 0}, {"a": [1, 2]}, lambda r, vs, c: [times[v["a"]] for v in vs])  # type: ignore[dict-item]
    assert best == {"a": 0}


def test_a_product_runs_what_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = Choices()
    for module, name, key_of in step_tuner.CHOOSERS:
        monkeypatch.setattr(module, name, choices.wrap(getattr(module, name), key_of))
    x, weight = torch.zeros(3, 1024, dtype=torch.bfloat16), torch.zeros(4096, 1024, dtype=torch.bfloat16)
    chosen = skinny_linear.choose_config(x, weight, silu_mul=False)
    assert choices.in_use == {A_QKV: chosen}
    other = Config("sum", 2, 1024, 2)
    with choices.forcing({A_QKV: other}):
        assert skinny_linear.choose_config(x, weight, silu_mul=False) == other
    assert skinny_linear.choose_config(x, weight, silu_mul=False) == chosen and choices.in_use == {A_QKV: chosen}


@pytest.mark.parametrize(
    "key",
    [A_QKV, ("fp8 linear", 512, 256, False, 128), ("experts", 512, 512), ("fp8 experts", 513, 2048, 512, 128)],
)
def test_every_kind_of_product_has_candidates(key: tuple[Any, ...]) -> None:
    assert candidates(key, 8)


def test_choices_are_written_into_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.json"
    shutil.copy(skinny_linear.TABLE_PATH, path)
    monkeypatch.setattr(skinny_linear, "TABLE_PATH", path)
    count = len(json.loads(path.read_text())["rows"])
    before, after = Config("sum", 2, 1024, 2), Config("held", 32, 128, 4)
    leaves_sums, unchanged = ("linear", 6144, 1024, False, True), ("linear", 1024, 2048, False, False)
    in_use = dict.fromkeys([A_QKV, leaves_sums, unchanged], before)
    install(in_use | {A_QKV: after, leaves_sums: None}, in_use, 7)
    skinny_linear.load_table.cache_clear()
    try:
        plain, with_sums = skinny_linear.load_table(False), skinny_linear.load_table(True)
        assert plain[4096, 1024, False, 8] == with_sums[4096, 1024, False, 8] == after
        assert with_sums[6144, 1024, False, 8] is None and plain[6144, 1024, False, 8] is not None
        assert plain[1024, 2048, False, 8] != before
        assert len(json.loads(path.read_text())["rows"]) == count + 1
    finally:
        skinny_linear.load_table.cache_clear()
