"""The machinery of ``tests/test_x_matrix.py``: engines with poisoned memory, paths, phases, and the check of tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import AutoModelForCausalLM

from tests.drafters import ByModel, install
from tests.late_device import LateDevice
from tests.offload.always import AlwaysRestore
from tests.speculation.conftest import make_repeating_checkpoint
from tests.tiny import make_model
from tests.unread import Unread
from tests.whole import RUNS_LONG, WHOLE
from weft import LLM, SamplingParams
from weft.executor.multi_process import MultiProcessExecutor
from weft.messages import SchedulerOutput
from weft.ops.fp8 import E4M3
from weft.request import Request, RequestStatus
from weft.runner.model_runner import ModelRunner

ARCHITECTURES = ["Qwen3NextForCausalLM", "Qwen3ForCausalLM"]
MODES = ["NONE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "FULL"]
OVERLAP = ["in turn", "overlap"]
WITH_HEAD = "with a head"
"""Stands for a Qwen3-Next whose own head drafts, and is often right."""
WITH_CHAIN = "with a chained head"
"""Stands for an Inkling whose head does."""
PATHS = ["cold", "hit", "branch hit", "preempted"]
PHASES = ["prefill", "mixed", "decode"]
ALL_LENGTHS = [1, 63, 64, 65, 129, 210, 1000]

PAGE_SIZE = 4
BUDGET = 512
"""Tokens per step: the longest prompt runs in two chunks."""
CAPTURED = [2**n for n in range(10)]
"""Tokens of captured steps where long tests do not run: the fewest that hold every step, since a step is padded to at
most twice its tokens. A start captures 25 sizes by default, which takes most of its time."""
CASE_PAGES = 320
"""More pages than a case uses for its longest prompt, a prompt that shares two thirds of it, and companions."""
NUM_TOKENS = 5
COMPANION_TOKENS = 10

COMPANIONS = [[7, 90, 31], [5] * 18]


def part(*lengths: int) -> list[int]:
    """These lengths, or all of them if the whole matrix runs."""
    return ALL_LENGTHS if WHOLE else list(lengths)


class Reference:
    """Greedy tokens of a transformers model; ``folder`` holds its checkpoint. A pass says what follows each of its
    prefixes, and no pass runs twice."""

    def __init__(self, model: Any, folder: Path) -> None:
        self.folder = folder
        self._model = model
        self._next: dict[tuple[int, ...], int] = {}

    def __call__(self, prompt: list[int], count: int) -> list[int]:
        output: list[int] = []
        while len(output) < count:
            output += self._after(prompt, output)[-1:]
        return output

    def check(self, prompt: list[int], output: list[int]) -> None:
        assert output == self._after(prompt, output[:-1])[: len(output)]

    def _after(self, prompt: list[int], output: list[int]) -> list[int]:
        """The tokens that follow the prompt and each of the tokens after it."""
        tokens = [*prompt, *output]
        prefixes = [tuple(tokens[:end]) for end in range(len(prompt), len(tokens) + 1)]
        if not all(prefix in self._next for prefix in prefixes):
            best = self._logits(prompt, output)[len(prompt) - 1 :].argmax(-1).tolist()
            self._next.update(zip(prefixes, best, strict=True))
        return [self._next[prefix] for prefix in prefixes]

    def _logits(self, prompt: list[int], output: list[int]) -> torch.Tensor:
        """``[len(prompt) + len(output), vocab_size]``"""
        with torch.no_grad():
            return self._model(input_ids=torch.tensor([[*prompt, *output]]), use_cache=False).logits[0]


def fill_with_nan(cache: torch.Tensor, places: torch.Tensor) -> None:
    if cache.dtype is E4M3:  # torch cannot fill it
        cache.view(torch.uint8).index_fill_(0, places, 0x7F)
    else:
        cache.index_fill_(0, places, float("nan"))


@dataclass
class Poisoned:
    """An engine whose free memory is NaN whenever a step starts; ``steps``: scheduler outputs since the last case."""

    llm: LLM
    reference: Reference
    is_late: bool = False
    steps: list[SchedulerOutput] = field(default_factory=list)
    hog: list[int] = field(default_factory=list)
    num_cases: int = 0
    policy: str = "exact"
    may_miss_graphs: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.unread = Unread(self.llm)
        if self.llm._core.scheduler.restores is not None:
            self.llm._core.scheduler.restores.tier.costs = AlwaysRestore()
        if self.is_late:
            LateDevice(self.llm, before=self.poison)
        executor = self.llm._core._executor
        launch = executor.launch

        def poisoned(step: SchedulerOutput, *processors: Any) -> Any:
            if not self.is_late:
                self.poison(step)
            self.steps.append(step)
            return launch(step, *processors)

        executor.launch = poisoned  # type: ignore[method-assign]

    def prompt_of(self, length: int) -> list[int]:
        return prompt_of(length)

    @torch.inference_mode()
    def poison(self, step: SchedulerOutput) -> None:
        """Fill memory without an owner with NaN, just before ``step`` runs."""
        manager = self.llm._core.manager
        runner = runner_of(self.llm)
        unread_pages, unread_slots = self.unread.before(step)
        pages = torch.tensor([0, *(set(manager.pages._free) - unread_pages)], device=runner.device)
        slots = torch.tensor([0, *(set(manager.slots._free) - unread_slots)], device=runner.device)
        for name, spec in runner.spec.layers.items():
            for tensors, unowned in ((spec.paged, pages), (spec.states, slots)):
                for tensor in tensors:
                    fill_with_nan(runner.caches[name][tensor.name], unowned)

    def begin(self) -> str:
        """A new case. Returns its salt: nothing that other cases left can be hit."""
        manager = self.llm._core.manager
        for request_id in list(self.llm._streams):
            self.llm.abort(request_id)  # of a case that failed
        while self.llm._core.has_work:
            self.llm._core.step()
        self.give_memory_back()
        self.make_room()
        self.steps.clear()
        self.num_cases += 1
        rng = random.Random(self.num_cases)
        rng.shuffle(manager.pages._free)
        rng.shuffle(manager.slots._free)
        return str(self.num_cases)

    def add(self, prompt: list[int], count: int, salt: str) -> Request:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        request_id = self.llm.add_request({"prompt_token_ids": prompt, "cache_salt": salt}, params)
        return self.llm._streams[request_id].requests[0]

    def finish(self) -> None:
        while not self.llm.is_finished():
            self.llm.step()

    def decode_three(self) -> None:
        """Three sequences decode together, in a graph of four."""
        salt, prompts = self.begin(), [self.prompt_of(length) for length in (3, 5, 9)]
        requests = [self.add(prompt, 4, salt) for prompt in prompts]
        self.finish()
        for prompt, request in zip(prompts, requests, strict=True):
            self.reference.check(prompt, request.output_token_ids)

    def step_until(self, condition: Callable[[], bool], before: Callable[[], None] = lambda: None) -> None:
        for _ in range(20):
            if condition():
                return
            before()
            self.llm.step()
        raise AssertionError("what was waited for did not come about")

    def run(self, prompt: list[int], count: int, salt: str) -> Request:
        request = self.add(prompt, count, salt)
        self.finish()
        return request

    def make_room(self) -> None:
        """Evict enough pages of other cases, so that this case keeps its primed pages whatever ran before."""
        manager = self.llm._core.manager
        assert manager.evictor.make_room(min(CASE_PAGES, manager.pages.num_free + manager.pages.num_evictable))

    def evict_all(self) -> None:
        """Evict everything from the device, down to the tier below."""
        manager = self.llm._core.manager
        assert manager.evictor.make_room(manager.pages.num_free + manager.pages.num_evictable)

    def take_free_memory(self) -> None:
        """Empty the cache and hold every page that no request uses."""
        manager = self.llm._core.manager
        count = manager.pages.num_free + manager.pages.num_evictable
        assert manager.evictor.make_room(count)
        pages = manager.pages.allocate(count)
        assert pages is not None
        self.hog += pages

    def give_memory_back(self) -> None:
        self.llm._core.manager.pages.unpin(self.hog)
        self.llm._core.manager.pages.release(self.hog)
        self.hog = []


def make_reference(arch: str, folder: Path, **overrides: Any) -> Reference:
    if arch in HEADS:
        folder = make_repeating_checkpoint(HEADS[arch], folder, head=True, max_position_embeddings=1100)
        return Reference(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), folder)
    model = make_model(arch, max_position_embeddings=1100, **overrides)
    model.save_pretrained(folder)
    return Reference(model, folder)


HYBRID, DENSE = ARCHITECTURES
HEADS = {WITH_HEAD: HYBRID, WITH_CHAIN: "InklingForCausalLM"}


def drafts_of(arch: str) -> dict[str, Any]:
    """The setting by which a model drafts."""
    return {"method": "mtp" if arch in HEADS else "ngram", "num_speculative_tokens": 3}


def install_drafter(engine: Poisoned, arch: str) -> None:
    if arch not in HEADS:
        install(engine.llm, ByModel(lambda tokens: engine.reference(tokens, 1)[0], random.Random(0)))


def runner_of(llm: LLM) -> ModelRunner:
    executor = llm._core._executor
    return executor._rank.runner if isinstance(executor, MultiProcessExecutor) else executor._runner


@contextmanager
def open_engine(
    arch: str, mode: str, overlap: str, source: str, references: dict[str, Reference],
    kind: type[Poisoned] = Poisoned, **more: Any,
) -> Iterator[Poisoned]:  # fmt: skip
    reference = references[arch]
    settings: dict[str, Any] = {
        "cuda_graph_mode": mode, "enable_overlap": overlap == "overlap", "page_size": PAGE_SIZE,
    }  # fmt: skip
    if mode not in ("NONE", "PIECEWISE"):
        settings["cuda_graph_bs"] = [1, 2, 4]
    if mode not in ("NONE", "FULL_DECODE_ONLY") and not RUNS_LONG:
        settings["piecewise_cuda_graph_tokens"] = CAPTURED
    if source != "capture":
        settings["piecewise_cuda_graph_compiler"] = source
    settings |= more
    with LLM(
        str(reference.folder),
        skip_tokenizer_init=True,
        num_kv_pages=420,
        max_num_seqs=5,
        max_num_batched_tokens=BUDGET,
        **settings,
    ) as llm:
        on_cpu = llm.config.device == "cpu"  # a GPU is late by itself
        is_late = on_cpu and overlap == "overlap" and not isinstance(llm._core._executor, MultiProcessExecutor)
        engine = kind(llm, reference, is_late)
        yield engine
        runner = runner_of(llm)
        graphs, mixed, pieces = runner.graphs.decode, runner.graphs.forward, runner.graphs.pieces
        assert (graphs is not None) == ("cuda_graph_bs" in settings) and (mixed is not None) == (mode == "FULL")
        assert (pieces is not None) == ("PIECEWISE" in mode)
        if graphs is not None and kind is Poisoned and "speculative_config" not in settings:
            engine.decode_three()  # the cases of one of several processes may have no padded decode
            assert graphs.counters.replays and graphs.counters.padding_rows
        if mixed is not None and engine.num_cases:
            assert mixed.counters.replays and mixed.counters.padding_rows
            assert not mixed.counters.missed or engine.may_miss_graphs
        if pieces is not None and engine.num_cases:
            assert pieces.counters.replays


def prompt_of(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(200) for _ in range(length)]


def prime(engine: Poisoned, path: str, prompt: list[int], salt: str) -> int:
    """Bring the cache into the state that ``path`` needs. Returns the tokens that it then holds of ``prompt``."""
    if path == "hit":
        engine.run(prompt, 2, salt)
        return len(prompt) - 1
    if path == "branch hit":
        at = len(prompt) * 2 // 3
        for other in (201, 202):  # the second one leaves the first and so stores the state there
            engine.run([*prompt[:at], other, *prompt[:9]], 2, salt)
        return at
    if path == "restored":
        engine.run(prompt, 2, salt)
        engine.evict_all()
        has_states = engine.llm._core.manager.spec.has_states
        return min(len(prompt) - 1, len(prompt) if has_states else len(prompt) // PAGE_SIZE * PAGE_SIZE)
    return 0


def run_alone(engine: Poisoned, prompt: list[int], salt: str) -> tuple[Request, list[Request]]:
    return engine.run(prompt, 1, salt), []


def run_mixed(engine: Poisoned, prompt: list[int], salt: str) -> tuple[Request, list[Request]]:
    """The prompt arrives while another request decodes."""
    companion = start_companion(engine)
    request = engine.add(prompt, 2, salt)
    engine.finish()
    assert any(len(step.requests) == 2 and step.new_requests for step in engine.steps), "nothing was mixed"
    return request, [companion]


def run_decode(engine: Poisoned, prompt: list[int], salt: str) -> tuple[Request, list[Request]]:
    """Three requests decode together, in a graph of four."""
    waits = engine.llm._core.scheduler.restores is not None  # restores take steps
    count = COMPANION_TOKENS if waits or engine.llm.config.speculative_config else NUM_TOKENS  # drafts leave few steps
    companions = [engine.add(tokens, count, "companions") for tokens in COMPANIONS]
    request = engine.add(prompt, NUM_TOKENS, salt)
    engine.finish()
    decodes = [[r.num_tokens - len(r.draft_token_ids) for r in step.requests] for step in engine.steps]
    assert [1, 1, 1] in decodes, "no three requests decoded together"
    return request, companions


RUNS: dict[str, Callable[[Poisoned, list[int], str], tuple[Request, list[Request]]]] = {
    "prefill": run_alone,
    "mixed": run_mixed,
    "decode": run_decode,
}


def start_companion(engine: Poisoned) -> Request:
    companion = engine.add(COMPANIONS[0], COMPANION_TOKENS, "companions")
    engine.step_until(lambda: bool(companion.output_token_ids))
    return companion


def run_preempted(engine: Poisoned, prompt: list[int], salt: str, phase: str) -> tuple[Request, list[Request]]:
    """Preempt the request for an older one without a page. It resumes alone, with the older one, or with two others."""
    companions = [start_companion(engine)]
    request = engine.add(prompt, NUM_TOKENS, salt)
    engine.step_until(lambda: request.status is not RequestStatus.WAITING)
    engine.step_until(lambda: bool(request.num_preemptions), before=engine.take_free_memory)
    if phase == "prefill":
        (stream,) = (s for s in engine.llm._streams.values() if companions[0] in s.requests)
        engine.llm.abort(stream.request_id)
    elif phase == "decode":
        companions.append(engine.add(COMPANIONS[1], NUM_TOKENS, "companions"))
    engine.give_memory_back()
    engine.finish()
    return request, companions


def check_drafts(engine: Poisoned, path: str, length: int) -> None:
    """Prefill chunks, decodes and drafts share steps; nothing that a rejected draft wrote is ever read."""
    prompt, salt = engine.prompt_of(length), engine.begin()
    num_cached = prime(engine, path, prompt, salt)
    companions = [start_companion(engine), engine.add(COMPANIONS[1], 2 * NUM_TOKENS, "companions")]
    request = engine.add(prompt, 2 * NUM_TOKENS, salt)
    engine.finish()
    assert request.num_cached_tokens == num_cached
    for each in (request, *companions):
        engine.reference.check(each.prompt_token_ids.tolist(), each.output_token_ids)
    engine.llm._core.scheduler.check()


def check(engine: Poisoned, path: str, phase: str, length: int) -> None:
    prompt, salt = engine.prompt_of(length), engine.begin()
    if path == "preempted":
        request, companions = run_preempted(engine, prompt, salt, phase)
        assert request.num_preemptions and request.finish_reason == "length"
    else:
        num_cached = prime(engine, path, prompt, salt)
        engine.steps.clear()
        request, companions = RUNS[phase](engine, prompt, salt)
        if engine.policy == "exact":
            assert request.num_cached_tokens == num_cached
        else:
            assert request.num_cached_tokens <= num_cached
    for each in (request, *companions):
        engine.reference.check(each.prompt_token_ids.tolist(), each.output_token_ids)
        assert each.finish_reason == "length" or (path, phase, each) == ("preempted", "prefill", companions[0])
    engine.llm._core.scheduler.check()
