"""The plan's bytes are the tensors' bytes; a step that does not fit is made smaller."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import specs
from tests.ranks import CONTEXT
from tests.tiny import make_checkpoint
from tests.whole import takes_long
from weft import LLM, SamplingParams
from weft.cache.plan import CachePlan, plan_caches
from weft.cache.spec import CacheSpec
from weft.config import resolve
from weft.config.gated_delta_net import GatedDeltaNetConfig
from weft.config.layer_spec import CacheDtypes
from weft.config.model import ModelConfig
from weft.errors import CapacityError
from weft.executor.rank import Rank
from weft.forward_context import cache_tensors
from weft.layers.context import ModelContext
from weft.models.registry import create_model
from weft.ops.backend import Backend
from weft.parallel.tensor_parallel import SingleRank
from weft.runner import memory_plan
from weft.runner.memory import allocate_caches, largest_that_fits
from weft.runner.model_runner import ModelRunner
from weft.runner.warmup import StepLimits

MIB = 2**20
GUARD_S = 120.0


def make_spec(hybrid: bool = True, state_dtype: str = "float32") -> CacheSpec:
    return specs.make_spec(
        page_size=16,
        attention=2,
        linear=3 if hybrid else 0,
        kv_heads=2,
        head_dim=64,
        geometry=GatedDeltaNetConfig(2, 4, 16, 32, 4),
        dtypes=CacheDtypes("bfloat16", "bfloat16", state_dtype),
    )


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_planned_bytes_are_the_tensors_bytes(hybrid: bool, state_dtype: str) -> None:
    spec = make_spec(hybrid, state_dtype)
    plan = plan_caches(spec, budget_bytes=8 * MIB, max_num_seqs=8, max_model_len=512)
    caches = allocate_caches(spec, plan, torch.device("cpu"))
    assert sum(tensor.nbytes for tensor in cache_tensors(caches).values()) == plan.cache_bytes <= 8 * MIB


def test_caches_have_the_dtypes_of_the_settings() -> None:
    settings: dict[str, Any] = {"device": "cpu", "load_format": "dummy", "max_num_seqs": 1, "max_model_len": 16}
    runner = ModelRunner(resolve(**settings, kv_cache_dtype="fp8", mamba_ssm_dtype="bfloat16"))
    found = {(name, tensor.dtype) for cache in runner.caches.values() for name, tensor in cache.items()}
    states = {("recurrent", torch.bfloat16), ("conv", torch.float32)}
    assert found == states | {("k", torch.float8_e4m3fn), ("v", torch.float8_e4m3fn)}


def test_ever_smaller_steps_are_tried() -> None:
    tried: list[tuple[int, int]] = []

    def attempt(limits: StepLimits) -> str:
        tried.append((limits.max_num_batched_tokens, limits.max_num_seqs))
        if limits.max_num_batched_tokens * limits.max_num_seqs > wanted:
            raise torch.OutOfMemoryError("too much. Much more")
        return "fits"

    wanted = 300 * 16
    found = largest_that_fits(StepLimits(1024, 64, 99), attempt, (torch.OutOfMemoryError,))
    assert found == (StepLimits(256, 16, 99), "fits")
    assert tried == [(1024, 64), (512, 64), (256, 64), (256, 32), (256, 16)]
    wanted = 0
    with pytest.raises(torch.OutOfMemoryError):
        largest_that_fits(StepLimits(300, 2, 99), attempt, (torch.OutOfMemoryError,))
    with pytest.raises(CapacityError):
        largest_that_fits(StepLimits(300, 2, 99), lambda limits: _raise(CapacityError("no")), ())


def _raise(error: Exception) -> str:
    raise error


@pytest.mark.parametrize(
    ("arch", "expands"),
    [("KimiLinearForCausalLM", True), ("Qwen3NextForCausalLM", False), ("Glm5NextForConditionalGeneration", False)],
)
def test_a_step_has_memory_for_expanded_latents(
    arch: str, expands: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measured steps have no context, so that memory is added; on devices with that kernel."""
    config = resolve(model=str(make_checkpoint(arch, tmp_path)), skip_tokenizer_init=True)
    runner = ModelRunner(config)
    asked: list[Backend] = []

    def expansion_bytes(device: torch.device, *, backend: Backend) -> int:
        asked.append(backend)
        return 5 * MIB

    monkeypatch.setattr(memory_plan, "peak_bytes", lambda run, device: MIB)
    monkeypatch.setattr(memory_plan, "expansion_bytes", expansion_bytes)
    assert memory_plan._measure_step_bytes(runner) == MIB + expands * 5 * MIB
    assert asked == [Backend.TORCH] * expands


def test_a_start_with_too_large_a_step_clamps_it_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The device is full at more than 600 tokens; the engine starts with 512, and no step is larger."""
    budget = memory_plan.cache_budget

    def short(runner: ModelRunner) -> int:
        if runner.config.max_num_batched_tokens > 600:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return budget(runner)

    monkeypatch.setattr(memory_plan, "cache_budget", short)
    folder = make_checkpoint("Qwen3NextForCausalLM", tmp_path)
    settings = {"max_num_batched_tokens": 2048, "cuda_graph_mode": "FULL", "skip_tokenizer_init": True}
    with LLM(str(folder), **settings) as llm:
        assert llm._core.plan.max_num_batched_tokens == llm._core.scheduler.max_num_batched_tokens == 512
        assert "does not fit" in llm._core.plan.reasons["max_num_batched_tokens"]
        runner = llm._core._executor._runner  # type: ignore[attr-defined]
        assert runner.graphs.forward.sizes[-1] <= 512
        prompts = [[3 + i % 90 for i in range(n)] for n in (400, 300, 200)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), use_tqdm=False)
        assert [len(o.outputs[0].token_ids) for o in outputs] == [2, 2, 2]
        assert llm.stats().num_steps >= 3
    assert "max_num_batched_tokens=2048" in caplog.text and "trying 1024" in caplog.text


def test_a_start_with_too_many_requests_runs_fewer_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is full with more than 4; of 6 that come together 2 wait."""
    budget = memory_plan.cache_budget

    def short(runner: ModelRunner) -> int:
        if runner.config.max_num_seqs > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return budget(runner)

    monkeypatch.setattr(memory_plan, "cache_budget", short)
    folder = make_checkpoint("Qwen3ForCausalLM", tmp_path)
    with LLM(str(folder), max_num_batched_tokens=256, max_num_seqs=16, skip_tokenizer_init=True) as llm:
        assert llm._core.plan.max_num_seqs == 4
        assert "clamped to 4: a step of 16" in llm._core.plan.reasons["max_num_seqs"]
        for i in range(6):
            llm.add_request([3 + i], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        most = 0
        while not llm.is_finished():
            llm.step()
            most = max(most, llm.stats().num_running)
        assert most == 4


def test_pools_are_what_the_settings_ask_for(tmp_path: Path) -> None:
    folder = make_checkpoint("Qwen3NextForCausalLM", tmp_path)

    def plan_of(**settings: Any) -> CachePlan:
        settings = {"max_num_seqs": 4, "max_model_len": 64, "skip_tokenizer_init": True} | settings
        return ModelRunner(resolve(model=str(folder), **settings)).plan

    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    without = {"enable_prefix_caching": False}
    assert plan_of(**without).num_slots == 1 + 4
    assert plan_of(**without, speculative_config=drafts).num_slots == 1 + 4 * (1 + 2)
    assert plan_of().num_slots > 1 + 4 and plan_of().num_pages > plan_of(**without).num_pages
    given = plan_of(num_state_slots=7, num_kv_pages=9)
    assert (given.num_slots, given.num_pages) == (7, 9)


@pytest.mark.parametrize("is_on", [False, True])
def test_what_layers_are_told(is_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the settings of several ranks."""
    told: list[ModelContext] = []

    def noted(config: ModelConfig, context: ModelContext) -> Any:
        told.append(context)
        return create_model(config, context)

    monkeypatch.setattr("weft.runner.model_runner.create_model", noted)
    config = resolve(model=str(make_checkpoint("Qwen3NextForCausalLM", tmp_path)), skip_tokenizer_init=True)
    ModelRunner(replace(config, enable_expert_parallel=is_on, disable_custom_all_reduce=not is_on))
    assert [(c.expert_parallel, c.custom_all_reduce) for c in told] == [(is_on, is_on)]


def test_dummy_weights_follow_the_seed(tmp_path: Path) -> None:
    """Nothing but the config is looked at."""
    config = (make_checkpoint("Qwen3NextForCausalLM", tmp_path / "whole") / "config.json").read_bytes()
    (tmp_path / "config.json").write_bytes(config)

    def weights(seed: int) -> torch.Tensor:
        given = {"load_format": "dummy", "skip_tokenizer_init": True, "seed": seed}
        return ModelRunner(resolve(model=str(tmp_path), **given)).model.model.embed_tokens.weight

    assert torch.equal(weights(7), weights(7)) and not torch.equal(weights(7), weights(8))


def test_the_plan_is_that_of_the_rank_with_the_least_memory(tmp_path: Path) -> None:
    class Poor(SingleRank):
        def least(self, value: int) -> int:
            return min(value, 3 * MIB)  # another rank has no more

    folder = make_checkpoint("Qwen3NextForCausalLM", tmp_path)
    config = resolve(model=str(folder), skip_tokenizer_init=True)
    alone, together = ModelRunner(config).plan, ModelRunner(config, tp=Poor()).plan
    assert together.cache_bytes <= 3 * MIB < alone.cache_bytes
    assert together.num_pages < alone.num_pages


def _rank_of_two(rank: int, folder: str, store: str, tell: Any) -> None:
    """Rank 1 has room for steps of 600 tokens; rank 0 finds that out in the middle of its own step."""

    def short(runner: ModelRunner) -> int:
        if rank == 1 and runner.config.max_num_batched_tokens > 600:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        if rank == 0:
            memory_plan.run_largest_steps(runner)
        return 3 * MIB

    memory_plan.cache_budget = short
    settings = {"max_num_batched_tokens": 2048, "max_num_seqs": 4, "max_model_len": 64, "tensor_parallel_size": 2}
    config = resolve(model=folder, skip_tokenizer_init=True, device="cpu", **settings)
    with Rank(config, rank, 2, dist.FileStore(store, 2)) as made:
        tell.send((made.runner.plan.max_num_batched_tokens, made.runner.plan.num_pages, made.runner.plan.reasons))


@takes_long
def test_all_ranks_try_the_next_smaller_step(tmp_path: Path) -> None:
    """Rank 1 is short of memory while rank 0 computes. Neither rank waits for ever, and both make the same plan."""
    folder, store = make_checkpoint("Qwen3NextForCausalLM", tmp_path / "model"), tmp_path / "store"
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(2)]
    ranks = [
        CONTEXT.Process(target=_rank_of_two, args=(rank, str(folder), str(store), pipes[rank][1])) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        assert all(receive.poll(GUARD_S) for receive, _ in pipes), "a rank waits for another one"
        plans = [receive.recv() for receive, _ in pipes]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert plans[0] == plans[1] and plans[0][0] == 512
    assert "clamped to 512: a step of 2048 does not fit" in plans[0][2]["max_num_batched_tokens"]
