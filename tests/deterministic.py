"""The machinery of ``tests/test_deterministic.py`` and its GPU version: a request's bits alone, and in any company."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.drafters import install
from tests.fp8_checkpoints import make_fp8_checkpoint
from tests.x_matrix import (
    COMPANIONS,
    NUM_TOKENS,
    RUNS,
    WHOLE,
    Poisoned,
    make_reference,
    open_engine,
    prime,
    start_companion,
)
from weft import LLM, SamplingParams
from weft.request import Request

PATHS = ["cold", "hit", "branch hit", "chunked", "preempted"]
GUESSES, HEAD, REPEATS = "guesses", "head", "repeats"
"""Where drafts come from: ``Guesses``, the model's own head, earlier tokens of the text."""

MOST_TOKENS = 28
"""Tokens of a request that is preempted: enough to need a page of 16 tokens twice."""

PREEMPTING = [7] * 12
"""The prompt of the request that preempts the other one."""

CAPTURED = [4, 16, 72, 136, 216, 320, 512] if WHOLE else [16, 72, 136]
"""Sizes of captured steps on a CPU. They hold the steps of all cases that run. Each row takes a megabyte in FP8."""

FP8 = " in FP8 by "
"""Stands between an architecture and the scheme of its weights (``tests/fp8_checkpoints.py``)."""

Bits = list[tuple[int, list[int], list[float]]]
"""Per token: its id, and ids and log probabilities of the likeliest."""


def sampling(prompt: list[int], count: int, temperature: float) -> SamplingParams:
    """Random tokens, so that one bit more or less would show in the text sooner or later."""
    seed = len(prompt)
    return SamplingParams(temperature=temperature, top_p=0.95, seed=seed, max_tokens=count, ignore_eos=True, logprobs=2)


def make_folder(name: str, folder: Path) -> Path:
    """A tiny checkpoint: an architecture, perhaps with a head that drafts, or with weights in FP8."""
    arch, in_fp8, scheme = name.partition(FP8)
    if in_fp8:
        return make_fp8_checkpoint(arch, scheme, folder, max_position_embeddings=1100)
    return make_reference(name, folder).folder


def bits_of(request: Request) -> Bits:
    return [(t, e.token_ids, e.logprobs) for t, e in zip(request.output_token_ids, request.logprobs, strict=True)]


class Alone:
    """Every request by itself: an engine without prefix cache and graphs, whose steps hold whole prompts.

    Attributes:
        folder: of the checkpoint.
        temperature: of the tokens. Texts repeat only with 0.
        llm: the engine.
    """

    def __init__(self, folder: Path | str, *, temperature: float = 0.8, **settings: Any) -> None:
        self.folder, self.temperature, self._known = folder, temperature, dict[tuple[int, ...], Bits]()
        self.llm = LLM(
            str(folder), skip_tokenizer_init=True, deterministic=True, enable_prefix_caching=False, max_num_seqs=2,
            max_num_batched_tokens=1200, num_kv_pages=420, page_size=16, **{"cuda_graph_mode": "NONE"} | settings,
        )  # fmt: skip

    def __call__(self, prompt: list[int]) -> Bits:
        if tuple(prompt) not in self._known:
            request_id = self.llm.add_request({"prompt_token_ids": prompt}, self.sampling(prompt, MOST_TOKENS))
            (request,) = self.llm._streams[request_id].requests
            while not self.llm.is_finished():
                self.llm.step()
            self._known[tuple(prompt)] = bits_of(request)
        return self._known[tuple(prompt)]

    def sampling(self, prompt: list[int], count: int) -> SamplingParams:
        return sampling(prompt, count, self.temperature)

    def check(self, request: Request) -> None:
        bits = bits_of(request)
        assert bits == self(request.prompt_token_ids.tolist())[: len(bits)]

    def shutdown(self) -> None:
        self.llm.shutdown()


@dataclass
class Guesses:
    """Drafts what a request generates alone, with a mistake now and then, and sometimes too little."""

    alone: Alone
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def propose(self, request: Request, count: int) -> list[int]:
        done = len(request.output_token_ids)
        known = [token for token, _, _ in self.alone(request.prompt_token_ids.tolist())]
        tokens = known[done : done + self.rng.randint(0, count)]
        return [token if self.rng.random() < 0.8 else (token + 1) % 200 for token in tokens]


class InCompany(Poisoned):
    """An engine with graphs, prefix cache and other requests, none of which changes results. Free memory is NaN."""

    reference: Alone  # type: ignore[assignment]
    may_miss_graphs = True

    def add(self, prompt: list[int], count: int, salt: str) -> Request:
        request_id = self.llm.add_request(
            {"prompt_token_ids": prompt, "cache_salt": salt}, self.reference.sampling(prompt, count)
        )  # fmt: skip
        return self.llm._streams[request_id].requests[0]


@contextmanager
def open_company(
    name: str, mode: str, overlap: str, references: dict[str, Alone], **settings: Any
) -> Iterator[InCompany]:
    known: Any = references
    if mode not in ("NONE", "FULL_DECODE_ONLY") and settings.get("device") != "cuda":
        settings = {"piecewise_cuda_graph_tokens": CAPTURED} | settings
    with open_engine(name, mode, overlap, "capture", known, InCompany, deterministic=True, **settings) as engine:
        assert isinstance(engine, InCompany)
        yield engine


@contextmanager
def open_drafting(
    name: str, mode: str, overlap: str, references: dict[str, Alone], *, by: str, **settings: Any
) -> Iterator[InCompany]:
    """An engine that drafts by ``GUESSES``, ``HEAD`` or ``REPEATS``."""
    config = {"method": "mtp" if by == HEAD else "ngram", "num_speculative_tokens": 3}
    if by == REPEATS:
        config |= {"prompt_lookup_min": 1, "prompt_lookup_max": 2}
    with open_company(name, mode, overlap, references, speculative_config=config, **settings) as engine:
        if by == GUESSES:
            install(engine.llm, Guesses(engine.reference))
        yield engine
        stats = engine.llm.stats()
        assert stats.spec_decode_num_draft_tokens > stats.spec_decode_num_accepted_tokens > 0, stats


def run_chunked(engine: InCompany, prompt: list[int], salt: str) -> tuple[Request, list[Request]]:
    """Another prompt comes first, so that this one is cut elsewhere, beside a decode."""
    companions = [start_companion(engine), engine.add(engine.prompt_of(301), 3, salt)]
    request = engine.add(prompt, 4, salt)
    engine.finish()
    return request, companions


def run_preempted(
    engine: InCompany, prompt: list[int], salt: str, phase: str
) -> tuple[Request, list[Request]]:  # fmt: skip
    """Preempt a request after it has generated tokens. It replays these tokens alone or with other requests."""
    companions = [engine.add(PREEMPTING, MOST_TOKENS, "companions")]
    engine.step_until(lambda: bool(companions[0].output_token_ids))
    request = engine.add(prompt, MOST_TOKENS - 4, salt)
    engine.step_until(lambda: len(request.output_token_ids) > 2)
    for _ in range(MOST_TOKENS):
        if request.num_preemptions:
            break
        engine.take_free_memory()
        engine.llm.step()
    assert request.num_preemptions and request.output_token_ids
    if phase == "prefill":
        (stream,) = (s for s in engine.llm._streams.values() if companions[0] in s.requests)
        engine.llm.abort(stream.request_id)
    elif phase == "decode":
        companions.append(engine.add(COMPANIONS[1], NUM_TOKENS, "companions"))
    engine.give_memory_back()
    engine.finish()
    return request, companions


def check(engine: InCompany, path: str, phase: str, length: int) -> None:
    """A request and its company: everybody's bits are those of the request alone."""
    prompt, salt = engine.prompt_of(length), engine.begin()
    if path == "preempted":
        request, companions = run_preempted(engine, prompt, salt, phase)
    elif path == "chunked":
        request, companions = run_chunked(engine, prompt, salt)
    else:
        prime(engine, path, prompt, salt)
        request, companions = RUNS[phase](engine, prompt, salt)
        most = len(prompt) - 2
        reusable = {"cold": 0, "hit": most, "branch hit": len(prompt) * 2 // 3, "restored": most}[path]
        assert request.num_cached_tokens == max(0, min(reusable, most)) // 64 * 64
    for each in (request, *companions):
        engine.reference.check(each)
    engine.llm._core.scheduler.check()
