"""Drafts of the model's own head: those of the reference, through prefill chunks, hits, decodes and verification.

The tokens are those of decoding without drafts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import assert_idle
from tests.late_device import LateDevice
from tests.models.mtp_reference import ReferenceHead, make_mtp_checkpoint
from tests.ranks import fork_ranks
from tests.speculation.conftest import Case, make_repeating_checkpoint
from tests.speculation.test_ngram import Steps
from tests.whole import RUNS_LONG, unless_long
from tests.x_matrix import runner_of
from weft import LLM, SamplingParams, StructuredOutputsParams
from weft.request import Request

NUM_DRAFTS = 3
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 3,
    "max_num_batched_tokens": 24,
    "page_size": 4,
    "skip_tokenizer_init": True,
}

Engines = tuple[LLM, LLM, ReferenceHead]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ReferenceHead]:
    return make_mtp_checkpoint("Qwen3NextForCausalLM", tmp_path_factory.mktemp("mtp"))


MODES = {
    "NONE, overlap": ("NONE", True),
    "FULL, overlap": ("FULL", True),
    "FULL_AND_PIECEWISE": ("FULL_AND_PIECEWISE", False),
}


@pytest.fixture(scope="module", params=unless_long(["FULL, overlap"], MODES))
def engines(request: pytest.FixtureRequest, checkpoint: tuple[Path, ReferenceHead]) -> Iterator[Engines]:
    folder, reference = checkpoint
    config = {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS}
    mode, overlap = MODES[request.param]
    modes: dict[str, Any] = {"cuda_graph_mode": mode, "enable_overlap": overlap, "speculative_config": config}
    with LLM(str(folder), **SETTINGS) as plain, LLM(str(folder), **SETTINGS, **modes) as mtp:
        if overlap:
            LateDevice(mtp)
        yield plain, mtp, reference
        assert mtp.stats().spec_decode_num_drafts
        graphs = runner_of(mtp).graphs.verification
        assert graphs is None if mode == "NONE" else graphs is not None and graphs.counters.replays
        assert_idle(mtp)


def prompts() -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(3, 200) for _ in range(n)] for n in (1, 7, 30, 65)]


def check_drafts(request: Request, reference: ReferenceHead) -> int:
    """Compare what is drafted for ``request`` now. Returns how many drafts that were."""
    if not request.draft_token_ids:
        return 0
    known = request.known_token_ids.tolist()
    done = len(request.output_token_ids)  # behind the prompt, and near the end, pages for later drafts may be missing
    room = NUM_DRAFTS if 1 < done < request.max_tokens - NUM_DRAFTS else 1
    assert request.draft_token_ids[:room] == reference.drafts(known, room), f"after {len(known)} tokens"
    return room


def test_drafts_are_the_references(engines: Engines) -> None:
    """At every step of every request, one of which begins inside another's prompt."""
    _, mtp, reference = engines
    mtp._core.reset_prefix_cache()
    steps = Steps(mtp)
    shared = prompts()[3]
    compared = num_steps = 0
    for batch in (prompts(), [[*shared[:50], 7, 9, 11], shared]):
        for prompt in batch:
            mtp.add_request({"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        while not mtp.is_finished():
            mtp.step()
            num_steps += 1
            if RUNS_LONG or num_steps % 3 == 0:  # the reference computes each draft anew
                for running in mtp._core.scheduler._rows.running:
                    compared += check_drafts(running.request, reference)
    assert compared > (40 if RUNS_LONG else 12)
    assert steps.followed > 10 or not mtp.config.enable_overlap


@pytest.mark.parametrize("temperature", unless_long([0.9], [0.0, 0.9]))
def test_tokens_are_those_without_drafts(engines: Engines, temperature: float) -> None:
    plain, mtp, _ = engines
    params = [
        SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True, seed=n, repetition_penalty=1.0 + n / 100)
        for n in (1, 2, 17, 24)
    ]
    case = Case(prompts(), params)
    expected = [done.token_ids for done in case.run(plain)]
    assert [done.token_ids for done in case.run(mtp)] == expected


def test_a_logits_processor_shares_steps_without_drafts(engines: Engines) -> None:
    plain, mtp, _ = engines

    def favour(output: list[int], logits: Any) -> Any:
        logits[len(output) + 5] += 30
        return logits

    params = [
        SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logits_processors=p) for p in ([favour], None)
    ]
    case = Case(prompts()[1:3], params)
    expected = [done.token_ids for done in case.run(plain)]
    outputs = mtp.generate([{"prompt_token_ids": p} for p in case.prompts], params, use_tqdm=False)
    assert [list(o.outputs[0].token_ids) for o in outputs] == expected
    assert "logits processor" in outputs[0].metrics.no_drafts_because and not outputs[0].metrics.num_draft_tokens
    assert not outputs[1].metrics.no_drafts_because and outputs[1].metrics.num_draft_tokens
    assert all(a + 1 == b for a, b in pairwise(expected[0]))


def test_steps_that_follow_verify_what_was_drafted_last(tmp_path: Path) -> None:
    """On the device: as many drafts are right as where each step waits for the one before it."""
    folder = make_repeating_checkpoint("Qwen3NextForCausalLM", tmp_path, head=True)
    drafts: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 2}
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    figures = []
    for overlap in (False, True):
        modes = {"cuda_graph_mode": "NONE", "enable_overlap": overlap, "speculative_config": drafts}
        with LLM(str(folder), **SETTINGS, **modes) as mtp:
            mtp.generate([[5, 6, 7], [9, 8, 7, 6]], greedy, use_tqdm=False)
            stats = mtp.stats()
        figures.append((stats.spec_decode_num_accepted_tokens, stats.spec_decode_num_draft_tokens))
    assert figures[0] == figures[1] and figures[0][0] > 0.5 * figures[0][1]


def test_two_ranks(tmp_path: Path) -> None:
    """Also where steps follow one another, and where the tokens of one request have masks."""
    folder = make_repeating_checkpoint("Qwen3NextForCausalLM", tmp_path, head=True)
    settings = SETTINGS | {"skip_tokenizer_init": False}
    drafts: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 2}
    ranks: dict[str, Any] = {"tensor_parallel_size": 2, "enable_overlap": True, "speculative_config": drafts}
    digits = StructuredOutputsParams(regex="[0-9]{8}")
    params = [SamplingParams(temperature=t, max_tokens=24, ignore_eos=True, seed=3) for t in (0, 0.8)]
    params.append(SamplingParams(temperature=1.0, max_tokens=12, seed=3, structured_outputs=digits))
    case = Case(prompts()[:3], params)
    with LLM(str(folder), **settings) as plain:
        expected = [done.token_ids for done in case.run(plain)]
    with fork_ranks(), LLM(str(folder), **settings, **ranks) as mtp:
        steps = Steps(mtp)
        assert [done.token_ids for done in case.run(mtp)] == expected
        assert mtp.stats().spec_decode_num_draft_tokens and steps.followed
