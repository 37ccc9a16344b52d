"""The whole engine on a GPU: the CPU's answers on every path, a host that never waits, no compilation while serving."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.conftest import assert_idle
from tests.engine.test_greedy import TEXT_MODELS, is_greedy, reference_of
from tests.gpu.conftest import compiled_kernels
from tests.tiny import make_checkpoint
from weft import LLM, SamplingParams
from weft.assets import EVAL_PATH
from weft.bench.evaluation import read_problems
from weft.forward_context import cache_tensors
from weft.messages import SchedulerOutput
from weft.outputs import RequestOutput
from weft.runner import memory_plan
from weft.runner.memory import GRAPH_BYTES, allocate_caches, gpu_cache_budget
from weft.runner.model_runner import ModelRunner

pytestmark = pytest.mark.gpu

LENGTHS = (1, 63, 64, 65, 130, 210)
SMALL: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_num_seqs": 8, "max_model_len": 512}
CHATS = [
    [{"role": "user", "content": question}]
    for question in ("What is 12 + 30?", "What is 745 - 286?", "What is 47 * 6?", "Tom has 3 apples and buys 12 more.")
]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def runner_of(llm: LLM) -> ModelRunner:
    return llm._core._executor._runner


def random_prompt(rng: random.Random, length: int, vocab_size: int = 2000) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(length)]


def mixed_workload(count: int, seed: int, **only: Any) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of awkward lengths; each request samples in its own way."""
    rng = random.Random(seed)
    prompts = [random_prompt(rng, rng.choice(LENGTHS)) for _ in range(count)]
    params = [
        SamplingParams(
            max_tokens=rng.randint(2, 40),
            ignore_eos=True,
            seed=i,
            **{
                "temperature": rng.choice([0.0, 1.0]),
                "top_p": rng.choice([1.0, 0.8]),
                "top_k": rng.choice([0, 20]),
                "min_p": rng.choice([0.0, 0.05]),
                "presence_penalty": rng.choice([0.0, 0.5]),
                "logprobs": rng.choice([None, 2]),
            }
            | only,
        )
        for i in range(count)
    ]
    return prompts, params


# -- the start -------------------------------------------------------------------------------------------------------

CAPTURES_ALONE = """
import sys
import triton
from weft import LLM
from weft.runner import model_runner
from tests.gpu.conftest import compiled_kernels

capture, met = model_runner.capture_graphs, []

def watched(*args):
    triton.knobs.runtime.kernel_load_start_hook = lambda module, function, name, *rest: met.append(name)
    try:
        with compiled_kernels() as compiled:
            return capture(*args)
    finally:
        triton.knobs.runtime.kernel_load_start_hook = None
        met.extend(compiled)

model_runner.capture_graphs = watched
sizes = {"max_num_seqs": 72, "max_model_len": 512, "num_kv_pages": 2400, "num_state_slots": 100}
with LLM(sys.argv[1], device="cuda", cuda_graph_mode="FULL", skip_tokenizer_init=True, **sizes) as llm:
    assert llm._core._executor._runner.graphs.forward.counters.captures > 10
assert not met, met
"""


@pytest.mark.parametrize("arch", ["Qwen3NextForCausalLM", "Qwen3MoeForCausalLM"])
def test_captures_meet_no_kernel_for_the_first_time(arch: str, tmp_path: Path) -> None:
    """Neither compile nor load one: most sizes are captured without a run before."""
    folder = make_checkpoint(arch, tmp_path)
    done = subprocess.run([sys.executable, "-c", CAPTURES_ALONE, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


# -- the same answers ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cpu_answers() -> list[list[int]]:
    with LLM(device="cpu") as llm:
        return tokens(llm.chat(CHATS, SamplingParams(temperature=0.0, max_tokens=64), use_tqdm=False))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("mode", ["NONE", "FULL_DECODE_ONLY"])
def test_bundled_model_answers_as_on_the_cpu(cpu_answers: list[list[int]], backend: str, mode: str) -> None:
    if backend == "torch" and mode != "NONE":
        pytest.skip("torch's operations read sizes on the host and cannot be captured")
    with LLM(**SMALL, backend=backend, cuda_graph_mode=mode) as llm:
        assert tokens(llm.chat(CHATS, SamplingParams(temperature=0.0, max_tokens=64), use_tqdm=False)) == cpu_answers
        assert_idle(llm)


@pytest.fixture(scope="module")
def eager_answers() -> list[list[int]]:
    with LLM(**SMALL, cuda_graph_mode="NONE", enable_overlap=False) as llm:
        return tokens(llm.generate(*mixed_workload(24, 5), use_tqdm=False))


MODES = ["NONE", "FULL_DECODE_ONLY", "FULL", "FULL_AND_PIECEWISE"]


@pytest.mark.parametrize("pages", [None, 90])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_graphs_overlap_and_preemption_do_not_change_the_answers(
    eager_answers: list[list[int]], mode: str, overlap: bool, pages: int | None
) -> None:
    settings = SMALL | {"page_size": 4} if pages is not None else SMALL
    with LLM(**settings, cuda_graph_mode=mode, enable_overlap=overlap, num_kv_pages=pages) as llm:
        assert tokens(llm.generate(*mixed_workload(24, 5), use_tqdm=False)) == eager_answers
        assert (llm.stats().num_preemptions > 0) == (pages is not None)
        graphs = runner_of(llm).graphs.decode
        assert (graphs is None) == (mode == "NONE")
        assert graphs is None or graphs.counters.replays > 20
        mixed = runner_of(llm).graphs.forward
        assert (mixed is not None) == (mode == "FULL")
        assert mixed is None or mixed.counters.replays > 5
        pieces = runner_of(llm).graphs.pieces
        assert (pieces is not None) == (mode == "FULL_AND_PIECEWISE")
        assert pieces is None or pieces.counters.replays > 5
        assert_idle(llm)


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("arch", TEXT_MODELS)
def test_every_architecture_is_greedy_as_transformers(arch: str, mode: str, tmp_path: Path) -> None:
    """Through scheduler, graphs and overlap; some prompts run in chunks and beside decodes."""
    folder, reference = make_checkpoint(arch, tmp_path, with_tokenizer=True), reference_of(arch)
    rng = random.Random(7)
    prompts = [random_prompt(rng, n, 300) for n in LENGTHS * 2]
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    settings = SMALL | {"max_num_seqs": 5, "max_num_batched_tokens": 100, "cuda_graph_mode": mode}
    with LLM(str(folder), **settings, cuda_graph_bs=[1, 2, 4]) as llm:
        got = tokens(llm.generate(prompts, greedy, use_tqdm=False))
        assert_idle(llm)
    for prompt, answer in zip(prompts, got, strict=True):
        assert len(answer) == 24 and is_greedy(reference, prompt, answer)


def test_bfloat16_answers_the_word_problems() -> None:
    """The model's own precision with every kernel: as many right answers as D6 asks of the whole set."""
    from weft.bench.evaluation import ask, score

    with LLM(device="cuda", max_num_seqs=64) as llm:
        assert score(ask(llm, read_problems(EVAL_PATH)))["accuracy"] > 0.93


# -- the host never waits --------------------------------------------------------------------------------------------


@contextmanager
def no_waiting() -> Iterator[None]:
    """Every operation that would make the host wait for the device raises (reading an event is not one of them)."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def decode_steps(llm: LLM, params: SamplingParams, batch: int, steps: int) -> Iterator[SchedulerOutput]:
    """Orders of steps in which ``batch`` requests decode; the caller launches each and takes in its results."""
    rng = random.Random(batch)
    for _ in range(batch):
        llm.add_request(random_prompt(rng, 20), params)
    core, found = llm._core, 0
    while found < steps:
        step = core.scheduler.schedule()
        assert step is not None, "the requests ended too early"
        if all(request.num_tokens == 1 for request in step.requests) and len(step.requests) == batch:
            found += 1
            yield step
        else:
            core._executor.launch(step)
            core.scheduler.update(core._executor.result())


SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "filters": {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
    "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.2},
    "masks": {"logit_bias": {7: 2.0}, "allowed_token_ids": list(range(3, 900)), "min_tokens": 30},
    "bad_words": {"bad_words": ["the answer", "is"]},
}


@pytest.mark.parametrize("mode", ["NONE", None])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_decode_step_never_waits_for_the_device(mode: str | None, sampler: str) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True, **SAMPLERS[sampler])
    with LLM(**SMALL, cuda_graph_mode=mode, graph_profile="none", enable_overlap=False) as llm:
        assert llm.config.cuda_graph_mode == mode or (mode is None and llm.config.cuda_graph_mode == "FULL")
        for number, step in enumerate(decode_steps(llm, params, batch=5, steps=20)):
            if number < 2:  # the first ones compile kernels and make workspaces
                llm._core._executor.launch(step)
            else:
                with no_waiting():
                    llm._core._executor.launch(step)
            llm._core.scheduler.update(llm._core._executor.result())
        graphs = runner_of(llm).graphs.decode
        assert graphs is None or graphs.counters.replays == 20


def test_a_waiting_operation_would_be_noticed() -> None:
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="synchroniz"), no_waiting():
        x.sum().item()


def test_steps_are_queued_behind_each_other() -> None:
    """Ten steps can be launched before the first one's tokens are read, and give the tokens of one at a time."""
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    rng = random.Random(3)
    prompts = [random_prompt(rng, n) for n in (5, 70, 33)]
    with LLM(**SMALL, enable_overlap=False) as llm:
        want = tokens(llm.generate(prompts, params, use_tqdm=False))
        core = llm._core
        for prompt in prompts:
            llm.add_request(prompt, params)
        num_in_flight = 0
        while llm._core.scheduler.has_work:
            step = core.scheduler.schedule()
            if step is not None:
                core._executor.launch(step)
                num_in_flight += 1
            if step is None or num_in_flight == 10:
                core.scheduler.update(core._executor.result())
                num_in_flight -= 1
        # a failed or dropped token would have shown as a different length
        got = [stream.requests[0].output_token_ids for stream in llm._streams.values()]
        assert got == want


# -- nothing is compiled while serving -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("arch", [None, "Qwen3NextForCausalLM", "LlamaForCausalLM"])
def test_no_kernel_is_compiled_after_the_start(arch: str | None, mode: str, tmp_path: Path) -> None:
    """Warm-up covers what a mixed workload launches: single requests, chunks, mixed batches, every sampler."""
    folder = None if arch is None else str(make_checkpoint(arch, tmp_path, with_tokenizer=True))
    settings = SMALL | {"max_num_seqs": 21, "max_num_batched_tokens": 700}
    with LLM(folder, **settings, cuda_graph_mode=mode) as llm:
        with compiled_kernels() as compiled:
            rng = random.Random(1)
            vocab_size = min(2000, llm.config.model_config.vocab_size)
            for length in (1, 2, 3, 16, 17, 63, 64, 65, 130, 210, 400):
                llm.generate([random_prompt(rng, length, vocab_size)], SamplingParams(max_tokens=3), use_tqdm=False)
            for count in (2, 3, 7, 16, 21, 45):
                prompts, params = mixed_workload(count, count)
                prompts = [[token % vocab_size for token in prompt] for prompt in prompts]
                llm.generate(prompts, params, use_tqdm=False)
        assert compiled == []


# -- memory ----------------------------------------------------------------------------------------------------------


def requested_bytes() -> int:
    """Bytes that tensors asked for, without what the allocator rounds them up to."""
    torch.cuda.synchronize()
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


@pytest.mark.parametrize("arch", [None, "Qwen3ForCausalLM"])
def test_planned_bytes_are_allocated_bytes(arch: str | None, tmp_path: Path) -> None:
    folder = None if arch is None else str(make_checkpoint(arch, tmp_path, with_tokenizer=True))
    with LLM(folder, **SMALL) as llm:
        runner = runner_of(llm)
        plan = runner.plan
        assert sum(tensor.nbytes for tensor in cache_tensors(runner.caches).values()) == plan.cache_bytes
        before = requested_bytes()
        again = allocate_caches(runner.spec, plan, runner.device)
        assert requested_bytes() - before == plan.cache_bytes and again


def test_the_share_of_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that takes all it may: what the process holds afterwards stays within ``gpu_memory_utilization``."""
    monkeypatch.setattr(memory_plan, "gpu_cache_budget", gpu_cache_budget)  # which other tests here limit
    free, total = torch.cuda.mem_get_info()
    used_by_others = total - free
    with LLM(device="cuda", gpu_memory_utilization=0.5, max_num_seqs=256, max_model_len=4096) as llm:
        plan = llm._core.plan
        prompts, params = mixed_workload(300, 2)
        llm.generate(prompts, params, use_tqdm=False)
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        assert total - free - used_by_others <= 0.5 * total
        assert plan.num_pages > 1 and plan.num_slots > plan.max_num_seqs
        graphs = runner_of(llm).graphs.decode
        assert graphs is not None and graphs.counters.capture_bytes <= GRAPH_BYTES + (256 << 20)


def test_too_little_memory_is_refused_with_the_remedy() -> None:
    from weft.errors import CapacityError

    with pytest.raises(CapacityError, match="gpu_memory_utilization"):
        LLM(device="cuda", gpu_memory_utilization=0.001)


def test_an_engine_gives_its_memory_back() -> None:
    import gc

    def run() -> int:
        with LLM(**SMALL) as llm:
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    first = run()
    assert run() <= first + (1 << 20)
