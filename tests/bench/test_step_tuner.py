"""The tuner of tables in whole steps: the search, the choices forced on products, and the tables written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import step_tuner
from benchmarks.step_tuner import Choices, candidates, descend, install, read_choices
from weft.ops.linear import fp8 as fp8_linear
from weft.ops.linear import skinny as skinny_linear
from weft.ops.linear import skinny_choice
from weft.ops.linear.fp8_few_rows import FewRows, HopperRows
from weft.ops.linear.skinny_choice import Config
from weft.ops.moe import fp8_experts as fp8_moe
from weft.ops.moe.blocks import Tile, Tiles

A_QKV = ("linear", 4096, 1024, False, False)
FP8_EXPERTS = ("fp8 experts", 513, 2048, 512, 128)


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
    [A_QKV, ("fp8 linear", 512, 256, False, 128), ("experts", 512, 512), FP8_EXPERTS],
)
def test_every_kind_of_product_has_candidates(key: tuple[Any, ...]) -> None:
    assert candidates(key, 8)


def test_choices_are_read_as_they_were_stored() -> None:
    tiles = Tiles(Tile(16, 32, 128, 4, 4), Tile(16, 64, 128, 4, 4))
    of_fp8 = [FewRows(False, 16, 4, 3, 2), HopperRows(32, 8, None), fp8_linear.ManyRows(64, 128, 4, 4)]
    chosen = {A_QKV: Config("held", 32, 128, 4), ("linear", 6144, 1024, False, True): None, FP8_EXPERTS: tiles}
    chosen |= {("fp8 linear", i, 2048, False, 128): kind for i, kind in enumerate([*of_fp8, fp8_linear.Library()])}
    stored = json.loads(json.dumps({"changed": list(chosen.items())}))
    read = read_choices(stored)
    assert read == chosen and [type(choice) for choice in read.values()] == [type(c) for c in chosen.values()]


def test_choices_are_written_into_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (skinny_choice, fp8_linear, fp8_moe):
        shutil.copy(module.TABLE_PATH, tmp_path)
        monkeypatch.setattr(module, "TABLE_PATH", tmp_path / module.TABLE_PATH.name)
        monkeypatch.setattr(module, "load_table", module.load_table.__wrapped__)  # nothing is remembered
    before = fp8_linear.load_table()[12288, 2048, False, 128]
    held, tiles = Config("held", 32, 128, 4), Tiles(Tile(16, 16, 128, 2, 2), Tile(16, 64, 128, 2, 2))
    leaves_sums, of_fp8 = ("linear", 6144, 1024, False, True), ("fp8 linear", 12288, 2048, False, 128)
    install({A_QKV: held, leaves_sums: None, of_fp8: HopperRows(32, 8, 96), FP8_EXPERTS: tiles}, 7)
    install({("experts", 512, 512): tiles, ("fp8 experts", 256, 2048, 768, 128): tiles}, 7)  # neither has a place
    assert (256, 2048, 768, 128) not in fp8_moe.load_table()
    plain, with_sums = skinny_choice.load_table(False), skinny_choice.load_table(True)
    assert plain[4096, 1024, False, 8] == with_sums[4096, 1024, False, 8] == held
    assert with_sums[6144, 1024, False, 8] is None and plain[6144, 1024, False, 8] is not None
    assert fp8_linear.load_table()[12288, 2048, False, 128] == before | {8: HopperRows(32, 8, 96)}
    assert fp8_moe.load_table()[513, 2048, 512, 128][8] == tiles
    for module in (skinny_choice, fp8_linear, fp8_moe):
        rows = json.loads(module.TABLE_PATH.read_text())["rows"]
        said = {"config", "kind", "up", "down", "library_us", "kernel_us"}
        places = [tuple((k, v) for k, v in sorted(row.items()) if k not in said) for row in rows]
        assert len(set(places)) == len(places), "two rows for one place"
