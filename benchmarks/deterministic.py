"""Measure ``deterministic``: its cost, its changes, and how near generated log probabilities are to scored ones.

Usage: ``python -m benchmarks.deterministic --models qwen3-0.6b qwen3-next-12l --json FILE`` (dummy weights; two minutes
for a model on an H200). Each model runs without the mode, then with the mode: two engines in turn in one process.

- *cost*: milliseconds of decoding steps, milliseconds to the first token, tokens per second of a mixed queue of 96
  prompts with 100 to 1,024 tokens in and out;
- *company*: the share of generated tokens whose log probability has the same bits as when the request runs alone. The
  cases are a batch of eight, a prefix hit, and a prompt computed 256 tokens at a time;
- *scoring*: generated log probabilities beside those of prompt and answer as one prompt (``prompt_logprobs``). The KL
  divergence is estimated from the sampled tokens: the mean of ``exp(d) - 1 - d``, d being the difference.
"""

from __future__ import annotations

import argparse
import gc
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.scoring import Prompts, logprobs_of, scoring
from weft import LLM, SamplingParams
from weft.bench import latency, prefill, report, throughput

CONFIGS = Path(__file__).parent / "configs"
PROMPT_TOKENS, NEW_TOKENS, NUM_PROMPTS = 700, 32, 8
CHUNK = 256


def make(model: str, deterministic: bool, args: argparse.Namespace) -> LLM:
    return LLM(
        str(CONFIGS / model), load_format="dummy", skip_tokenizer_init=True, max_model_len=16384,
        max_num_seqs=args.max_num_seqs, deterministic=deterministic, device=args.device,
    )  # fmt: skip


def cost(llm: LLM, small: bool) -> dict[str, Any]:
    """Milliseconds and tokens per second, without the prefix cache."""
    llm._core.manager.enable_prefix_caching = False
    sizes, lengths = ((1, 2), (64, 130)) if small else ((1, 8, 32, 128), (512, 2048, 8192))
    decode = latency.measure(llm, latency.LatencyWorkload(sizes, 256, 8 if small else 64, repeats=1))
    first = prefill.measure(llm, prefill.PrefillWorkload(lengths, repeats=3 if small else 9))
    queue = throughput.ThroughputWorkload(96, warmups=0)
    if small:
        queue = throughput.ThroughputWorkload(4, (10, 20), (5, 9))
    llm_queue = throughput.measure(llm, queue)
    llm._core.manager.enable_prefix_caching = True
    return {
        "decode_ms": {str(row["batch_size"]): row["interval_ms"] for row in decode},
        "first_token_ms": {str(row["prompt_len"]): row["first_token_ms"] for row in first},
        "queue_tokens_per_s": llm_queue["output_tokens_per_s"],
        "rows": {"decode": decode, "first_token": first, "queue": llm_queue},
    }


def generate(llm: LLM, prompts: Prompts, new_tokens: int, salt: str) -> list[list[float]]:
    """The log probabilities of the sampled tokens. Nothing stored under another salt is reused."""
    given = [{"prompt_token_ids": prompt, "cache_salt": salt} for prompt in prompts]
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=new_tokens, ignore_eos=True, logprobs=0, detokenize=False)
        for i in range(len(prompts))
    ]
    return [logprobs_of(output) for output in llm.generate(given, params, use_tqdm=False)]


def equal_share(found: Sequence[Sequence[float]], alone: Sequence[Sequence[float]]) -> float:
    pairs = [(a, b) for x, y in zip(found, alone, strict=True) for a, b in zip(x, y, strict=True)]
    return round(sum(a == b for a, b in pairs) / len(pairs), 4)


def company(llm: LLM, prompts: Prompts, new_tokens: int) -> dict[str, float]:
    """Shares of equal bits."""
    scheduler = llm._core.scheduler
    alone = [generate(llm, [prompt], new_tokens, f"alone {i}")[0] for i, prompt in enumerate(prompts)]
    # The seeds are those of the places in a batch, so alone every prompt has that of the first place.
    batch = [generate(llm, [prompt, *prompts[1:]], new_tokens, f"batch {i}")[0] for i, prompt in enumerate(prompts)]
    for prompt in prompts:
        generate(llm, [[*prompt[: len(prompt) * 2 // 3], 5, 7, 9]], 1, "hit")
        generate(llm, [prompt], 1, "hit")
    hit = [generate(llm, [prompt], new_tokens, "hit")[0] for prompt in prompts]
    budget, scheduler.max_num_batched_tokens = scheduler.max_num_batched_tokens, CHUNK
    chunks = [generate(llm, [prompt], new_tokens, f"chunks {i}")[0] for i, prompt in enumerate(prompts)]
    scheduler.max_num_batched_tokens = budget
    return {
        "batch_of_8": equal_share(batch, alone), "prefix_hit": equal_share(hit, alone),
        "chunks_of_256": equal_share(chunks, alone),
    }  # fmt: skip


def measure(model: str, deterministic: bool, args: argparse.Namespace) -> dict[str, Any]:
    llm = make(model, deterministic, args)
    rng, top = random.Random(0), llm.config.model_config.vocab_size - 1
    length, new_tokens = (70, 8) if args.small else (PROMPT_TOKENS, NEW_TOKENS)
    prompts = [[rng.randint(0, top) for _ in range(length)] for _ in range(NUM_PROMPTS)]
    found = {"model": model, "deterministic": deterministic, "company": company(llm, prompts, new_tokens)}
    found |= {"scoring": scoring(llm, prompts, new_tokens), "cost": {} if args.no_cost else cost(llm, args.small)}
    found["settings"] = report.settings(llm.config)
    llm.shutdown()
    del llm
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print(row["model"], "with" if row["deterministic"] else "without", row["company"], row["scoring"], flush=True)
    for plain, fixed in zip(rows[::2], rows[1::2], strict=True):
        if not plain["cost"]:
            continue
        for name in ("decode_ms", "first_token_ms"):
            ratios = {k: round(fixed["cost"][name][k] / v, 3) for k, v in plain["cost"][name].items()}
            print(plain["model"], name, plain["cost"][name], fixed["cost"][name], ratios)
        speeds = [row["cost"]["queue_tokens_per_s"] for row in (plain, fixed)]
        print(plain["model"], "queue_tokens_per_s", speeds, round(speeds[0] / speeds[1], 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", required=True, help="of benchmarks/configs")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--small", action="store_true", help="short prompts and few tokens (a rehearsal)")
    parser.add_argument("--no-cost", action="store_true", help="company and scoring alone")
    parser.add_argument("--json", required=True)
    args = parser.parse_args()
    target = report.open_json(args.json)
    rows: list[dict[str, Any]] = []
    for model in args.models:
        for deterministic in (False, True):
            rows.append(measure(model, deterministic, args))
            report.write_json(target, {"benchmark": "deterministic", **report.provenance(args.device), "rows": rows})
        show(rows[-2:])


if __name__ == "__main__":
    main()
