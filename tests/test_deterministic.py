"""``deterministic``: a request's tokens and log probabilities are the same bits in any company.

The reference is not transformers but the request alone: no other request, no cache, no graph, one step per prompt. The
engines, their poisoned memory and the paths are those of the x-matrix.

``make test`` runs lengths 65 and 130 of a hybrid model in mode FULL, and a case of four other kinds. ``make test-all``
leaves out nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest

from benchmarks.scoring import logprobs_of, scored_by_force
from tests.deterministic import (
    FP8,
    GUESSES,
    HEAD,
    PATHS,
    PREEMPTING,
    REPEATS,
    Alone,
    InCompany,
    check,
    make_folder,
    open_company,
    open_drafting,
)
from tests.deterministic_images import AloneWithImages, check_images
from tests.media import HYBRID as IMAGES_AND_STATES
from tests.media import INKLING as INKLING_VL
from tests.media import VL
from tests.ranks import fork_ranks
from tests.test_x_matrix_images import make_reference as make_images
from tests.whole import RUNS_LONG, covering, takes_long, unless_long
from tests.x_matrix import (
    COMPANIONS,
    DENSE,
    HYBRID,
    MODES,
    OVERLAP,
    PHASES,
    WHOLE,
    WITH_HEAD,
    part,
    prompt_of,
)
from weft import LLM, SamplingParams

KINDS = [HYBRID, DENSE, "BambaForCausalLM", "JambaForCausalLM", "MiniMaxForCausalLM", "Lfm2MoeForCausalLM"]
IN_FP8 = [HYBRID + FP8 + "block", HYBRID + FP8 + "channel-token", DENSE + FP8 + "tensor-static"]
INKLING, ZAYA = "InklingForCausalLM", "ZayaForCausalLM"
MORE_KINDS = ["GptOssForCausalLM", "KimiLinearForCausalLM", "RecurrentGemmaForCausalLM", IN_FP8[2], INKLING, ZAYA]
"""Kinds that run as well, four of them in ``make test``."""
EVERY = product([*KINDS, *MORE_KINDS, "BailingHybridForCausalLM", *IN_FP8[:2]], MODES, OVERLAP)
COLUMNS = list(EVERY) if WHOLE else [(HYBRID, "FULL", "in turn")]
DRAFTS = [(HYBRID, GUESSES), (DENSE, GUESSES), (WITH_HEAD, HEAD), (WITH_HEAD, REPEATS)]
DRAFTS += [(name, GUESSES) for name in ("KimiLinearForCausalLM", "Lfm2MoeForCausalLM")]
ONE_BY_ONE = [(name, GUESSES) for name in ("BambaForCausalLM", "GptOssForCausalLM", INKLING, ZAYA)]
"""Kinds with layers that verify drafts by decoding, draft after draft."""
ONE_MODE = [("BambaForCausalLM", "PIECEWISE"), ("GptOssForCausalLM", "NONE"), (INKLING, "FULL"), (ZAYA, "NONE")]
DRAFTING = [(DRAFTS[2], "NONE", "overlap")]
if WHOLE:
    DRAFTING = list(product([*DRAFTS, *ONE_BY_ONE], [*MODES, "PIECEWISE"], OVERLAP))
CASES = covering(PATHS, PHASES if WHOLE else ["decode"], part(65, 130), of=1)


class References(dict[str, Alone]):
    """Engines that run each request alone, started when they are asked for."""

    def __init__(self, make_path: Callable[[str], Path]) -> None:
        self._make_path = make_path

    def __missing__(self, name: str) -> Alone:
        folder = make_folder(name, self._make_path("tiny"))
        self[name] = alone = Alone(folder, temperature=0.8 * (name != WITH_HEAD))
        return alone


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Alone]]:
    found = References(tmp_path_factory.mktemp)
    yield found
    for alone in found.values():
        alone.shutdown()


@pytest.fixture(scope="module", params=COLUMNS, ids="-".join)
def engine(request: pytest.FixtureRequest, references: dict[str, Alone]) -> Iterator[InCompany]:
    name, mode, overlap = request.param
    with open_company(name, mode, overlap, references) as engine:
        yield engine


@pytest.mark.parametrize(("path", "phase", "length"), unless_long([CASES[1], *CASES[3:]], CASES))
def test_bits_do_not_depend_on_the_company(engine: InCompany, path: str, phase: str, length: int) -> None:
    check(engine, path, phase, length)


@pytest.fixture(scope="module", params=DRAFTING, ids=lambda column: f"{'-'.join(column[0])}-{column[1]}-{column[2]}")
def drafting(request: pytest.FixtureRequest, references: dict[str, Alone]) -> Iterator[InCompany]:
    (name, by), mode, overlap = request.param
    with open_drafting(name, mode, overlap, references, by=by) as engine:
        yield engine


@takes_long  # tests/speculation/test_chained_heads.py: drafts of an engine that is deterministic
@pytest.mark.parametrize(("path", "phase", "length"), CASES)
def test_bits_do_not_depend_on_drafts(drafting: InCompany, path: str, phase: str, length: int) -> None:
    check(drafting, path, phase, length)


@pytest.mark.parametrize(("name", "mode"), unless_long(ONE_MODE[1:2], ONE_MODE))
def test_drafts_that_are_decoded_one_by_one(name: str, mode: str, references: dict[str, Alone]) -> None:
    with open_drafting(name, mode, "overlap", references, by=GUESSES) as engine:
        if RUNS_LONG:
            check(engine, "hit", "mixed", 65)
        check(engine, "preempted", "decode", 65)


@pytest.mark.parametrize("name", unless_long([*MORE_KINDS[:2], MORE_KINDS[3], ZAYA], MORE_KINDS))
def test_other_layers_and_weights(name: str, references: dict[str, Alone]) -> None:
    with open_company(name, "NONE", "overlap", references) as engine:
        if RUNS_LONG or name in MORE_KINDS[:2]:
            check(engine, "branch hit", "decode", 129)
        check(engine, "preempted", "mixed", 65)


@pytest.mark.parametrize("name", [HYBRID, pytest.param(DENSE, marks=takes_long)])
def test_a_prefix_that_comes_back_has_the_same_bits(name: str, references: dict[str, Alone]) -> None:
    with open_company(name, "NONE", "overlap", references, kv_offloading_size=0.05) as engine:
        for phase, length in unless_long([("mixed", 210)], [("prefill", 65), ("mixed", 210), ("decode", 129)]):
            check(engine, "restored", phase, length)
        assert engine.llm.stats().num_external_hit_tokens


@takes_long
def test_two_ranks(tmp_path: Path) -> None:
    """A process can have one such engine at a time, so the requests run alone first."""
    with fork_ranks(poisoned=True):
        alone = Alone(make_folder(HYBRID, tmp_path), tensor_parallel_size=2)
        for prompt in (prompt_of(129), prompt_of(65), *COMPANIONS, PREEMPTING):
            if RUNS_LONG or len(prompt) != 129:
                alone(prompt)
        alone.shutdown()
        with open_company(HYBRID, "NONE", "overlap", {HYBRID: alone}, tensor_parallel_size=2) as engine:
            if RUNS_LONG:
                check(engine, "branch hit", "decode", 129)
            check(engine, "preempted", "mixed", 65)


def test_fixed_tokens_have_the_log_probabilities_of_generation(tmp_path: Path) -> None:
    """Answers that are generated together, and then scored alone by a logits processor that fixes their tokens."""
    prompts = [prompt_of(length) for length in unless_long([65, 129], [65, 129, 210])]
    with LLM(str(make_folder(HYBRID, tmp_path)), skip_tokenizer_init=True, deterministic=True) as llm:
        num_tokens = 20 if RUNS_LONG else 8
        params = SamplingParams(temperature=1.0, seed=1, max_tokens=num_tokens, ignore_eos=True, logprobs=0)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answers = [output.outputs[0].token_ids for output in outputs]
        assert scored_by_force(llm, prompts, answers) == [logprobs_of(output) for output in outputs]


CASE_OF_IMAGES = [("preempted", "mixed", 2)]


@pytest.mark.parametrize("arch", [*(pytest.param(a, marks=takes_long) for a in (VL, INKLING_VL)), IMAGES_AND_STATES])
def test_images(arch: str, tmp_path: Path) -> None:
    alone = AloneWithImages(make_images(arch, tmp_path).folder)
    check_images(alone, "NONE", [("hit", "mixed", 3), ("preempted", "mixed", 3)] if RUNS_LONG else CASE_OF_IMAGES)
    alone.shutdown()
