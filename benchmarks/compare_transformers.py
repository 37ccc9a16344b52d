"""Weft against transformers' ``generate`` on the CPU: same checkpoint, same float32, same threads, greedy.

Job: two workloads, both engines in one process, repeats interleaved, outputs compared before speeds are believed.
Owns: the workloads and the file of figures. Does not know: engine internals.

    python benchmarks/compare_transformers.py --threads 1

- *decode*: one prompt of 128 tokens. Milliseconds per token are (median time for 129 tokens - median time for 1) / 128.
- *queue*: 64 requests in random order, with prompts of 20-400 tokens and outputs of 16-256. Weft gets all requests at
  once. transformers gets them one at a time, and in arrival order in left-padded batches of 16 that run until their
  longest request is done.

Weft's prefix cache is off, or the repeats would be answered from it. End-of-sequence is ignored by both, so that both
generate exactly the tokens asked for.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from weft import LLM, SamplingParams
from weft.assets import EVAL_PATH, MODEL_DIR
from weft.bench import report
from weft.bench.evaluation import read_problems

RESULTS = Path(__file__).parent / "results" / "compare_transformers_cpu.json"
GOALS = {"decode": 1.3, "one_at_a_time": 6.0, "padded_batches": 1.5}
DECODE_PROMPT_LEN, DECODE_STEPS = 128, 128
PADDED_BATCH = 16

Tokens = list[int]
Request = tuple[Tokens, int]
"""A prompt, and how many tokens to generate."""


class Transformers:
    """The reference: ``generate`` of transformers."""

    def __init__(self, folder: Path) -> None:
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def generate(self, requests: list[Request]) -> list[Tokens]:
        """All requests as one left-padded batch, which runs until its longest is done."""
        width = max(len(prompt) for prompt, _ in requests)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in requests])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in requests])
        longest = max(length for _, length in requests)
        out = self._model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=longest, do_sample=False)
        return [row[width : width + length].tolist() for row, (_, length) in zip(out, requests, strict=True)]

    def one_at_a_time(self, requests: list[Request]) -> list[Tokens]:
        return [self.generate([request])[0] for request in requests]

    def padded_batches(self, requests: list[Request]) -> list[Tokens]:
        batches = [requests[at : at + PADDED_BATCH] for at in range(0, len(requests), PADDED_BATCH)]
        return [tokens for batch in batches for tokens in self.generate(batch)]


class Weft:
    """The engine under test."""

    def __init__(self, folder: Path) -> None:
        self.llm = LLM(
            str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True, enable_prefix_caching=False
        )

    def generate(self, requests: list[Request]) -> list[Tokens]:
        params = [
            SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
            for _, length in requests
        ]
        outputs = self.llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
        return [o.outputs[0].token_ids for o in outputs]


def text_tokens(folder: Path) -> Tokens:
    """A long run of real text as token ids: chats of the evaluation set."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [p.messages for p in read_problems(EVAL_PATH)]
    return [t for chat in chats for t in tokenizer.encode("\n".join(m["content"] for m in chat))]


def make_queue(source: Tokens, num_requests: int, rng: random.Random) -> list[Request]:
    """Requests in random order: prompts are pieces of ``source``, 20-400 tokens; outputs 16-256 tokens."""
    queue = []
    for _ in range(num_requests):
        length = rng.randint(20, 400)
        start = rng.randrange(len(source) - length)
        queue.append((source[start : start + length], rng.randint(16, 256)))
    return queue


def timed(run: Callable[[], list[Tokens]]) -> tuple[float, list[Tokens]]:
    """Seconds that ``run`` takes, and what it returns."""
    start = time.perf_counter()
    tokens = run()
    return time.perf_counter() - start, tokens


def common_length(a: Tokens, b: Tokens) -> int:
    """Tokens before the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def agreement(ours: list[Tokens], theirs: list[Tokens]) -> dict[str, Any]:
    """How many requests agree to the last token, and the share of tokens before a first difference."""
    common = [common_length(a, b) for a, b in zip(ours, theirs, strict=True)]
    return {
        "equal_requests": sum(n == len(a) for n, a in zip(common, ours, strict=True)),
        "requests": len(ours),
        "equal_token_share": round(sum(common) / sum(map(len, ours)), 4),
    }


def compare_decode(weft: Weft, reference: Transformers, source: Tokens, repeats: int) -> dict[str, Any]:
    """Milliseconds per token with a single request."""
    prompt = source[:DECODE_PROMPT_LEN]
    short, long = [(prompt, 1)], [(prompt, DECODE_STEPS + 1)]
    same = agreement(weft.generate(long), reference.generate(long))  # also the warm-up
    seconds: dict[str, list[float]] = {"weft_1": [], "weft_all": [], "transformers_1": [], "transformers_all": []}
    for _ in range(repeats):
        for name, engine in (("weft", weft), ("transformers", reference)):
            seconds[f"{name}_1"].append(timed(partial(engine.generate, short))[0])
            seconds[f"{name}_all"].append(timed(partial(engine.generate, long))[0])
    per_token = {
        name: (median(seconds[f"{name}_all"]) - median(seconds[f"{name}_1"])) / DECODE_STEPS * 1e3
        for name in ("weft", "transformers")
    }
    return {
        "ms_per_token": {name: round(value, 3) for name, value in per_token.items()},
        "ratio": round(per_token["transformers"] / per_token["weft"], 2),
        "agreement": same,
        "repeats_s": {name: [round(s, 4) for s in values] for name, values in seconds.items()},
    }


def compare_queue(weft: Weft, reference: Transformers, queue: list[Request], repeats: int) -> dict[str, Any]:
    """Seconds for the whole queue, three ways."""
    ways: dict[str, Callable[[list[Request]], list[Tokens]]] = {
        "weft": weft.generate,
        "padded_batches": reference.padded_batches,
        "one_at_a_time": reference.one_at_a_time,
    }
    for run in ways.values():  # warm-up
        run(queue[:2])
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    tokens: dict[str, list[Tokens]] = {}
    for _ in range(repeats):
        for name, run in ways.items():
            elapsed, tokens[name] = timed(partial(run, queue))
            seconds[name].append(elapsed)
    middle = {name: median(values) for name, values in seconds.items()}
    num_tokens = sum(length for _, length in queue)
    return {
        "requests": len(queue),
        "prompt_tokens": sum(len(prompt) for prompt, _ in queue),
        "output_tokens": num_tokens,
        "seconds": {name: round(value, 3) for name, value in middle.items()},
        "tokens_per_s": {name: round(num_tokens / value, 1) for name, value in middle.items()},
        "ratios": {name: round(middle[name] / middle["weft"], 2) for name in ("one_at_a_time", "padded_batches")},
        "agreement": agreement(tokens["weft"], tokens["one_at_a_time"]),
        "repeats_s": {name: [round(s, 3) for s in values] for name, values in seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Weft against transformers' generate on the CPU.")
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--threads", type=int, default=1, help="threads of both engines")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rng = random.Random(args.seed)
    source = text_tokens(args.model)
    weft, reference = Weft(args.model), Transformers(args.model)
    decode = compare_decode(weft, reference, source, max(args.repeats, 5))
    queue = compare_queue(weft, reference, make_queue(source, args.requests, rng), args.repeats)
    reached = {"decode": decode["ratio"], **queue["ratios"]}
    figures = {"benchmark": "compare_transformers", **report.provenance("cpu"), "threads": args.threads}
    figures |= {"ratios": reached, "goals": GOALS, "decode": decode, "queue": queue}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    report.write_json(args.json, figures)
    rows = [[name, f"{reached[name]:.2f}x", f"{goal:.1f}x"] for name, goal in GOALS.items()]
    report.table("Against transformers", ("", "reached", "goal"), rows)
    print(f"agreement: decode {decode['agreement']}, queue {queue['agreement']}")


if __name__ == "__main__":
    main()
