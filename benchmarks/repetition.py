"""Measure what n-gram drafts gain where a text repeats, and find where bfloat16 changes the text.

    python benchmarks/repetition.py --json FILE [--model FOLDER] [--drafts 2 4 8 15] [--batch-sizes 1] [--device cuda]
                                    [--parts speed texts]

**speed**: a model with dummy weights whose greedy text goes in circles. Its embeddings are large, and its output head
holds the embedding of token t in the row of token t + 1. So t + 1 follows t whatever the layers add, and the layers
cost what they always do. The prompt holds the circle two and a half times. The figure is tokens per second of decoding,
without drafts and with drafts; every text must be the circle.

**texts**: the bundled model, greedy, in float32 and in bfloat16, with and without n-gram drafts, on prompts that repeat
a text. Where two texts differ, ``gap`` is the difference between the two likeliest logits without drafts. ``ulp`` is
the distance of neighbouring bfloat16 numbers at the likeliest logit.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from weft import LLM, SamplingParams
from weft.bench import report

CONFIGS = Path(__file__).parent / "configs"
CIRCLE, PROMPT, OUTPUT, REPEATS = 200, 500, 256, 5
TEXT = "The river runs past the old mill, under the stone bridge, and on through the town to the sea. "
PROBLEM = "A shop has 5 boxes with 12 pens each and sells 17 pens. How many pens are left? "


@torch.inference_mode()
def go_in_circles(llm: LLM) -> None:
    """Give the model of dummy weights its circle of tokens."""
    model = llm._core._executor._runner.model  # type: ignore[attr-defined]
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    embedding[:CIRCLE].normal_(std=8.0)
    head.zero_()
    head[:CIRCLE] = embedding[:CIRCLE].roll(1, 0) / 8


def decoding(llm: LLM, batch_size: int) -> tuple[list[float], bool]:
    """Tokens per second of each of several rounds, without their prefills; and whether all texts are the circle."""
    prompts: Any = [
        {"prompt_token_ids": [(start + i) % CIRCLE for i in range(PROMPT)]} for start in range(0, 7 * batch_size, 7)
    ]
    found, is_circle = [], True
    for _ in range(REPEATS + 1):
        seconds = []
        for count in (1, OUTPUT):
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            begin = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds.append(time.perf_counter() - begin)
            for output in outputs:
                end = len(output.prompt_token_ids) + output.prompt_token_ids[0]
                is_circle &= list(output.outputs[0].token_ids) == [(end + i) % CIRCLE for i in range(count)]
        found.append(batch_size * (OUTPUT - 1) / (seconds[1] - seconds[0]))
    return found[1:], is_circle


def speed(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows by batch size and number of drafts."""
    rows: list[dict[str, Any]] = []
    for count in (0, *args.drafts):
        config = {"method": "ngram", "num_speculative_tokens": count} if count else None
        settings: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 1024}
        with LLM(
            args.model, device=args.device, max_num_seqs=max(args.batch_sizes), enable_prefix_caching=False,
            speculative_config=config, **settings,
        ) as llm:  # fmt: skip
            go_in_circles(llm)
            for size in args.batch_sizes:
                before = llm.stats()
                rates, is_circle = decoding(llm, size)
                after = llm.stats()
                row = {"batch_size": size, "drafts": count, "tokens_per_s": round(median(rates), 1)}
                row |= {"rounds": [round(rate, 1) for rate in rates], "texts_are_the_circle": is_circle}
                if count:
                    (plain,) = (r for r in rows if r["batch_size"] == size and not r["drafts"])
                    drafted = after.spec_decode_num_draft_tokens - before.spec_decode_num_draft_tokens
                    accepted = after.spec_decode_num_accepted_tokens - before.spec_decode_num_accepted_tokens
                    row |= {"accepted": round(accepted / drafted, 3)} if drafted else {}
                    row |= {"over_plain": round(row["tokens_per_s"] / plain["tokens_per_s"], 2)}
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


class Logits:
    """Remembers the logits at every position of one request: a logits processor that changes nothing."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []

    def __call__(self, output: list[int], logits: Tensor) -> Tensor:
        self.rows.append(logits.float().topk(2).values.cpu())
        return logits


def difference(plain: LLM, prompt: str, params: SamplingParams, first: list[int], second: list[int]) -> dict[str, Any]:
    """Where two texts part, and how near the two likeliest tokens are there."""
    place = next(i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    logits = Logits()
    again = SamplingParams(
        temperature=0,
        max_tokens=params.max_tokens,
        ignore_eos=True,
        logits_processors=[logits],
    )
    plain.generate([prompt], again, use_tqdm=False)
    top, second_best = logits.rows[place].tolist()
    ulp = 2.0 ** (math.floor(math.log2(abs(top))) - 7)
    return {"at": place, "top": round(top, 4), "gap": round(top - second_best, 5), "ulp": ulp}


def texts(device: str) -> list[dict[str, Any]]:
    """The bundled model with drafts beside without, by dtype and prompt."""
    rows = []
    prompts = [TEXT * 3, PROBLEM * 3, TEXT * 6, "Repeat this: " + TEXT, PROBLEM + TEXT + PROBLEM]
    params = SamplingParams(temperature=0, max_tokens=160, ignore_eos=True)
    config = {"method": "ngram", "num_speculative_tokens": 4}
    for dtype in ("float32", "bfloat16"):
        settings: dict[str, Any] = {"device": device, "dtype": dtype, "max_num_seqs": 4, "max_model_len": 1024}
        settings |= {"enable_prefix_caching": False, "num_kv_pages": 300, "num_state_slots": 40}
        with LLM(**settings) as plain, LLM(**settings, speculative_config=config) as drafting:
            for prompt in prompts:  # one after the other: whatever a batch does to sums, it is not in this
                outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for llm in (plain, drafting)]
                a, b = (list(output.outputs[0].token_ids) for output in outputs)
                row: dict[str, Any] = {"dtype": dtype, "prompt": prompt[:24], "same_tokens": a == b}
                rows.append(row if a == b else row | difference(plain, prompt, params, a, b))
                print(json.dumps(rows[-1]), flush=True)
            assert drafting.stats().spec_decode_num_draft_tokens
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="n-gram drafts where a text repeats")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--model", default=str(CONFIGS / "qwen3-next-12l"))
    parser.add_argument("--drafts", type=int, nargs="+", default=[2, 4, 8, 15])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1])
    parser.add_argument("--parts", nargs="+", choices=("speed", "texts"), default=["texts", "speed"])
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    result = report.provenance(args.device)
    if "texts" in args.parts:
        result["texts"] = texts(args.device)
        report.write_json(args.json, result)
    if "speed" in args.parts:
        result |= {"circle": CIRCLE, "prompt": PROMPT, "output": OUTPUT, "speed": speed(args)}
        report.write_json(args.json, result)


if __name__ == "__main__":
    main()
