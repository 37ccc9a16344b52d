from itertools import product

import pytest

from tests import whole


@pytest.mark.parametrize("of", [1, 2])
def test_the_part_of_a_matrix_holds_all_values_and_pairs(of: int, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = (["cold", "hit", "branch hit", "preempted"], [False, True], [1, 65, 1000], [(2, "a"), (3, "b")])
    monkeypatch.setattr(whole, "RUNS_LONG", True)
    every = whole.covering(*axes, of=of)
    monkeypatch.setattr(whole, "RUNS_LONG", False)
    cells = whole.covering(*axes, of=of)
    assert every == list(product(*axes)) and [cell for cell in every if cell in cells] == cells
    for one, two in product(range(len(axes)), repeat=2):
        met = {(cell[one], cell[two]) for cell in cells}
        assert len(met) == (len(axes[one]) if one == two else len(axes[one]) * len(axes[two])) or of == 1
        assert {a for a, _ in met} == set(axes[one])
    assert len(cells) <= (4 if of == 1 else 16)
