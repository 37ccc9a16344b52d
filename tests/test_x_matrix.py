"""Everything together: whatever path a request takes, its greedy tokens are transformers'.

The rows are what the cache does for a request, the columns how its steps run: graph mode, overlap, alone, mixed with
others' decodes, decoding in a padded batch. Lengths are awkward on purpose. What nobody owns is poison: before every
step all free pages and slots, and those that padding rows use, are filled with NaN, and free ones are handed out in
random order. With overlap the device is late: a step runs when its results are asked for.

``make test`` leaves out length 129, compiled pieces, the dense model without overlap, and for dense, sharded and
drafting engines all lengths but those that ``part`` names. Of the rest mode FULL with overlap runs cells that hold
each pair of path, phase and length; all other columns hold every path, phase and length once. ``make test-all``
leaves out nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest

from tests.ranks import fork_ranks
from tests.shared import kept_open
from tests.whole import covering, takes_long, unless_long
from tests.x_matrix import (
    ARCHITECTURES,
    DENSE,
    HYBRID,
    MODES,
    OVERLAP,
    PATHS,
    PHASES,
    WHOLE,
    WITH_CHAIN,
    WITH_HEAD,
    Poisoned,
    Reference,
    check,
    check_drafts,
    drafts_of,
    install_drafter,
    make_reference,
    open_engine,
    part,
    runner_of,
)

SHORT = HYBRID if WHOLE else "two layers"
LAYERS = ["linear_attention", "full_attention"]
"""Layers of the model with compiled pieces. Compilation takes seconds for each piece."""


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    names = dict.fromkeys([*ARCHITECTURES, *(arch for arch, *_ in DRAFTING)])
    found = {name: make_reference(name, tmp_path_factory.mktemp("tiny")) for name in names}
    if not WHOLE:
        found[SHORT] = make_reference(HYBRID, tmp_path_factory.mktemp("tiny"), layer_types=LAYERS, num_hidden_layers=2)
    return found


COLUMNS = [(HYBRID, *column, "capture") for column in product(MODES, OVERLAP)]
COLUMNS += unless_long([], [(HYBRID, "PIECEWISE", "overlap", "eager")])
"""Model, mode, overlap, and where pieces come from. ``tests/pieces`` has eager pieces in CI."""

DENSE_COLUMNS = [(DENSE, *column) for _, *column in COLUMNS if WHOLE or column[1] == "overlap"]


OVERLAPPING = [column for column in COLUMNS if WHOLE or column[2] == "overlap"]


@pytest.fixture(scope="module")
def engine_of(references: dict[str, Reference]) -> Iterator[Callable[[tuple[str, str, str, str]], Poisoned]]:
    with kept_open(lambda column: open_engine(*column, references)) as engine_of:
        yield engine_of


@pytest.fixture
def engine(request: pytest.FixtureRequest, engine_of: Callable[[tuple[str, str, str, str]], Poisoned]) -> Poisoned:
    """One engine per column, for all its cases."""
    return engine_of(request.param)


@pytest.fixture(scope="module", params=[c for c in COLUMNS if c not in OVERLAPPING][::2], ids=lambda p: "-".join(p))
def engine_in_turn(request: pytest.FixtureRequest, references: dict[str, Reference]) -> Iterator[Poisoned]:
    with open_engine(*request.param, references) as engine:
        yield engine


@pytest.fixture(scope="module", params=DENSE_COLUMNS, ids=lambda p: "-".join(p))
def dense_engine(request: pytest.FixtureRequest, references: dict[str, Reference]) -> Iterator[Poisoned]:
    with open_engine(*request.param, references) as engine:
        yield engine


@pytest.fixture(scope="module")
def compiled_engine(references: dict[str, Reference]) -> Iterator[Poisoned]:
    with open_engine(SHORT, "PIECEWISE", "overlap", "inductor", references) as engine:
        yield engine


WINDOWS = "GptOssForCausalLM", WITH_CHAIN
"""Families whose layers verify nothing: their drafts run as prefills."""
VERIFYING = [
    "KimiLinearForCausalLM",
    "Lfm2ForCausalLM",
    "BailingHybridForCausalLM",
    "Glm5NextForConditionalGeneration",
    "Qwen4ExpForCausalLM",
]
DRAFTING = [
    ("Qwen3NextForCausalLM", "FULL", "overlap", "capture"),
    *unless_long([], [("Qwen3NextForCausalLM", "NONE", "in turn", "capture")]),
    ("Qwen3ForCausalLM", "FULL_DECODE_ONLY", "overlap", "capture"),
    (WITH_HEAD, "FULL", "overlap", "capture"),
    *unless_long([], [(WINDOWS[0], "FULL_AND_PIECEWISE", "in turn", "capture")]),
    *unless_long([], [(WITH_HEAD, "NONE", "overlap", "capture")]),
    *unless_long([], [(WITH_HEAD, "FULL_AND_PIECEWISE", "in turn", "capture")]),
    *unless_long([], [(WITH_CHAIN, "FULL", "overlap", "capture")]),
]
"""``tests/speculation`` has drafts of windows and of chained heads in CI."""
if WHOLE:
    DRAFTING += [("Lfm2ForCausalLM", "FULL_AND_PIECEWISE", "in turn", "capture")]
    DRAFTING += [(arch, mode, "overlap", "capture") for arch, mode in product(VERIFYING, ["NONE", "FULL"])]


@pytest.fixture(scope="module", params=DRAFTING, ids=lambda p: "-".join(p))
def drafting_engine(request: pytest.FixtureRequest, references: dict[str, Reference]) -> Iterator[Poisoned]:
    """With speculative decoding: by the model's own head, or the reference's tokens, with a mistake now and then."""
    with open_engine(*request.param, references, speculative_config=drafts_of(request.param[0])) as engine:
        install_drafter(engine, request.param[0])
        yield engine
        assert engine.llm.stats().spec_decode_num_accepted_tokens > engine.num_cases, "too few drafts were accepted"
        graphs = runner_of(engine.llm).graphs.verification
        assert (graphs is not None) == (request.param[0] not in WINDOWS and "FULL" in request.param[1])
        if graphs is not None:
            assert graphs.counters.replays and graphs.counters.padding_rows


SHARDED = [(HYBRID, mode, False) for mode in ("NONE", "PIECEWISE", "FULL")]
SHARDED_DRAFTING = [(arch, mode, True) for arch, mode in product(VERIFYING, ["NONE", "FULL"])]
"""Model, mode, and whether there are drafts, on two ranks."""


@contextmanager
def open_sharded(arch: str, mode: str, drafts: bool, references: dict[str, Reference]) -> Iterator[Poisoned]:
    """On two ranks. The second rank's padding page and slot are NaN whenever a step starts."""
    more: dict[str, Any] = {"speculative_config": drafts_of(arch)} if drafts else {}
    with (
        fork_ranks(poisoned=True),
        open_engine(arch, mode, "overlap", "capture", references, tensor_parallel_size=2, **more) as engine,
    ):
        if drafts:
            install_drafter(engine, arch)
        yield engine
        if drafts:
            assert engine.llm.config.verifies
            assert engine.llm.stats().spec_decode_num_accepted_tokens > engine.num_cases


@pytest.fixture(scope="module")
def sharded_engine_of(references: dict[str, Reference]) -> Iterator[Callable[[tuple[str, str, bool]], Poisoned]]:
    """One at a time: this process is the first rank of each."""
    with kept_open(lambda column: open_sharded(*column, references)) as engine_of:
        yield engine_of


@pytest.fixture
def sharded_engine(
    request: pytest.FixtureRequest, sharded_engine_of: Callable[[tuple[str, str, bool]], Poisoned]
) -> Poisoned:
    return sharded_engine_of(request.param)


@pytest.mark.parametrize(
    ("engine", "path", "phase", "length"),
    [
        (column, *cell)
        for column in OVERLAPPING
        for cell in covering(PATHS, PHASES, part(1, 64, 65, 1000), of=2 if column[1] == "FULL" else 1)
    ],
    ids=lambda p: "-".join(p) if isinstance(p, tuple) else None,
    indirect=["engine"],
)
def test_tokens_are_those_of_transformers(engine: Poisoned, path: str, phase: str, length: int) -> None:
    check(engine, path, phase, length)


@pytest.mark.skipif(WHOLE, reason="the whole matrix has these cells")
@pytest.mark.parametrize(("path", "phase", "length"), covering(PATHS, PHASES, part(1, 64, 65, 1000), of=1))
def test_tokens_without_overlap(engine_in_turn: Poisoned, path: str, phase: str, length: int) -> None:
    check(engine_in_turn, path, phase, length)


@pytest.mark.parametrize(("path", "phase", "length"), covering(PATHS, PHASES, part(1, 65, 1000), of=1))
def test_tokens_without_recurrent_layers(dense_engine: Poisoned, path: str, phase: str, length: int) -> None:
    check(dense_engine, path, phase, length)


@takes_long
@pytest.mark.parametrize(("path", "phase", "length"), covering(PATHS, PHASES, part(1, 65, 1000), of=1))
def test_tokens_of_compiled_pieces(compiled_engine: Poisoned, path: str, phase: str, length: int) -> None:
    check(compiled_engine, path, phase, length)


@takes_long
@pytest.mark.parametrize(("path", "phase", "length"), covering(PATHS, PHASES, part(1, 65), of=1))
@pytest.mark.parametrize("sharded_engine", SHARDED, ids=lambda p: p[1], indirect=True)
def test_tokens_of_two_ranks(sharded_engine: Poisoned, path: str, phase: str, length: int) -> None:
    check(sharded_engine, path, phase, length)


@pytest.mark.parametrize(("path", "length"), covering(["cold", "hit", "branch hit"], part(1, 65, 210), of=1))
def test_tokens_with_drafts(drafting_engine: Poisoned, path: str, length: int) -> None:
    check_drafts(drafting_engine, path, length)


@pytest.mark.skipif(not WHOLE, reason="a part of the whole matrix")
@pytest.mark.parametrize(("path", "length"), covering(["cold", "hit", "branch hit"], part(1, 65)))
@pytest.mark.parametrize("sharded_engine", SHARDED_DRAFTING, ids=lambda p: "-".join(p[:2]), indirect=True)
def test_tokens_with_drafts_of_two_ranks(sharded_engine: Poisoned, path: str, length: int) -> None:
    check_drafts(sharded_engine, path, length)


@pytest.mark.skipif(not WHOLE, reason="a part of the whole matrix")
@pytest.mark.parametrize("length", part(1, 65, 210))
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("path", ["cold", "hit", "branch hit"])
def test_tokens_with_drafts_in_every_phase(drafting_engine: Poisoned, path: str, phase: str, length: int) -> None:
    """Preemption with drafts is the fuzzer's (``make fuzz-speculation``): its times depend on what is accepted."""
    check(drafting_engine, path, phase, length)
