"""A stored state is that of a run which stops there: every position up to 200, in the operations and in the engine.

Where both runs cut the prompt into the same chunks, the recurrent operations give the same bits. Elsewhere, and
through a whole model (whose matrix products round differently for another number of rows), states agree to 1e-5,
relative to their largest entry where that is above one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.harness import Harness
from tests.ops.oracles import make_batch
from tests.tiny import make_checkpoint
from tests.whole import RUNS_LONG, unless_long
from weft import LLM, SamplingParams
from weft.cache.nodes import Node
from weft.forward_context import LayerCache
from weft.ops.backend import Backend
from weft.ops.convolution import causal_conv1d
from weft.ops.delta_rule import chunk_gated_delta_rule, gdn_gates

POSITIONS = range(1, 201)
LENGTH = 210
TOLERANCE = 1e-5
SEEDS = [0, 1, 2]


def assert_same(found: Tensor, expected: Tensor, what: str = "the state") -> None:
    error = float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))
    assert error <= TOLERANCE, f"{what} is off by {error:.2g}"


# -- the operations ------------------------------------------------------------------------------------------------


def gdn_inputs(seed: int) -> list[Tensor]:
    """q, k, v, g, beta of ``LENGTH`` tokens, the decays of a token from none to a factor of about a hundred.

    Stronger ones would add up to hundreds within a chunk, and differences of such sums are rounded to more than 1e-5.
    """
    gen = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(LENGTH, 1, 4, generator=gen) for _ in range(2))
    v = torch.randn(LENGTH, 2, 3, generator=gen)
    a, b = (torch.randn(LENGTH, 2, generator=gen) * 2 for _ in range(2))
    return [q, k, v, *gdn_gates.reference(a, b, torch.tensor([-6.0, 0.0]), torch.tensor([-1.0, 0.5]))]


def stored_gdn(x: list[Tensor], checkpoints: list[dict[int, int]]) -> Tensor:
    """Run the same tokens once per entry of ``checkpoints``; slots count on behind the working ones."""
    count, most = len(checkpoints), max(slot for stored in checkpoints for slot in stored.values())
    state = torch.full((most + 1, 2, 4, 3), torch.nan)
    batch = make_batch([LENGTH] * count, [0] * count, checkpoints=dict(enumerate(checkpoints)))
    chunk_gated_delta_rule(*(t.repeat(count, *[1] * (t.dim() - 1)) for t in x), state, batch, backend=Backend.TORCH)
    return state


def stopped_gdn(x: list[Tensor]) -> Tensor:
    """The state after each of ``POSITIONS``, from a run that stops there: ``[200, HV, K, V]``."""
    state = torch.full((len(POSITIONS) + 1, 2, 4, 3), torch.nan)
    runs = [torch.cat([t[:p] for p in POSITIONS]) for t in x]
    chunk_gated_delta_rule(*runs, state, make_batch(list(POSITIONS), [0] * len(POSITIONS)), backend=Backend.TORCH)
    return state[1:]


@pytest.mark.parametrize("seed", SEEDS)
def test_recurrent_states_are_the_same_bits_on_the_same_chunks(seed: int) -> None:
    x, count = gdn_inputs(seed), len(POSITIONS)
    stored = stored_gdn(x, [{p: count + p} for p in POSITIONS])
    assert torch.equal(stored[count + 1 :], stopped_gdn(x))


@pytest.mark.parametrize("seed", SEEDS)
def test_recurrent_states_agree_on_other_chunks(seed: int) -> None:
    """Four checkpoints in each run, at random: all but the first are stored behind another cut."""
    x, rng = gdn_inputs(seed), random.Random(seed)
    positions = rng.sample(POSITIONS, len(POSITIONS))
    count = len(positions) // 4
    stored = stored_gdn(x, [{p: count + p for p in positions[4 * i : 4 * i + 4]} for i in range(count)])
    for p, found, expected in zip(POSITIONS, stored[count + 1 :], stopped_gdn(x), strict=True):
        assert_same(found, expected, f"the state at {p}")


@pytest.mark.parametrize("seed", SEEDS)
def test_convolution_states_are_the_same_bits(seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(LENGTH, 5, generator=gen), torch.randn(5, 4, generator=gen)
    state = torch.full((2 + len(POSITIONS), 5, 3), torch.nan)
    batch = make_batch([LENGTH], [0], checkpoints={0: {p: 1 + p for p in POSITIONS}})
    causal_conv1d(x, weight, None, state, batch, backend=Backend.TORCH)
    for p in POSITIONS:
        inputs = torch.cat([torch.zeros(3, 5), x[:p]])[-3:]
        assert torch.equal(state[1 + p], inputs.T)


# -- the engine ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=unless_long(SEEDS[:1], SEEDS[:2]))
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def folder(seed: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("Qwen3NextForCausalLM", tmp_path_factory.mktemp("tiny"), seed=seed)


@pytest.fixture
def half(seed: int) -> range:
    """Every second position: the two seeds share them. ``make test`` runs a sixth of one seed's."""
    return POSITIONS[seed :: 2 if RUNS_LONG else 12]


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    rng = random.Random(5)
    return [rng.randrange(200) for _ in range(LENGTH)]


States = dict[str, Tensor]
Stopped = Callable[[list[int]], States]


@pytest.fixture(scope="module")
def stopped(folder: Path) -> Stopped:
    """The states after a whole sequence, from one forward of the model by hand: no scheduler, cache or checkpoints."""
    harness = Harness(folder, num_pages=40, num_slots=2)
    known: dict[tuple[int, ...], States] = {}

    def run(tokens: list[int]) -> States:
        if tuple(tokens) not in known:
            sequence = harness.sequence(tokens)
            harness.run([(sequence, len(tokens))])
            harness.release(sequence)
            known[tuple(tokens)] = states_in(harness.caches, sequence.slot)
        return known[tuple(tokens)]

    return run


def states_in(caches: Mapping[str, LayerCache], slot: int) -> States:
    return {
        f"{name}.{role}": cache[role][slot].clone()
        for name, cache in caches.items()
        for role in ("conv", "recurrent")
        if role in cache
    }


def make_engine(folder: Path, policy: str) -> LLM:
    return LLM(
        str(folder),
        skip_tokenizer_init=True,
        state_checkpoint_policy=policy,
        max_num_seqs=16,
        num_kv_pages=4000,
        num_state_slots=900,
    )


def generate(llm: LLM, prompts: Sequence[Mapping[str, object]], max_tokens: int) -> list[list[int]]:
    """Prompts and outputs, the last token of which was never fed."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
    return [o.prompt_token_ids + list(o.outputs[0].token_ids)[:-1] for o in outputs]


def check_stored(llm: LLM, salt: str, tokens: list[int], expected: States) -> None:
    """The state after exactly ``tokens`` is stored under ``salt`` and is the expected one."""
    checkpoint = llm._core.manager.match([*tokens, 0], salt).checkpoint
    assert checkpoint is not None and checkpoint.position == len(tokens), f"no state is stored at {len(tokens)}"
    found = states_in(llm._core._executor._runner.caches, checkpoint.slot)
    for name, value in expected.items():
        assert_same(found[name], value, f"{name} at {len(tokens)}")


def stored_positions(llm: LLM, salt: str) -> set[int]:
    return {p for node in below(llm._core.manager.tree.root(salt)) for p in node.checkpoints}


def below(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children.values():
        yield from below(child)


def border_at(llm: LLM, prompt: list[int], positions: Sequence[int]) -> None:
    """Prompts that end nine tokens behind the turn boundary."""
    prompts = [
        {"prompt_token_ids": prompt[: p + 9], "checkpoint_positions": [p], "cache_salt": str(p)} for p in positions
    ]
    generate(llm, prompts, max_tokens=1)


def test_exact_stores_every_position(folder: Path, prompt: list[int], stopped: Stopped) -> None:
    """The boundary that was asked for, the end of the prompt less one, and the end of the request."""
    with make_engine(folder, "exact") as llm:
        positions = POSITIONS if RUNS_LONG else POSITIONS[::6]
        border_at(llm, prompt, positions)
        for p in positions:
            assert stored_positions(llm, str(p)) == {p, p + 8, p + 9}
            check_stored(llm, str(p), prompt[:p], stopped(prompt[:p]))
        for p in POSITIONS[: 192 : 16 if RUNS_LONG else 48]:  # the others come behind one more cut
            check_stored(llm, str(p), prompt[: p + 8], stopped(prompt[: p + 8]))


def test_finish_only_stores_the_end_of_every_request(
    folder: Path, half: range, prompt: list[int], stopped: Stopped
) -> None:
    """Requests that end after each position, their last three tokens decoded."""
    with make_engine(folder, "finish_only") as llm:
        prompts = [{"prompt_token_ids": prompt[: p - 3], "cache_salt": str(p)} for p in half if p > 3]
        for tokens in generate(llm, prompts, max_tokens=4):
            assert stored_positions(llm, str(len(tokens))) == {len(tokens)}
            check_stored(llm, str(len(tokens)), tokens, stopped(tokens))


def test_aligned_stores_multiples_of_64(folder: Path, half: range, prompt: list[int], stopped: Stopped) -> None:
    """The boundary and the prompt's end rounded down, and the last multiple that decoding came past."""
    with make_engine(folder, "aligned") as llm:
        border_at(llm, prompt, half)
        for p in half:
            expected = {p // 64 * 64, (p + 8) // 64 * 64} - {0}
            assert stored_positions(llm, str(p)) == expected
            for position in expected:
                check_stored(llm, str(p), prompt[:position], stopped(prompt[:position]))
        for length in unless_long([63, 120], [30, 63, 64, 65, 120]):
            salt = f"decodes from {length}"
            (tokens,) = generate(llm, [{"prompt_token_ids": prompt[:length], "cache_salt": salt}], max_tokens=80)
            last = len(tokens) // 64 * 64
            check_stored(llm, salt, tokens[:last], stopped(tokens[:last]))
