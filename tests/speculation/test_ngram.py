"""N-gram drafts made on the device. Steps follow one another, decodes run ahead while nothing is found, and only the
speed changes. A stop string that is found a step late has no lasting effect."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.engine.conftest import assert_idle
from tests.late_device import LateDevice
from tests.speculation.conftest import Case, make_repeating_checkpoint
from tests.whole import unless_long
from weft import LLM, SamplingParams
from weft.config.speculation import SpeculativeConfig
from weft.messages import NewRequest, RowSampling, ScheduledRequest
from weft.ops.backend import Backend
from weft.ops.drafts.types import NO_DRAFT
from weft.runner.drafting.acceptance import Acceptance
from weft.runner.drafting.drafters import NgramDrafts
from weft.runner.drafting.step_drafts import DraftRules, RunStep
from weft.runner.rows import RowTable

CONFIG = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
SETTINGS: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 40, "page_size": 4, "max_model_len": 192}
COLUMNS = {"NONE": "Qwen3ForCausalLM", "FULL_DECODE_ONLY": "Qwen3NextForCausalLM"}


class Steps:
    """Counts of the steps that an engine launched: decodes, verifications, and steps that follow another."""

    def __init__(self, llm: LLM) -> None:
        self.decodes = self.verifications = self.followed = 0
        launch = llm._core._executor.launch

        def count(step: Any, *arguments: Any) -> None:
            self.decodes += all(request.is_decode for request in step.requests)
            self.verifications += any(request.draft_token_ids for request in step.requests)
            self.followed += any(request.follows for request in step.requests)
            launch(step, *arguments)

        llm._core._executor.launch = count  # type: ignore[method-assign]


@pytest.fixture(scope="module", params=unless_long(["NONE"], COLUMNS))
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, LLM, Steps]]:
    """Without drafts, and with, behind a late device."""
    folder = str(make_repeating_checkpoint(COLUMNS[request.param], tmp_path_factory.mktemp("repeating")))
    overlap: dict[str, Any] = {"enable_overlap": True, "cuda_graph_mode": request.param}
    with LLM(folder, **SETTINGS) as plain, LLM(folder, speculative_config=CONFIG, **overlap, **SETTINGS) as drafting:
        LateDevice(drafting, random.Random(3))
        yield plain, drafting, Steps(drafting)
        assert_idle(drafting)


def repeating(rng: random.Random) -> list[int]:
    """A prompt in which something stands twice."""
    return [rng.randrange(3, 200) for _ in range(rng.randint(2, 12))] * 2 + [rng.randrange(3, 200)]


def test_tokens_are_those_without_drafts(engines: tuple[LLM, LLM, Steps]) -> None:
    check_repeating(*engines)


def check_repeating(plain: LLM, drafting: LLM, steps: Steps) -> None:
    """Compare requests that come one after the other, greedy and sampled, with penalties and without."""
    rng, before = random.Random(1), drafting.stats().spec_decode_num_accepted_tokens
    params = [
        SamplingParams(temperature=t, max_tokens=n, ignore_eos=True, seed=n, repetition_penalty=p, logprobs=lp)
        for t, n, p, lp in [(0, 60, 1, None), (0, 90, 1, None), (0.4, 70, 1, 2), (0, 33, 1.2, None), (0, 80, 1, 1)]
    ]
    case = Case([repeating(rng) for _ in params], params)
    found, expected = case.run(drafting), case.run(plain)
    assert [f.token_ids for f in found] == [e.token_ids for e in expected]
    for f, e in zip(found, expected, strict=True):
        assert [*map(list, f.logprobs or [])] == [*map(list, e.logprobs or [])]
    assert drafting.stats().spec_decode_num_accepted_tokens > before + 20
    assert steps.followed > 5 and steps.verifications > steps.followed


def test_decodes_run_ahead_where_nothing_repeats(engines: tuple[LLM, LLM, Steps]) -> None:
    """Few steps verify, and the others overlap like those of an engine without drafts."""
    plain, drafting, steps = engines
    params = [SamplingParams(temperature=1.5, max_tokens=40, ignore_eos=True, seed=s) for s in range(2)]
    case = Case([[7, 8, 9], [11, 12]], params)
    decodes, verifications = steps.decodes, steps.verifications
    assert [f.token_ids for f in case.run(drafting)] == [e.token_ids for e in case.run(plain)]
    assert steps.verifications - verifications < 12 and steps.decodes - decodes > 25


def test_a_stop_string_is_found_late(engines: tuple[LLM, LLM, Steps]) -> None:
    """A step that verifies drafts after the stop string is in flight by then. Texts and tokens end as without drafts,
    also in the next turn."""
    plain, drafting, steps = engines
    rng, followed = random.Random(5), steps.followed
    temperatures = unless_long([0.0, 0.9], [0.0, 0.9, 0.0, 0.5])
    prompts = [repeating(rng) for _ in temperatures]
    params = [SamplingParams(temperature=t, max_tokens=80, ignore_eos=True, seed=s) for s, t in enumerate(temperatures)]
    texts = [done.text for done in Case(prompts, params).run(plain)]
    stops = [text[len(text) // 2 : len(text) // 2 + 3] for text in texts]
    for turn in range(2):
        ending = [
            SamplingParams(temperature=t, max_tokens=80, ignore_eos=True, seed=s, stop=[stop])
            for s, (t, stop) in enumerate(zip(temperatures, stops, strict=True))
        ]
        case = Case(prompts, ending)
        found, expected = case.run(drafting), case.run(plain)
        for f, e in zip(found, expected, strict=True):
            assert (f.token_ids, f.text, f.stop_reason) == (e.token_ids, e.text, e.stop_reason)
            assert f.finish_reason == "stop" or turn
        assert_idle(drafting)
        prompts = [[*prompt, *f.token_ids, 5] for prompt, f in zip(prompts, found, strict=True)]
    assert steps.followed > followed


def drafter_of(num_drafts: int, low: int, high: int) -> tuple[RowTable, NgramDrafts]:
    rows = RowTable(3, 8, torch.device("cpu"))
    rules = DraftRules(4, lambda num_seqs: num_drafts, verifies=True, keeps_states=False, on_device=True)
    return rows, NgramDrafts(SpeculativeConfig("ngram", 4, low, high), 32, rules, rows, 16, Backend.TORCH)


@pytest.mark.parametrize(("low", "high", "follows"), [(2, 3, 9), (2, 2, 8), (4, 4, NO_DRAFT)])
def test_the_longest_suffix_that_counts_is_looked_up(low: int, high: int, follows: int) -> None:
    """The text is the prompt and the sampled tokens."""
    rows, drafter = drafter_of(1, low, high)
    new = NewRequest(0, array("I", [1, 2, 3, 9, 4, 2, 3, 8, 1, 2]), 10, RowSampling())
    rows.add(new)
    drafter.add_row(new)
    nothing: Any = None
    requests = [ScheduledRequest(0, 8, 2, [], 0, True)]
    step = RunStep(requests, nothing, nothing, torch.tensor([3]), None, nothing)
    assert drafter.after_step(step).tolist() == [[follows]]


def test_prompts_are_looked_up(engines: tuple[LLM, LLM, Steps]) -> None:
    """A new row has its prompt on the device, and then what is sampled."""
    _, drafting, _ = engines
    prompt, seen = list(range(20, 50)), 0
    drafting.add_request({"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=4), "seen")
    while not drafting.is_finished():
        drafting.step()
        for running in drafting._core.scheduler._rows.running:
            history = drafting._core._executor._runner.steps.drafts.history  # type: ignore[attr-defined]
            known = running.request.known_token_ids.tolist()
            if len(known) > len(prompt):  # before that, its first step may not have run
                assert history[running.row, : len(known)].tolist() == known
                seen += 1
    assert seen


def test_rows_remember_what_the_drafts_of_their_step_came_to() -> None:
    """Drafts that a batch of this size does not get were not rejected: a step that follows begins where its row ends.
    Here outside a graph, as after a step with a request whose logits are edited."""
    rows, drafter = drafter_of(2, 2, 3)
    for row in (0, 1):
        new = NewRequest(row, array("I", [5, 6, 7, 8, 5]), 5, RowSampling())
        rows.add(new)
        drafter.add_row(new)
    requests = [ScheduledRequest(row, 4, 3, [], 0, True, draft_token_ids=[6, 7]) for row in (0, 1)]
    acceptance = Acceptance(torch.tensor([1, 2]), torch.tensor([1, 5]), torch.tensor([1, 1, 0, 1, 1, 1]).bool())
    nothing: Any = None
    drafts = drafter.after_step(
        RunStep(requests, nothing, nothing, torch.tensor([6, 9, 1, 6, 7, 8]), acceptance, nothing)
    )
    assert drafter.state.num_rejected.tolist()[:2] == [1, 0]
    assert drafter.history[0, :7].tolist() == [5, 6, 7, 8, 5, 6, 9]
    assert drafter.history[1, :8].tolist() == [5, 6, 7, 8, 5, 6, 7, 8]
    assert drafts.tolist() == [[NO_DRAFT] * 2, [5, 6]] and drafter.state.drafts[1, :2].tolist() == [5, 6]
