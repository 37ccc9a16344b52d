"""Random traffic at deterministic engines: every request has the bits that it has alone. ``make fuzz-deterministic``.

Job: for every seed one engine with random settings and pools hardly larger than its context, requests that branch off
each other's prompts, with random options, aborts and preemptions. Tokens and log probabilities of each request that
ends are compared with those of the request alone. Owns: the settings and the traffic.

    python -m tests.fuzz_deterministic [--requests 10000] [--first 0] [--seconds 3600] [--device cpu] [--json FILE]

A failure says its seed; ``--first SEED --requests 1`` repeats it.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.deterministic import Alone, Bits, bits_of
from tests.late_device import LateDevice
from tests.x_matrix import make_reference
from weft import LLM, SamplingParams
from weft.bench import report
from weft.request import Request

ARCHITECTURES = (
    "Qwen3NextForCausalLM", "Qwen3NextForCausalLM", "Qwen3ForCausalLM", "BambaForCausalLM", "JambaForCausalLM",
    "MiniMaxForCausalLM", "Lfm2MoeForCausalLM", "GptOssForCausalLM", "KimiLinearForCausalLM",
)  # fmt: skip
VERIFYING = ("Qwen3NextForCausalLM", "Qwen3ForCausalLM")
"""Architectures that may draft in this mode."""
MODES = ("NONE", "NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "FULL")
CONTEXT, REQUESTS = 300, 30


def settings_of(rng: random.Random, name: str) -> dict[str, Any]:
    page_size, seqs, mode = rng.choice([1, 4, 16, 16]), rng.randint(1, 5), rng.choice(MODES)
    pages = -(-CONTEXT // page_size)
    settings: dict[str, Any] = {
        "page_size": page_size, "max_model_len": CONTEXT, "max_num_seqs": seqs, "cuda_graph_mode": mode,
        "num_kv_pages": 1 + pages + rng.choice([0, 1, pages // 2, 3 * pages]),
        "max_num_batched_tokens": seqs + rng.choice([64, 100, 300]), "enable_overlap": rng.random() < 0.7,
        "schedule_policy": rng.choice(["fcfs", "priority", "lpm"]),
        "state_checkpoint_policy": rng.choice(["exact", "exact", "aligned", "finish_only"]),
        "eviction_policy": rng.choice(["flops", "lru"]),
    }  # fmt: skip
    if "FULL" in mode:
        settings["cuda_graph_bs"] = [1, 2, 4]
    if mode in ("PIECEWISE", "FULL_AND_PIECEWISE", "FULL"):
        settings["piecewise_cuda_graph_tokens"] = [16, 128]
    if name in VERIFYING and mode != "PIECEWISE" and rng.random() < 0.4:
        drafts = {"method": "ngram", "num_speculative_tokens": rng.randint(1, 4), "prompt_lookup_min": 1}
        settings["speculative_config"] = drafts
    if rng.random() < 0.3:
        settings["kv_offloading_size"] = 0.02
    return settings


def prompt_of(rng: random.Random, sent: list[list[int]]) -> list[int]:
    """A new prompt, or one that leaves an earlier one somewhere, often at a multiple of 64."""
    longest = CONTEXT - 40
    fresh = [rng.randrange(200) for _ in range(rng.choice([1, 2, 63, 64, 65, 66, 129, rng.randint(1, longest)]))]
    if not sent or rng.random() < 0.4:
        return fresh
    base = rng.choice(sent)
    return [*base[: rng.choice([64, 65, 128, rng.randint(1, len(base))])], *fresh][:longest]


def params_of(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.0]), top_p=rng.choice([1.0, 0.9]), top_k=rng.choice([0, 0, 20]),
        min_p=rng.choice([0.0, 0.0, 0.05]), repetition_penalty=rng.choice([1.0, 1.0, 1.2]), seed=rng.randrange(1 << 20),
        max_tokens=rng.randint(1, 30), ignore_eos=True, logprobs=rng.choice([0, 2]),
        prompt_logprobs=rng.choice([None, None, None, 1]),
    )  # fmt: skip


def everything(request: Request) -> tuple[Bits, list[list[float]]]:
    return bits_of(request), [entry.logprobs for entry in request.prompt_logprobs]


def start(llm: LLM, prompt: list[int], params: SamplingParams) -> Request:
    (request,) = llm._streams[llm.add_request({"prompt_token_ids": prompt}, params)].requests
    return request


def episode(seed: int, name: str, alone: Alone, device: str) -> Counter[str]:
    """One engine. Returns what happened."""
    rng = random.Random(seed)
    with LLM(
        str(alone.folder), skip_tokenizer_init=True, deterministic=True, device=device, **settings_of(rng, name)
    ) as llm:  # fmt: skip
        if device == "cpu" and rng.random() < 0.5:
            LateDevice(llm, rng)
        prompts: list[list[int]] = []
        sent: list[tuple[Request, SamplingParams]] = []
        aborted: set[str] = set()
        while len(sent) < REQUESTS or not llm.is_finished():
            while len(sent) < REQUESTS and rng.random() < 0.4:
                prompts.append(prompt_of(rng, prompts))
                params = params_of(rng)
                sent.append((start(llm, prompts[-1], params), params))
            if sent and rng.random() < 0.03:
                victim = rng.choice(list(llm._streams)) if llm._streams else ""
                if victim:
                    aborted |= {request.request_id for request in llm._streams[victim].requests}
                    llm.abort(victim)
            if not llm.is_finished():
                llm.step()
            llm._core.scheduler.check()
        stats = llm.stats()
    compared = [pair for pair in sent if pair[0].request_id not in aborted]
    for request, params in compared:
        want = start(alone.llm, request.prompt_token_ids.tolist(), params)
        while not alone.llm.is_finished():
            alone.llm.step()
        assert everything(request) == everything(want), (seed, len(request.prompt_token_ids), params)
    return Counter(
        engines=1, requests=len(compared), preemptions=stats.num_preemptions, restores=stats.num_restores,
        drafts=stats.spec_decode_num_draft_tokens, accepted_drafts=stats.spec_decode_num_accepted_tokens,
        reused_tokens=sum(request.num_cached_tokens or 0 for request, _ in compared),
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", help="write the counts there, after every engine")
    args = parser.parse_args()
    more: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16"} if args.device == "cuda" else {}
    end, seed, found = time.monotonic() + args.seconds, args.first, Counter[str]()
    target = report.open_json(args.json) if args.json else None
    with tempfile.TemporaryDirectory() as folder:
        known: dict[str, Alone] = {}
        while found["requests"] < args.requests and time.monotonic() < end:
            name = random.Random(f"{seed} architecture").choice(ARCHITECTURES)
            if name not in known:
                known[name] = Alone(make_reference(name, Path(folder) / name).folder, **more)
            found += episode(seed, name, known[name], args.device)
            seed += 1
            if target is not None:
                report.write_json(target, report.provenance(args.device) | {"first": args.first, **found})
    print(f"had the bits of the request alone, seeds {args.first} to {seed - 1}: {dict(found)}")
    return int(found["requests"] < args.requests)


if __name__ == "__main__":
    sys.exit(main())
