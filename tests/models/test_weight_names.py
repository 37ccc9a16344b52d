"""Names of tensors in checkpoints: every architecture has a table, and packed names may name their parent."""

from __future__ import annotations

from weft.config.families import FAMILIES
from weft.layers.weight import WeightTable
from weft.models.weight_names import WEIGHT_TABLES


def test_every_architecture_has_a_table() -> None:
    assert set(WEIGHT_TABLES) == set(FAMILIES)


def test_a_packed_name_under_its_parent_goes_first() -> None:
    table = WeightTable({"in_proj": ("qkv", "ba"), "average.in_proj": ("value_proj", "gate_proj")})
    names = [
        table.checkpoint_name(f"model.layers.0.{parent}.in_proj", "1.weight") for parent in ("linear_attn", "average")
    ]
    assert names == ["model.layers.0.linear_attn.ba.weight", "model.layers.0.average.gate_proj.weight"]
    assert table.checkpoint_name("in_proj", "0.weight") == ".qkv.weight"
