"""Steps launched before it is known how many drafts of the one before were accepted: nothing but the speed changes.

Drafts come from a table on the device that holds each row's tokens, some of them wrong.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from tests.engine.conftest import assert_idle
from tests.late_device import LateDevice
from tests.models.mtp_reference import make_mtp_checkpoint
from tests.shared import kept_open
from tests.whole import RUNS_LONG, covering, unless_long
from tests.x_matrix import runner_of
from weft import LLM, SamplingParams
from weft.messages import SchedulerOutput
from weft.ops.backend import Backend
from weft.ops.drafts import ngram_drafts, right_drafts
from weft.ops.drafts.types import AcceptanceRule
from weft.runner.drafting import drafters
from weft.runner.drafting.drafters import MtpDrafts
from weft.runner.drafting.step_drafts import RunStep
from weft.scheduler.draft_steps import ON_DEVICE, apply_acceptance

NUM_DRAFTS, LONGEST, ROWS, WRONG = 3, 160, 3, 0.25
SETTINGS: dict[str, Any] = {
    "max_num_seqs": ROWS,
    "max_num_batched_tokens": 40,
    "max_model_len": LONGEST,
    "page_size": 4,
    "num_kv_pages": 120,
}
TABLES: dict[str, Tensor] = {}
"""By kind of device, of every row (and of padding) the tokens at all positions."""

Texts = dict[tuple[int, ...], list[int]]
"""All tokens by prompt."""


def table_of(device: torch.device) -> Tensor:
    if device.type not in TABLES:
        TABLES[device.type] = torch.zeros(ROWS + 1, LONGEST, dtype=torch.int64, device=device)
    return TABLES[device.type]


def _from_table(rows: Tensor, last: Tensor) -> Tensor:
    """Return the tokens after the token that follows position ``last [N]`` of ``rows [N]``. Padding may have negative
    positions."""
    places = last[:, None] + torch.arange(2, 2 + NUM_DRAFTS, device=last.device)
    return table_of(last.device).index_select(0, rows).gather(1, places.clamp(0, LONGEST - 1))


def _after_full_step(self: MtpDrafts, inputs: Any, hidden_states: Tensor, token_ids: Tensor, acceptance: Any) -> Tensor:
    device = hidden_states.device
    last = torch.arange(inputs.batch.num_seqs, device=device) if acceptance is None else acceptance.last
    drafts = _from_table(inputs.rows, inputs.batch.positions.index_select(0, last))
    self.state.drafts[:, : drafts.shape[1]].index_copy_(0, inputs.rows, drafts)
    return drafts


def _after_any_step(self: MtpDrafts, step: RunStep) -> Tensor:
    sampling = [r for r in step.requests if r.samples]
    last = [r.start + r.num_tokens - 1 - len(r.draft_token_ids) for r in sampling]
    rows = [r.row for r in sampling]
    places = torch.tensor([rows, last], dtype=torch.int64).view(2, -1).to(step.hidden_states.device)
    accepted = step.acceptance.num_accepted if step.acceptance is not None else 0
    return _from_table(places[0], places[1] + accepted)


def _instead_of_ngrams(
    token_ids: Tensor, num_accepted: Any, rows: Tensor, seq_lens: Tensor, *others: Any, backend: Backend
) -> Tensor:
    """The operation, but for its drafts."""
    found = ngram_drafts(token_ids, num_accepted, rows, seq_lens, *others, backend=backend)
    last = seq_lens.long() - len(token_ids) // len(rows)
    drafts = _from_table(rows, last if num_accepted is None else last + num_accepted)[:, : found.shape[1]]
    others[1].drafts[:, : drafts.shape[1]].index_copy_(0, rows, drafts)
    return drafts


class Engines:
    """An engine without drafts, and an engine whose steps follow each other, on the CPU with a late device."""

    def __init__(self, plain: LLM, following: LLM) -> None:
        self.plain, self.following, self.num_followed = plain, following, 0
        on_cpu, device = following.config.device == "cpu", torch.device(runner_of(following).device)
        if on_cpu:
            LateDevice(following)
        self.texts: Texts = {}
        launch, self._rng = following._core._executor.launch, random.Random(0)

        def fill_and_launch(step: SchedulerOutput, *arguments: Any) -> None:
            self.num_followed += any(request.follows for request in step.requests)
            for running in following._core.scheduler._rows.running:
                text = self.texts.get(tuple(running.request.prompt_token_ids), [])[:LONGEST]
                table_of(device)[running.row, : len(text)].copy_(torch.tensor(text, dtype=torch.int64))  # waits
            launch(step, *arguments)

        following._core._executor.launch = fill_and_launch  # type: ignore[method-assign]

    def expect(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
        """Return the plain engine's outputs. The table holds a part of these tokens from now on."""
        outputs = run(self.plain, prompts, params)
        for output in outputs:
            text = [*output.prompt_token_ids, *output.outputs[0].token_ids, *[5] * NUM_DRAFTS]
            wrong = [t if self._rng.random() >= WRONG else (t + 1) % 200 for t in text]
            self.texts[tuple(output.prompt_token_ids)] = wrong
        return outputs


@contextmanager
def open_engines(folder: Path, mode: str, method: str = "mtp", **settings: Any) -> Iterator[Engines]:
    config = {"method": method, "num_speculative_tokens": NUM_DRAFTS}
    modes = {"cuda_graph_mode": mode, "enable_overlap": True, "speculative_config": config}
    settings = SETTINGS | settings
    table_of(torch.device(settings.get("device", "cpu")))  # not in inference mode, whose tensors no other code writes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MtpDrafts, "after_full_step", _after_full_step)
        patch.setattr(MtpDrafts, "after_step", _after_any_step)
        patch.setattr(drafters, "ngram_drafts", _instead_of_ngrams)
        with LLM(str(folder), **settings) as plain, LLM(str(folder), **settings, **modes) as following:
            yield Engines(plain, following)
            assert_idle(following)
            graphs = runner_of(following).graphs.verification
            assert graphs is None if mode == "NONE" else graphs is not None and graphs.counters.replays


COLUMNS = {"NONE": "Qwen3NextForCausalLM", "FULL_DECODE_ONLY": "Qwen3_5ForCausalLM"}


@pytest.fixture(scope="module")
def engines_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Engines]]:
    def opening(mode: str) -> AbstractContextManager[Engines]:
        folder, _ = make_mtp_checkpoint(COLUMNS[mode], tmp_path_factory.mktemp("mtp"), with_tokenizer=True)
        return open_engines(folder, mode)

    with kept_open(opening, at_most=len(COLUMNS)) as engines_of:
        yield engines_of


@pytest.fixture(params=unless_long(["FULL_DECODE_ONLY"], COLUMNS))
def engines(request: pytest.FixtureRequest, engines_of: Callable[[str], Engines]) -> Engines:
    return engines_of(request.param)


def run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], abort_after: int = 0) -> list[Any]:
    """Outputs of requests of which some come while others run; the invariants hold after every step."""
    outputs: dict[str, Any] = {}
    waiting = [(str(i), *pair) for i, pair in enumerate(zip(prompts, params, strict=True))]
    rng = random.Random(len(prompts))
    while waiting or not llm.is_finished():
        if waiting and (llm.is_finished() or rng.random() < 0.1):
            name, prompt, one = waiting.pop(0)
            llm.add_request({"prompt_token_ids": prompt}, one, request_id=name)
        for output in llm.step():
            outputs[output.request_id] = output
        abort_after -= 1
        if abort_after == 0:
            outputs["0"] = llm.abort("0")
        llm._core.scheduler.check()
    return [outputs[str(i)] for i in range(len(prompts))]


@pytest.mark.parametrize(("engines", "stops"), covering(COLUMNS, [False, True], of=1), indirect=["engines"])
def test_tokens_are_those_without_drafts(engines: Engines, stops: bool) -> None:
    check_tokens(engines, stops)


PARAMS = [(0, 40, None), (1.0, 25, 2), (0.7, 31, None), (0, 7, None), (1.2, 40, None)]
"""Temperature, number of tokens, log probabilities."""


def check_tokens(engines: Engines, stops: bool) -> None:
    """The tokens are those without drafts, also of conversations that go on from the states that the first answers left
    in the cache."""
    rng, before = random.Random(stops), engines.num_followed
    ends = list(range(3, 12)) if stops else None
    prompts = [[rng.randrange(3, 200) for _ in range(n)] for n in unless_long((1, 9, 30), (1, 9, 30, 30, 5))]
    params = [
        SamplingParams(temperature=t, seed=s, max_tokens=n, ignore_eos=True, stop_token_ids=ends, logprobs=lp)
        for s, (t, n, lp) in enumerate(unless_long(PARAMS[:3], PARAMS))
    ]
    for _ in range(2):
        expected, found = engines.expect(prompts, params), run(engines.following, prompts, params)
        for a, b in zip(expected, found, strict=True):
            assert a.outputs[0].token_ids == b.outputs[0].token_ids
            assert a.outputs[0].finish_reason == b.outputs[0].finish_reason
            assert [*map(list, a.outputs[0].logprobs or [])] == [*map(list, b.outputs[0].logprobs or [])]
        prompts = [[*o.prompt_token_ids, *o.outputs[0].token_ids, 7, 8] for o in found]
    assert engines.num_followed - before > (5 if stops else 20)
    stats = engines.following.stats()
    assert stats.spec_decode_num_accepted_tokens > 0.4 * stats.spec_decode_num_draft_tokens


def test_a_stop_string_is_found_late(engines: Engines) -> None:
    """A step with drafts that lies behind the stop is in flight by then, often several accepted drafts behind it. Texts
    and tokens end where they do without drafts, the next turns find the same, and no page or slot is lost."""
    rng, before = random.Random(8), engines.num_followed
    prompts = [[rng.randrange(3, 200) for _ in range(n)] for n in (2, 9, 20)]
    endless = [SamplingParams(temperature=t, seed=3, max_tokens=50, ignore_eos=True) for t in (0, 0.8, 0)]
    for turn in range(2 if RUNS_LONG else 1):
        texts = [output.outputs[0].text for output in engines.expect(prompts, endless)]
        stops = [text[len(text) // 2 : len(text) // 2 + 2] for text in texts]
        params = [
            SamplingParams(temperature=p.temperature, seed=3, max_tokens=50, ignore_eos=True, stop=[stop])
            for p, stop in zip(endless, stops, strict=True)
        ]
        table = dict(engines.texts)
        expected = engines.expect(prompts, params)
        engines.texts.update(table)  # drafts go on behind the stop
        found = run(engines.following, prompts, params)
        for f, e in zip(found, expected, strict=True):
            assert f.outputs[0].finish_reason == "stop", turn
            assert (f.outputs[0].token_ids, f.outputs[0].text) == (e.outputs[0].token_ids, e.outputs[0].text)
        assert_idle(engines.following)
        prompts = [[*f.prompt_token_ids, *f.outputs[0].token_ids, 9] for f in found]
    assert engines.num_followed > before + 5


def test_steps_follow_up_to_the_end_of_the_context(engines: Engines) -> None:
    """And none is planned past it: its most tokens would need pages and places that no sequence has."""
    prompts, before = [[7] * (LONGEST - 23), [9] * (LONGEST - 22)], engines.num_followed  # four tokens a step
    greedy = [SamplingParams(temperature=0, ignore_eos=True)] * 2
    expected = engines.expect(prompts, greedy)
    for output in expected:
        engines.texts[tuple(output.prompt_token_ids)] = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    for a, b in zip(expected, run(engines.following, prompts, greedy), strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids and b.outputs[0].finish_reason == "length"
        assert len(b.prompt_token_ids) + len(b.outputs[0].token_ids) == LONGEST
    assert engines.num_followed > before + 2


def test_only_drafts_that_were_found_are_counted() -> None:
    """Tokens that fill a request up to the number of drafts of other requests are verified and not counted."""
    request = SimpleNamespace(draft_token_ids=[4], num_computed_tokens=10)
    running = SimpleNamespace(request=request, lease=None)
    planner, launched = Mock(), SimpleNamespace(running=running, num_drafts=3, num_proposed=ON_DEVICE)
    apply_acceptance(planner, Mock(), launched, num_tokens=3)  # type: ignore[arg-type]
    planner.verified.assert_called_once_with(request, 1, 1)
    assert request.num_computed_tokens == 9


def test_an_aborted_request_leaves_the_others_alone(engines: Engines) -> None:
    prompts = [[5, 6, 7], [9] * 12, [8, 8]]
    params = [SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)] * 3
    expected = [output.outputs[0].token_ids for output in engines.expect(prompts, params)]
    found = [output.outputs[0].token_ids for output in run(engines.following, prompts, params, abort_after=6)]
    assert found[1:] == expected[1:] and found[0] == expected[0][: len(found[0])] and len(found[0]) < 30


def test_the_state_after_an_end_in_an_accepted_run_is_there(tmp_path: Path) -> None:
    """The next turn begins behind the whole text."""
    folder, _ = make_mtp_checkpoint("Qwen3NextForCausalLM", tmp_path, with_tokenizer=True)
    prompt, greedy = [5, 6, 7, 8, 9], SamplingParams(temperature=0, max_tokens=40)
    with LLM(str(folder), **SETTINGS) as llm:
        text = run(llm, [prompt], [greedy])[0].outputs[0].token_ids
    steps = range(2 + NUM_DRAFTS + 1, len(text), NUM_DRAFTS + 1)  # the second of a step's tokens
    place = next(i for i in steps if text.index(text[i]) == i)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": text[place]}))
    with open_engines(folder, "NONE") as engines:
        (expected,) = engines.expect([prompt], [greedy])
        engines.texts[tuple(prompt)] = [*prompt, *text]
        (found,) = run(engines.following, [prompt], [greedy])
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids == text[: place + 1]
        assert engines.num_followed and found.metrics.num_accepted_tokens > 3
        whole = [*prompt, *text[: place + 1]]
        (again,) = run(engines.following, [[*whole, 7]], [greedy])
        assert again.num_cached_tokens == len(whole)


def test_a_draft_that_ends_the_text_is_the_last_token_of_its_step() -> None:
    sampled = torch.tensor([4, 2, 9, 5])
    drafts, nothing = torch.tensor([4, 2, 9, -1]), torch.zeros(4, dtype=torch.int64)
    tokens, is_right = right_drafts(sampled, drafts, nothing, nothing, AcceptanceRule.of(None, torch.tensor([2, 3])))
    assert tokens.tolist() == [4, 2, 9, 5] and is_right.tolist() == [True, False, True, False]
