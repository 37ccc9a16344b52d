"""Host arithmetic of launches: the same numbers as Triton's own functions. Which GPU a table or a rule is for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from weft.ops.triton import tile_table
from weft.ops.triton.sizes import cdiv, is_hopper, next_power_of_2

triton = pytest.importorskip("triton")


@pytest.mark.parametrize("size", [1, 2, 3, 63, 64, 65, 130, 210, 2**20 - 1, 2**20, 2**31 + 1])
def test_as_triton(size: int) -> None:
    assert next_power_of_2(size) == triton.next_power_of_2(size)
    assert [cdiv(size, d) for d in (1, 7, 64, size)] == [triton.cdiv(size, d) for d in (1, 7, 64, size)]


@pytest.mark.parametrize(
    ("multiprocessors", "capability", "takes"),
    [
        (132, (9, 0), "tables"),
        (114, (9, 0), "rules for Hopper"),
        (78, (9, 0), "rules for Hopper"),
        (132, (10, 0), "rules"),
        (142, (8, 9), "rules"),
    ],
    ids=["H200, H100 SXM", "H100 PCIe", "H20", "another one", "L40S"],
)
def test_tables_are_for_gpus_like_the_one_on_which_they_were_measured(
    multiprocessors: int, capability: tuple[int, int], takes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(multi_processor_count=multiprocessors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(tile_table, "is_hopper", is_hopper.__wrapped__)
    found = [of.__wrapped__(torch.device("cuda", 0)) for of in (tile_table.has_table, is_hopper)]
    assert found == {"tables": [True, True], "rules for Hopper": [False, True], "rules": [False, False]}[takes]
    assert not tile_table.has_table(torch.device("cpu")) and not is_hopper(torch.device("cpu"))
