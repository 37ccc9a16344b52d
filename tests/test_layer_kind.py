"""A new kind of layer keeps every promise of the engine, although one file alone knows it.

Add a kind to ``KINDS`` to test it in the same way: tokens against the reference in every graph mode, its memory, and
the states that it stores. ``moving_average.py`` is the example.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests import x_matrix as matrix
from tests.harness import Harness
from tests.layer_kind import LayerKind
from tests.moving_average import AVERAGED
from tests.whole import covering, unless_long

KINDS = [AVERAGED]
CASES = covering([1, 65, matrix.BUDGET + 18], matrix.PHASES, matrix.PATHS, of=1)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.architecture)
def kind(request: pytest.FixtureRequest) -> Iterator[LayerKind]:
    with request.param.registered():
        yield request.param


@pytest.fixture(scope="module")
def references(kind: LayerKind, tmp_path_factory: pytest.TempPathFactory) -> dict[str, matrix.Reference]:
    return {kind.architecture: kind.make_reference(tmp_path_factory.mktemp("kind"))}


COLUMNS = [(mode, "overlap", "capture") for mode in unless_long(["FULL"], matrix.MODES)]
COLUMNS += unless_long([], [("PIECEWISE", "overlap", "eager")])


@pytest.fixture(scope="module", params=COLUMNS, ids=lambda p: "-".join(p))
def engine(
    request: pytest.FixtureRequest, kind: LayerKind, references: dict[str, matrix.Reference]
) -> Iterator[matrix.Poisoned]:
    with matrix.open_engine(kind.architecture, *request.param, references) as engine:
        yield engine


@pytest.mark.parametrize(("length", "phase", "path"), CASES)
def test_tokens_are_those_of_the_reference(engine: matrix.Poisoned, path: str, phase: str, length: int) -> None:
    matrix.check(engine, path, phase, length)


def test_memory_plan_knows_the_kind(kind: LayerKind, references: dict[str, matrix.Reference]) -> None:
    spec = Harness(references[kind.architecture].folder).spec
    assert list(spec.layers) == list(kind.layers)
    assert spec.alignment == 64
    new = [layer for name, layer in spec.layers.items() if name.endswith(f".{kind.module}")]
    others = [layer for layer in spec.layers.values() if layer not in new]
    assert new and {(layer.slot_bytes, layer.token_bytes) for layer in new} == {(kind.slot_bytes, kind.token_bytes)}
    assert spec.slot_bytes == len(new) * kind.slot_bytes + sum(layer.slot_bytes for layer in others)
    assert spec.kv_bytes_per_token == len(new) * kind.token_bytes + sum(layer.token_bytes for layer in others)


@pytest.mark.parametrize("position", [1, 24, 63, 64, 65, 71, 100])
def test_a_stored_state_is_that_of_a_run_that_stops_there(
    kind: LayerKind, references: dict[str, matrix.Reference], position: int
) -> None:
    """In every layer."""
    harness, tokens = Harness(references[kind.architecture].folder), matrix.prompt_of(120)
    whole, stopped = harness.sequence(tokens), harness.sequence(tokens[:position])
    target = harness.free_slot()
    whole.checkpoints = {position: target}
    harness.run([(whole, len(tokens))])
    harness.run([(stopped, position)])
    for name, layer in harness.spec.layers.items():
        for state in layer.states:
            stored, expected = (harness.caches[name][state.name][slot] for slot in (target, stopped.slot))
            torch.testing.assert_close(stored, expected, rtol=1e-5, atol=1e-5)


def test_tokens_after_a_restore(kind: LayerKind, references: dict[str, matrix.Reference]) -> None:
    """States of the kind leave the device for host memory and come back."""
    settings = {"kv_offloading_size": 0.05}
    with matrix.open_engine(kind.architecture, "NONE", "overlap", "capture", references, **settings) as engine:  # type: ignore[arg-type]
        matrix.check(engine, "restored", "mixed", 65)
        assert engine.llm.stats().num_external_hit_tokens
