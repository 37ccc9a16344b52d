"""Random traffic at deterministic engines: every request has the bits that it has alone. ``make fuzz-deterministic``.

Job: for every seed one engine with random settings and pools hardly larger than its context, requests that branch off
each other's prompts or come again, with random options, drafts, aborts and preemptions. Tokens and log probabilities of
each request that ends are compared with those of the request alone. Owns: the settings and the traffic.

    python -m tests.fuzz_deterministic [--requests 10000] [--first 0] [--seconds 3600] [--device cpu] [--workers 1]
        [--json FILE]

On a GPU models are cuts of real ones with dummy weights, in bfloat16. A failure says its kind and seed; ``--first SEED
--kinds KIND --requests 1`` repeats it.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.deterministic import Alone, Bits, bits_of
from tests.deterministic_cuts import FEW, cut
from tests.drafters import FromOutputs, install
from tests.late_device import LateDevice
from tests.x_matrix import make_reference
from weft import LLM, SamplingParams
from weft.bench import report
from weft.request import Request

KINDS = {
    "cpu": (
        "Qwen3NextForCausalLM", "Qwen3ForCausalLM", "BambaForCausalLM", "JambaForCausalLM", "MiniMaxForCausalLM",
        "Lfm2MoeForCausalLM", "GptOssForCausalLM", "KimiLinearForCausalLM", "InklingForCausalLM",
        "ZayaForCausalLM",
    ),
    "cuda": ("qwen3-next-12l", "qwen3-0.6b", "granite-4.0-h-tiny", "ling-3.0-flash-12l", "inkling"),
}  # fmt: skip
MODES = ("NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "FULL")
CONTEXT = {"cpu": 300, "cuda": 700}
REQUESTS = {"cpu": 30, "cuda": 400}
"""Number of requests of one engine."""
ON_GPU: dict[str, Any] = {
    "device": "cuda", "dtype": "bfloat16", "load_format": "dummy", "num_state_slots": 40, "skip_tokenizer_init": True,
}  # fmt: skip
Key = tuple[tuple[int, ...], int]
Everything = tuple[Bits, list[list[float]]]


def settings_of(rng: random.Random, device: str, mode: str) -> dict[str, Any]:
    page_size = rng.choice([1, 4, 16, 16] if device == "cpu" else [16, 16, 32])
    seqs = rng.randint(1, 5 if device == "cpu" else 16)
    context = CONTEXT[device]
    pages = -(-context // page_size)
    settings: dict[str, Any] = {
        "page_size": page_size, "max_model_len": context, "max_num_seqs": seqs, "cuda_graph_mode": mode,
        "num_kv_pages": 1 + pages + rng.choice([0, 1, pages // 2, 3 * pages]),
        "max_num_batched_tokens": seqs + rng.choice([64, 100, 300]), "enable_overlap": rng.random() < 0.7,
        "schedule_policy": rng.choice(["fcfs", "priority", "lpm"]),
        "state_checkpoint_policy": rng.choice(["exact", "exact", "aligned", "finish_only"]),
        "eviction_policy": rng.choice(["flops", "lru"]),
    }  # fmt: skip
    if "FULL" in mode:
        settings["cuda_graph_bs"] = [1, 2, 4] if device == "cpu" else [1, 4, 16]
    if mode in ("PIECEWISE", "FULL_AND_PIECEWISE", "FULL"):
        settings["piecewise_cuda_graph_tokens"] = [16, 128]
    if rng.random() < 0.4:
        drafts = {"method": "ngram", "num_speculative_tokens": rng.randint(1, 4), "prompt_lookup_min": 1}
        settings["speculative_config"] = drafts
    if rng.random() < 0.3:
        settings["kv_offloading_size"] = 0.02 if device == "cpu" else 0.2
    return settings


def prompt_of(rng: random.Random, sent: list[list[int]], longest: int) -> list[int]:
    """A new prompt, or one that leaves an earlier one somewhere, often at a multiple of 64."""
    fresh = [rng.randrange(200) for _ in range(rng.choice([1, 2, 63, 64, 65, 66, 129, rng.randint(1, longest)]))]
    if not sent or rng.random() < 0.4:
        return fresh
    base = rng.choice(sent)
    return [*base[: rng.choice([64, 65, 128, rng.randint(1, len(base))])], *fresh][:longest]


def params_of(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.0]), top_p=rng.choice([1.0, 0.9]), top_k=rng.choice([0, 0, 20]),
        min_p=rng.choice([0.0, 0.0, 0.05]), repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        presence_penalty=rng.choice([0.0, 0.0, 0.5]), frequency_penalty=rng.choice([0.0, 0.0, 0.3]),
        logit_bias=rng.choice([None, None, {7: 2.0, 11: -3.0}]), seed=rng.randrange(1 << 30),
        max_tokens=rng.randint(1, 30), ignore_eos=True, logprobs=rng.choice([0, 2]),
        prompt_logprobs=rng.choice([None, None, None, 1]),
    )  # fmt: skip


def everything(request: Request) -> Everything:
    return bits_of(request), [entry.logprobs for entry in request.prompt_logprobs]


def start(llm: LLM, prompt: list[int], params: SamplingParams) -> Request:
    (request,) = llm._streams[llm.add_request({"prompt_token_ids": prompt}, params)].requests
    return request


class References:
    """One kind's requests alone, each of which is computed once.

    Attributes:
        tokens: of each request, by its prompt and seed.
    """

    def __init__(self, kind: str, device: str, folder: Path) -> None:
        self.kind, self.tokens, self._bits = kind, dict[Key, list[int]](), dict[Key, Everything]()
        if device == "cpu":
            self.alone = Alone(make_reference(kind, folder).folder)
            return
        more = {name: value for name, value in ON_GPU.items() if name != "skip_tokenizer_init"}
        decodes = {"cuda_graph_mode": "FULL_DECODE_ONLY", "cuda_graph_bs": [1]}  # four times as fast
        self.alone = Alone(cut(kind, folder), **more | decodes)

    def of(self, prompt: list[int], params: SamplingParams) -> Everything:
        assert params.seed is not None
        key = tuple(prompt), params.seed
        if key not in self._bits:
            request = start(self.alone.llm, prompt, params)
            while not self.alone.llm.is_finished():
                self.alone.llm.step()
            self._bits[key] = everything(request)
            self.tokens[key] = list(request.output_token_ids)
        return self._bits[key]


def episode(seed: int, references: References, device: str, end: float) -> Counter[str]:
    """One engine. Returns what happened. At time ``end`` it accepts no more requests."""
    rng = random.Random(f"{seed} {references.kind}")
    mode = rng.choice(MODES)
    settings = settings_of(rng, device, mode) | (ON_GPU if device == "cuda" else {"device": "cpu"})
    with LLM(str(references.alone.folder), **{"skip_tokenizer_init": True} | settings, deterministic=True) as llm:
        if device == "cpu" and rng.random() < 0.5:
            LateDevice(llm, rng)
        if "speculative_config" in settings and rng.random() < 0.7:
            install(llm, FromOutputs(references.tokens, lambda _, chance: chance.random() < 0.2, rng))
        sent, aborted = traffic(llm, rng, references, REQUESTS[device], end)
        stats = llm.stats()
    compared = [pair for pair in sent if pair[0].request_id not in aborted]
    for request, params in compared:
        want = references.of(request.prompt_token_ids.tolist(), params)
        assert everything(request) == want, (seed, len(request.prompt_token_ids), params)
    options = [params for _, params in compared]
    found = Counter(
        engines=1, requests=len(compared), aborted=len(aborted),
        preemptions=stats.num_preemptions, restores=stats.num_restores, drafts=stats.spec_decode_num_draft_tokens,
        accepted_drafts=stats.spec_decode_num_accepted_tokens,
        hits=sum(bool(request.num_cached_tokens) for request, _ in compared),
        reused_tokens=sum(request.num_cached_tokens or 0 for request, _ in compared),
        tokens=sum(len(request.output_token_ids) for request, _ in compared),
        with_temperature=sum(bool(params.temperature) for params in options),
        with_penalties=sum(p.repetition_penalty != 1.0 or p.presence_penalty > 0 for p in options),
        with_prompt_logprobs=sum(params.prompt_logprobs is not None for params in options),
    )  # fmt: skip
    found[f"{references.kind}, {mode}"] = len(compared)
    return found


def traffic(
    llm: LLM, rng: random.Random, references: References, count: int, end: float
) -> tuple[list[tuple[Request, SamplingParams]], set[str]]:
    """Send ``count`` requests and run them to their end. Returns them, and the ids of those that were aborted."""
    prompts: list[list[int]] = []
    sent: list[tuple[Request, SamplingParams]] = []
    aborted: set[str] = set()
    longest = llm.config.max_model_len - 40
    while len(sent) < count or not llm.is_finished():
        count = count if time.time() < end else len(sent)
        while len(sent) < count and rng.random() < 0.4:
            if sent and rng.random() < 0.4:
                request, params = rng.choice(sent)
                prompt = request.prompt_token_ids.tolist()
            else:
                prompt, params = prompt_of(rng, prompts, longest), params_of(rng)
                prompts.append(prompt)
                references.of(prompt, params)
            sent.append((start(llm, prompt, params), params))
        if llm._streams and rng.random() < 0.01:
            victim = rng.choice(list(llm._streams))
            aborted |= {request.request_id for request in llm._streams[victim].requests}
            llm.abort(victim)
        if not llm.is_finished():
            llm.step()
        llm._core.scheduler.check()
    return sent, aborted


_known: dict[str, tuple[References, tempfile.TemporaryDirectory[str]]] = {}
"""References of this process, by kind, and their folders."""


def work(worker: int, kind: str, seed: int, device: str, end: float) -> tuple[Counter[str], str]:
    """Run one engine in a process of its own kind. Returns what happened, and a failure."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if len(visible) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[worker % len(visible)]
    try:
        if kind not in _known:
            folder = tempfile.TemporaryDirectory(prefix="weft-fuzz-")
            _known[kind] = References(kind, device, Path(folder.name)), folder
        return episode(seed, _known[kind][0], device, end), ""
    except Exception:
        return Counter(), f"{kind}, seed {seed}: {traceback.format_exc()}"


def engines(args: argparse.Namespace, kinds: list[str]) -> Iterator[tuple[Counter[str], str]]:
    """Run engines in ``args.workers`` processes until the time is over, or a failure. Yields what each one did."""
    end, seeds = time.time() + args.seconds, itertools.count(args.first)
    with ExitStack() as stack:
        pools = [
            stack.enter_context(ProcessPoolExecutor(1, multiprocessing.get_context("spawn")))
            for _ in range(args.workers)
        ]
        running: dict[Future[tuple[Counter[str], str]], int] = {}
        idle = list(range(args.workers))
        while idle or running:
            while idle and time.time() < end:
                worker, seed = idle.pop(), next(seeds)
                kind = kinds[worker % len(kinds)] if args.workers >= len(kinds) else kinds[seed % len(kinds)]
                running[pools[worker].submit(work, worker, kind, seed, args.device, end)] = worker
            if not running:
                return
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                idle.append(running.pop(done))
                yield done.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--device", default="cpu", choices=list(KINDS))
    parser.add_argument("--kinds", nargs="+", help=f"of {', '.join([*KINDS['cpu'], *FEW])}")
    parser.add_argument("--workers", type=int, default=1, help="processes, each with some of the kinds")
    parser.add_argument("--json", help="write the counts there")
    args = parser.parse_args()
    target = report.open_json(args.json) if args.json else None
    found, failures = Counter[str](), list[str]()
    for counts, failure in engines(args, list(args.kinds or KINDS[args.device])):
        found += counts
        failures += [failure] * bool(failure)
        if target is not None:
            totals = {"first": args.first, "failures": failures, **dict(sorted(found.items()))}
            report.write_json(target, report.provenance(args.device) | totals)
        if found["requests"] >= args.requests or failures:
            break
    print(f"had the bits of the request alone: {dict(found)}", *failures, sep="\n")
    return int(found["requests"] < args.requests or bool(failures))


if __name__ == "__main__":
    sys.exit(main())
