"""Several ranks generate what one generates, in float32: every model, every way a step can run, and what breaks."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.patience import stretched
from tests.ranks import fork_ranks
from tests.tiny import make_checkpoint
from tests.whole import takes_long, unless_long
from weft import LLM, SamplingParams
from weft.config import resolve
from weft.engine.core import EngineCore
from weft.errors import ConfigError, EngineDeadError, WeightsError
from weft.executor.multi_process import MultiProcessExecutor
from weft.runner.warmup import step

MODELS = (
    "LlamaForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Gemma3ForCausalLM",
    "OlmoHybridForCausalLM",
    "JambaForCausalLM",
    "MiniMaxForCausalLM",
    "Zamba2ForCausalLM",
    "ZayaForCausalLM",
    "InklingForCausalLM",
    "Inkling2ForCausalLM",
)
ON_FOUR = MODELS[:6]
"""Keys and values are replicated there; of the others layers alone are tested (``tests/layers``)."""
EVERY = [*((arch, 2) for arch in MODELS), *((arch, 4) for arch in ON_FOUR)]
SOME = [*zip(ON_FOUR, cycle((2, 4)), strict=False), *((arch, 2) for arch in MODELS if arch not in ON_FOUR)]
IN_LAYERS = ("Llama", "Qwen3_5", "Qwen3Moe", "Jamba", "InklingFor", "Olmo", "MiniMax", "Zamba2")
SOME = [case for case in SOME if not case[0].startswith(IN_LAYERS)]
"""The cases that ``make test`` runs: each model once, except models whose layers are tested elsewhere."""
CASES = unless_long(SOME, EVERY)
HYBRID = "Qwen3NextForCausalLM"
ODD = {
    "vocab_size": 211,  # padded to 212
    "num_attention_heads": 12,  # three on each of four ranks
    "num_key_value_heads": 2,  # replicated over four ranks
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
    "num_experts": 8,
}
OWN: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"attention_bias": True, "mlp_bias": True},
    "Zamba2ForCausalLM": {"num_key_value_heads": 12},  # adapters need as many as query heads
}
CRAMPED: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 48, "page_size": 4, "num_kv_pages": 40}


@pytest.fixture(autouse=True)
def _forks() -> Iterator[None]:
    with fork_ranks():
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Architecture -> checkpoint with odd numbers."""
    return {arch: make_checkpoint(arch, tmp_path_factory.mktemp(arch), **ODD | OWN.get(arch, {})) for arch in MODELS}


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    shared = [rng.randrange(3, 211) for _ in range(70)]
    alone = [[rng.randrange(3, 211) for _ in range(n)] for n in (1, 5, 65)]
    return [*alone, shared, [*shared, 9, 8, 7], [*shared[:40], 5]]


PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=5, ignore_eos=True),
] * 3


def generate(folder: Path, size: int, **settings: Any) -> tuple[list[list[int]], list[float]]:
    """Tokens of all prompts, and log probabilities of the greedy ones. The prompts run a second time: prefix hits."""
    settings = {"max_num_seqs": 8, "num_kv_pages": 200, "num_state_slots": 40} | settings
    with LLM(str(folder), skip_tokenizer_init=True, tensor_parallel_size=size, **settings) as llm:
        outputs = [o for _ in range(2) for o in llm.generate(prompts(), PARAMS, use_tqdm=False)]
    tokens = [o.outputs[0].token_ids for o in outputs]
    greedy = [o.outputs[0] for o in outputs if o.outputs[0].logprobs]
    return tokens, [lp[t].logprob for o in greedy for lp, t in zip(o.logprobs or (), o.token_ids, strict=True)]


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> dict[str, tuple[list[list[int]], list[float]]]:
    """The tokens and log probabilities that one rank generates, by architecture."""
    return {arch: generate(folders[arch], 1) for arch in dict.fromkeys(arch for arch, _ in CASES)}


Alone = dict[str, tuple[list[list[int]], list[float]]]


@pytest.mark.parametrize(("arch", "size"), CASES)
def test_ranks_generate_what_one_generates(arch: str, size: int, folders: dict[str, Path], alone: Alone) -> None:
    tokens, logprobs = generate(folders[arch], size)
    assert tokens == alone[arch][0]
    torch.testing.assert_close(logprobs, alone[arch][1], rtol=1e-4, atol=1e-4)


PIECES: dict[str, Any] = {"cuda_graph_mode": "PIECEWISE", "piecewise_cuda_graph_tokens": [64]}


@pytest.mark.parametrize(
    ("arch", "settings"),
    [
        (HYBRID, {"enable_expert_parallel": True}),
        (HYBRID, PIECES | {"splitting_ops": ["attention"]}),
        pytest.param("Qwen3ForCausalLM", PIECES | {"piecewise_cuda_graph_compiler": "eager"}, marks=takes_long),
        (HYBRID, CRAMPED | {"enable_prefix_caching": False, "num_state_slots": 4}),
    ],
    ids=["experts", "all-reduce-inside", "traced", "preempted"],
)
def test_every_way_a_step_can_run(arch: str, settings: dict[str, Any], folders: dict[str, Path], alone: Alone) -> None:
    """Graph modes with all paths of the cache are in ``tests/test_x_matrix.py``."""
    tokens, _ = generate(folders[arch], 2, **settings)
    assert tokens == alone[arch][0]


def forced(folder: Path, size: int, dtype: str, **settings: Any) -> torch.Tensor:
    """Log probabilities of prompts and of given tokens after them: no rounding leads to other tokens."""
    params = SamplingParams(max_tokens=3, allowed_token_ids=[7], prompt_logprobs=0, logprobs=0, ignore_eos=True)
    settings = {"max_num_seqs": 4, "num_kv_pages": 60, "num_state_slots": 9} | settings
    with LLM(str(folder), skip_tokenizer_init=True, tensor_parallel_size=size, dtype=dtype, **settings) as llm:
        outputs = llm.generate(prompts()[:3], params, use_tqdm=False)
    places = [place for o in outputs for place in [*(o.prompt_logprobs or ()), *(o.outputs[0].logprobs or ())] if place]
    return torch.tensor([next(iter(place.values())).logprob for place in places])


@pytest.fixture(scope="module")
def exact(folders: dict[str, Path]) -> tuple[torch.Tensor, float]:
    """Log probabilities of one rank in float32, and the distance of one rank in bfloat16 from them."""
    want = forced(folders[HYBRID], 1, "float32")
    return want, (forced(folders[HYBRID], 1, "bfloat16") - want).norm().item()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(PIECES, marks=takes_long),
        {"cuda_graph_mode": "FULL", "cuda_graph_bs": [4], "piecewise_cuda_graph_max_tokens": 64},
    ],
    ids=["pieces", "full"],
)
def test_two_ranks_in_bfloat16_are_as_exact_as_one(
    settings: dict[str, Any], folders: dict[str, Path], exact: tuple[torch.Tensor, float]
) -> None:
    want, error_of_one = exact
    error = (forced(folders[HYBRID], 2, "bfloat16", **settings) - want).norm().item()
    assert 0 < error < 1.5 * error_of_one, f"{error} of two ranks, {error_of_one} of one"


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "settings", "message"),
    [
        (HYBRID, {"tensor_parallel_size": 3}, "num_key_value_heads=2 cannot be replicated evenly over .*size=3"),
        (HYBRID, {"tensor_parallel_size": 5}, "num_attention_heads=12 is not divisible by tensor_parallel_size=5"),
        (HYBRID, {"tensor_parallel_size": 6}, "linear_num_key_heads=4 is not divisible by tensor_parallel_size=6"),
        ("Qwen3MoeForCausalLM", {"tensor_parallel_size": 12, "enable_expert_parallel": True}, "num_experts=8 is not"),
        ("Qwen3ForCausalLM", {"tensor_parallel_size": 6}, "intermediate_size=56 is not divisible"),
        ("Qwen3ForCausalLM", {"tensor_parallel_size": 2, "enable_expert_parallel": True}, "which has no experts"),
        (HYBRID, {"enable_expert_parallel": True}, "has no effect with tensor_parallel_size=1"),
        (HYBRID, {"tensor_parallel_size": 2, "distributed_executor_backend": "uni"}, "runs one rank.*use mp"),
        (HYBRID, {"distributed_executor_backend": "mp"}, "has no effect with tensor_parallel_size=1"),
    ],
)
def test_refusals_name_numbers(arch: str, settings: dict[str, Any], message: str, folders: dict[str, Path]) -> None:
    from weft.config import resolve

    with pytest.raises(ConfigError, match=message):
        resolve(model=str(folders[arch]), **settings)


def test_the_vocabulary_is_padded_and_says_so(folders: dict[str, Path]) -> None:
    from weft.config import resolve

    config = resolve(model=str(folders[HYBRID]), tensor_parallel_size=4)
    assert "211 is padded to 212, 53 tokens a rank" in config.reasons["tensor_parallel_size"]
    assert "by width" in config.reasons["enable_expert_parallel"]
    given = resolve(model=str(folders[HYBRID]), tensor_parallel_size=4, enable_expert_parallel=False)
    assert "enable_expert_parallel" not in given.reasons
    assert config.distributed_executor_backend == "mp"


def test_ranks_load_their_libraries_meanwhile_and_end_with_a_refusal(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from weft.engine import llm

    resolve, counts = llm.resolve, []

    def counting(**given: Any) -> Any:
        counts.append(len(living_ranks()))
        return resolve(**given)

    monkeypatch.setattr(llm, "resolve", counting)
    with pytest.raises(ConfigError, match="size=3"):
        LLM(str(folders[HYBRID]), skip_tokenizer_init=True, tensor_parallel_size=3)
    assert counts == [2] and not living_ranks()


@pytest.fixture
def eight_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("eight_threads")
def test_a_rank_that_cannot_start_says_why(folders: dict[str, Path], tmp_path: Path) -> None:
    """The weights are gone when the ranks look for them."""
    (tmp_path / "config.json").write_bytes((folders[HYBRID] / "config.json").read_bytes())
    with pytest.raises((WeightsError, EngineDeadError), match=r"no \*.safetensors"):
        LLM(str(tmp_path), skip_tokenizer_init=True, tensor_parallel_size=2)
    assert not living_ranks() and torch.get_num_threads() == 8


# -- a rank goes -------------------------------------------------------------------------------------------------------


def living_ranks() -> list[int]:
    """Process ids of ranks that were forked and have not ended."""
    from multiprocessing import active_children

    return [child.pid for child in active_children() if child.pid is not None]


def ranks_of(core: EngineCore) -> list[int]:
    executor = core._executor
    assert isinstance(executor, MultiProcessExecutor)
    return [rank.pid for rank in executor._workers.ranks]


KILLED = r"rank 1 of the model \(process \d+\) was killed by SIGKILL; it printed nothing"
SILENT = r"rank 1 of the model \(process \d+\) has given no sign of life for \d s"


@pytest.mark.parametrize(
    ("number", "message", "idle"),
    [(signal.SIGKILL, KILLED, False), (signal.SIGKILL, KILLED, True), (signal.SIGSTOP, SILENT, False)],
    ids=["killed", "killed-while-idle", "stopped"],
)
def test_a_rank_that_dies_or_hangs(number: int, message: str, idle: bool, folders: dict[str, Path]) -> None:
    """It is noticed and named, every request gets an error, no process is left, and the engine says that it is dead."""
    llm = LLM(str(folders[HYBRID]), skip_tokenizer_init=True, tensor_parallel_size=2, num_kv_pages=100, max_num_seqs=2)
    (pid,) = ranks_of(llm._core)
    params = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
    ids = [llm.add_request([1, 2, 3], params) for _ in range(4)]  # two of them wait
    for _ in range(3):
        llm.step()
    os.kill(pid, number)
    began = time.monotonic()
    if idle:
        time.sleep(0.5)
    with pytest.raises(EngineDeadError, match=message):
        while True:
            llm.step()
    assert time.monotonic() - began < stretched(10)
    ended = {}
    while not llm.is_finished():
        ended |= {o.request_id: o.outputs[0].finish_reason for o in llm.step()}
    assert ended == dict.fromkeys(ids, "error")
    with pytest.raises(EngineDeadError, match="rank 1"):
        llm.add_request([1], params)
    llm.shutdown()
    assert not living_ranks()


def test_steps_in_flight_end_before_the_ranks(folders: dict[str, Path]) -> None:
    """They write results into memory that rank 0 gives up."""

    class Event:
        asked = 0

        def query(self) -> bool:
            self.asked += 1
            return self.asked == 3

    executor = MultiProcessExecutor(resolve(model=str(folders[HYBRID]), tensor_parallel_size=2, device="cpu"))
    executor.launch(step([(0, 1)], 1))
    executor._pending[-1].block.done = event = Event()  # type: ignore[assignment]
    executor.stop()
    assert event.asked == 3 and not living_ranks()


@pytest.mark.usefixtures("eight_threads")
def test_shutdown_ends_the_ranks(folders: dict[str, Path]) -> None:
    with LLM(str(folders[HYBRID]), skip_tokenizer_init=True, tensor_parallel_size=4) as llm:
        assert len(ranks_of(llm._core)) == len(living_ranks()) == 3
        assert {f"rank {r} weights" for r in (1, 2, 3)} <= set(llm.startup)
        assert torch.get_num_threads() == 2, "the ranks share this process's"
    assert not living_ranks() and torch.get_num_threads() == 8
