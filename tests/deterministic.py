"""The machinery of ``tests/test_deterministic.py`` and its GPU version: a request's bits alone, and in any company."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.x_matrix import COMPANIONS, NUM_TOKENS, RUNS, Poisoned, open_engine, prime, start_companion
from weft import LLM, SamplingParams
from weft.request import Request

PATHS = ["cold", "hit", "branch hit", "chunked", "preempted"]

MOST_TOKENS = 28
"""Tokens of a request that is preempted: enough to need a page of 16 tokens twice."""

Bits = list[tuple[int, list[int], list[float]]]
"""Per token: its id, and ids and log probabilities of the likeliest."""


def sampling(prompt: list[int], count: int) -> SamplingParams:
    """Random tokens, so that one bit more or less would show in the text sooner or later."""
    seed = len(prompt)
    return SamplingParams(temperature=0.8, top_p=0.95, seed=seed, max_tokens=count, ignore_eos=True, logprobs=2)


def bits_of(request: Request) -> Bits:
    return [(t, e.token_ids, e.logprobs) for t, e in zip(request.output_token_ids, request.logprobs, strict=True)]


class Alone:
    """Every request by itself: an engine without prefix cache and graphs, whose steps hold whole prompts.

    Attributes:
        folder: of the checkpoint.
        llm: the engine.
    """

    def __init__(self, folder: Path | str, **settings: Any) -> None:
        self.folder, self._known = folder, dict[tuple[int, ...], Bits]()
        self.llm = LLM(
            str(folder), skip_tokenizer_init=True, deterministic=True, enable_prefix_caching=False, max_num_seqs=2,
            max_num_batched_tokens=1200, num_kv_pages=420, page_size=16, cuda_graph_mode="NONE", **settings,
        )  # fmt: skip

    def __call__(self, prompt: list[int]) -> Bits:
        if tuple(prompt) not in self._known:
            request_id = self.llm.add_request({"prompt_token_ids": prompt}, sampling(prompt, MOST_TOKENS))
            (request,) = self.llm._streams[request_id].requests
            while not self.llm.is_finished():
                self.llm.step()
            self._known[tuple(prompt)] = bits_of(request)
        return self._known[tuple(prompt)]

    def check(self, request: Request) -> None:
        bits = bits_of(request)
        assert bits == self(request.prompt_token_ids.tolist())[: len(bits)]

    def shutdown(self) -> None:
        self.llm.shutdown()


class InCompany(Poisoned):
    """An engine with all that changes nothing: graphs, prefix cache, other requests. What nobody owns is NaN."""

    reference: Alone  # type: ignore[assignment]
    may_miss_graphs = True

    def add(self, prompt: list[int], count: int, salt: str) -> Request:
        request_id = self.llm.add_request(
            {"prompt_token_ids": prompt, "cache_salt": salt}, sampling(prompt, count)
        )  # fmt: skip
        return self.llm._streams[request_id].requests[0]


@contextmanager
def open_company(
    name: str, mode: str, overlap: str, references: dict[str, Alone], **settings: Any
) -> Iterator[InCompany]:
    with open_engine(
        name,
        mode,
        overlap,
        "capture",
        references,
        kind=InCompany,
        deterministic=True,
        **settings,  # type: ignore[arg-type]
    ) as engine:
        assert isinstance(engine, InCompany)
        yield engine


def run_chunked(engine: InCompany, prompt: list[int], salt: str) -> tuple[Request, list[Request]]:
    """Another prompt comes first, so that this one is cut elsewhere, beside a decode."""
    companions = [start_companion(engine), engine.add(engine.prompt_of(301), 3, salt)]
    request = engine.add(prompt, 4, salt)
    engine.finish()
    return request, companions


def run_preempted(
    engine: InCompany, prompt: list[int], salt: str, phase: str
) -> tuple[Request, list[Request]]:  # fmt: skip
    """A request is preempted after it has generated tokens, which it replays alone or beside others."""
    companions = [engine.add([7] * 12, MOST_TOKENS, "companions")]
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
        reusable = {"cold": 0, "hit": length - 2, "branch hit": length * 2 // 3}[path]
        assert request.num_cached_tokens == max(0, min(reusable, length - 2)) // 64 * 64
    for each in (request, *companions):
        engine.reference.check(each)
    engine.llm._core.scheduler.check()
