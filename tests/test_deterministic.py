"""``deterministic``: a request's tokens and log probabilities are the same bits in any company.

The reference is not transformers but the request alone: no other request, no cache, no graph, one step per prompt. The
engines, their poisoned memory and the paths are those of the x-matrix.

``make test`` runs lengths 65 and 210 of a hybrid model, in modes NONE and FULL; ``make test-all`` leaves out nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from tests.deterministic import PATHS, Alone, InCompany, check, open_company
from tests.x_matrix import DENSE, HYBRID, MODES, OVERLAP, PHASES, WHOLE, make_reference, part

KINDS = [HYBRID, DENSE, "BambaForCausalLM", "JambaForCausalLM", "MiniMaxForCausalLM", "Lfm2MoeForCausalLM"]
COLUMNS = list(product(KINDS, MODES, OVERLAP)) if WHOLE else [(HYBRID, "NONE", "overlap"), (HYBRID, "FULL", "in turn")]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Alone]]:
    names = {column[0] for column in COLUMNS}
    found = {name: Alone(make_reference(name, tmp_path_factory.mktemp("tiny")).folder) for name in names}
    yield found
    for alone in found.values():
        alone.shutdown()


@pytest.fixture(scope="module", params=COLUMNS, ids="-".join)
def engine(request: pytest.FixtureRequest, references: dict[str, Alone]) -> Iterator[InCompany]:
    with open_company(*request.param, references) as engine:
        yield engine


@pytest.mark.parametrize("length", part(65, 210))
@pytest.mark.parametrize("phase", PHASES if WHOLE else ["decode"])
@pytest.mark.parametrize("path", PATHS)
def test_bits_do_not_depend_on_the_company(engine: InCompany, path: str, phase: str, length: int) -> None:
    check(engine, path, phase, length)
