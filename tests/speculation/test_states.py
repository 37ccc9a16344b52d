"""Recurrent states: after every position of an accepted run the state is that of a run that stops there.

And so is the state that a request leaves behind, wherever inside an accepted run it ends.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.drafters import FromOutputs, install
from tests.engine.conftest import assert_idle
from tests.speculation.conftest import CONFIG, MAX_DRAFTS
from tests.whole import unless_long
from tests.x_matrix import runner_of
from weft import LLM, SamplingParams
from weft.cache.nodes import as_tokens

TOLERANCE = 1e-5
STATES = ["Qwen3NextForCausalLM", "GptOssForCausalLM"]
"""The last one's windows verify nothing: its drafts run as prefills."""
MORE = ["KimiLinearForCausalLM", "Lfm2ForCausalLM", "Qwen4ExpForCausalLM", "BambaForCausalLM"]
PROMPT = [random.Random(3).randrange(3, 200) for _ in range(70)]


@pytest.fixture(scope="module", params=unless_long(STATES, STATES + MORE))
def engines(request: pytest.FixtureRequest, folder_of: Callable[[str], Path]) -> Iterator[tuple[LLM, LLM]]:
    folder = str(folder_of(request.param))
    with LLM(folder, max_num_seqs=2) as plain, LLM(folder, max_num_seqs=2, speculative_config=CONFIG) as drafting:
        yield plain, drafting
        assert_idle(plain)
        assert_idle(drafting)


def states(llm: LLM, slot: int) -> dict[str, torch.Tensor]:
    """Clones of every state tensor's entry."""
    runner = runner_of(llm)
    found = {
        f"{name}.{tensor.name}": runner.caches[name][tensor.name][slot].clone()
        for name, spec in runner.spec.layers.items()
        for tensor in spec.states
    }
    assert found
    return found


def state_of(llm: LLM, tokens: list[int]) -> dict[str, torch.Tensor]:
    """The state that a run over exactly ``tokens`` leaves."""
    manager = llm._core.manager
    manager.reset()
    llm.generate([{"prompt_token_ids": tokens}], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    checkpoint = manager.tree.match(as_tokens(tokens), None).nearest_checkpoint(len(tokens))
    assert checkpoint is not None and checkpoint.position == len(tokens)
    return states(llm, checkpoint.slot)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: object) -> None:
    for name, tensor in expected.items():
        error = float((found[name] - tensor).abs().max())
        assert error <= TOLERANCE * (1 + float(tensor.abs().max())), f"{what}: {name} differs by {error:.2g}"


def generated(llm: LLM, count: int) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    return list(llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0].outputs[0].token_ids)


@pytest.mark.parametrize("wrong_at", unless_long([None, 1], [None, 0, 1, 2, 3]))
def test_after_every_accepted_position(engines: tuple[LLM, LLM], wrong_at: int | None) -> None:
    plain, drafting = engines
    expected = generated(plain, 12)
    install(drafting, FromOutputs({(tuple(PROMPT), 1): expected}, lambda place, rng: place == wrong_at))
    drafting._core.manager.reset()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, seed=1)
    drafting.add_request({"prompt_token_ids": PROMPT}, params)
    sequence, checked = PROMPT + expected, set()
    while not drafting.is_finished():
        drafting.step()
        for running in drafting._core.scheduler._rows.running:
            lease = running.lease
            assert lease.num_committed_tokens == running.request.num_computed_tokens
            for position, slot in [*lease.drafts.stored, (lease.num_committed_tokens, lease.state_slot)]:
                assert_same(states(drafting, slot), state_of(plain, sequence[:position]), f"after {position}")
                checked.add(position)
    accepted = MAX_DRAFTS if wrong_at is None else wrong_at
    assert len(checked) >= (12 - 2 - accepted if accepted else 5)


@pytest.mark.parametrize("stop_after", unless_long([1, 3, 4, 8], range(1, 9)))
def test_at_an_end_inside_an_accepted_run(engines: tuple[LLM, LLM], stop_after: int) -> None:
    """The state goes into the tree under exactly the tokens that are the request's."""
    plain, drafting = engines
    expected = generated(plain, 12)
    if expected.index(expected[stop_after - 1]) != stop_after - 1:
        pytest.skip("that token comes up before")
    install(drafting, FromOutputs({(tuple(PROMPT), 1): expected}))
    drafting._core.manager.reset()
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[expected[stop_after - 1]], seed=1
    )
    prompt = {"prompt_token_ids": PROMPT}
    (output,) = drafting.generate([prompt], params, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == expected[:stop_after]
    sequence = PROMPT + expected[:stop_after]
    checkpoint = drafting._core.manager.tree.match(as_tokens(sequence), None).nearest_checkpoint(len(sequence))
    assert checkpoint is not None and checkpoint.position >= len(sequence) - 1
    assert_same(states(drafting, checkpoint.slot), state_of(plain, sequence[: checkpoint.position]), stop_after)


def test_aligned_snapshots(folder_of: Callable[[str], Path]) -> None:
    """No step crosses a multiple of the chunk length. The state there is kept if accepted tokens reach the multiple."""
    folder, count = str(folder_of("Qwen3NextForCausalLM")), 80
    settings = {"max_num_seqs": 2, "state_checkpoint_policy": "aligned"}
    with LLM(folder, **settings) as plain, LLM(folder, speculative_config=CONFIG, **settings) as drafting:
        expected = generated(plain, count)
        rng = random.Random(0)
        install(drafting, FromOutputs({(tuple(PROMPT), 1): expected}, lambda place, rng: rng.random() < 0.2, rng))
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, seed=1)
        (output,) = drafting.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == expected
        assert drafting.stats().spec_decode_num_accepted_tokens > count // 2
        sequence = PROMPT + expected
        matches = [llm._core.manager.tree.match(as_tokens(sequence), None) for llm in (plain, drafting)]
        found, checkpoint = (match.nearest_checkpoint(len(sequence)) for match in matches)
        assert found is not None and checkpoint is not None and found.position == checkpoint.position == 128
        with LLM(folder, max_num_seqs=2) as exact:
            assert_same(states(drafting, checkpoint.slot), state_of(exact, sequence[:128]), "at 128")
        assert_idle(drafting)
