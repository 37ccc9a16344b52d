"""What a step that verifies drafts costs beside a decode step, and what n-gram drafts gain where a text is repeated.

    python benchmarks/speculation.py --json FILE [--model FOLDER] [--batch-sizes 1 8 32] [--drafts 2] [--device cuda]
                                     [--method ngram|mtp] [--repetition]

The first part runs dummy weights: every request gets random drafts (with ``mtp`` those of a random head, whose time
counts), none of which is accepted, or none at all; figures are medians of the milliseconds between steps of whole
batches, both without overlap, which drafts do not have. ``tokens_per_s_at`` is what follows for drafts that are right
with a given probability each. The second part asks the bundled model to go on with a text that its prompt holds three
times.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from weft import LLM, SamplingParams, report
from weft.request import Request

CONFIGS = Path(__file__).parent / "configs"
STEPS, PROMPT = 40, 512
RATES = (0.6, 0.8, 0.9)
TEXT = "The river runs past the old mill, under the stone bridge, and on through the town to the sea. "


class RandomDrafts:
    """As many drafts as are wanted."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size, self._rng = vocab_size, random.Random(0)

    def propose(self, request: Request, count: int) -> list[int]:
        return [self._rng.randrange(self._vocab_size) for _ in range(count)]

    def forget(self, request_id: str) -> None:
        pass


def step_ms(llm: LLM, batch_size: int) -> dict[str, Any]:
    """Median milliseconds between two steps in which the whole batch got tokens, and how they ran."""
    rng, vocab = random.Random(batch_size), llm.config.model_config.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(PROMPT)] for _ in range(batch_size)]
    params = SamplingParams(temperature=0, max_tokens=3 * STEPS, ignore_eos=True, detokenize=False)
    modes = dict(llm.stats().steps_by_mode)
    for prompt in prompts:
        llm.add_request({"prompt_token_ids": prompt}, params)
    intervals, previous = [], None
    for _ in range(STEPS + 40):
        whole = len(llm.step()) == batch_size
        now = time.perf_counter()
        if whole and previous is not None:
            intervals.append(1e3 * (now - previous))
        previous = now if whole else None
        if len(intervals) == STEPS:
            break
    for name in list(llm._streams):
        llm.abort(name)
    while llm._core.has_work:
        llm._core.step()
    llm._core.reset_prefix_cache()
    after = llm.stats().steps_by_mode
    return {"ms": round(median(intervals), 3), "modes": {m: n - modes.get(m, 0) for m, n in after.items()}}


def verification(llm: LLM, batch_size: int, num_drafts: int) -> dict[str, Any]:
    """Both kinds of steps at one batch size."""
    planner = llm._core.scheduler.drafts
    assert planner is not None
    found: dict[str, Any] = {"batch_size": batch_size, "num_drafts": num_drafts}
    for name, count in (("warm-up", num_drafts), ("decode", 0), ("verify", num_drafts)):
        planner.max_drafts = count
        found[name] = step_ms(llm, batch_size)
    del found["warm-up"]
    ratio = found["verify"]["ms"] / found["decode"]["ms"]
    found["ratio"] = round(ratio, 3)
    found["tokens_per_s_at"] = {
        rate: round(1e3 * batch_size * sum(rate**i for i in range(num_drafts + 1)) / found["verify"]["ms"], 1)
        for rate in RATES
    }
    return found


def repetition(device: str) -> dict[str, Any]:
    """Seconds of the bundled model for a text that is repeated, with and without n-gram drafts."""
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    found: dict[str, Any] = {}
    tokens = []
    for name, config in (("plain", None), ("ngram", {"method": "ngram", "num_speculative_tokens": 4})):
        with LLM(device=device, max_num_seqs=4, speculative_config=config) as llm:
            llm.generate([TEXT * 3], params, use_tqdm=False)
            seconds = []
            for _ in range(5):
                llm._core.reset_prefix_cache()
                start = time.perf_counter()
                (output,) = llm.generate([TEXT * 3], params, use_tqdm=False)
                seconds.append(time.perf_counter() - start)
            tokens.append(output.outputs[0].token_ids)
            stats = llm.stats()
            found[name] = {"tokens_per_s": round(200 / median(seconds), 1), "seconds": [round(s, 4) for s in seconds]}
    found["same_tokens"] = tokens[0] == tokens[1]
    found["tokens_per_step"] = round(1 + stats.spec_decode_num_accepted_tokens / stats.spec_decode_num_drafts, 2)
    found["speedup"] = round(found["ngram"]["tokens_per_s"] / found["plain"]["tokens_per_s"], 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="what verification costs, and what n-gram drafts gain")
    parser.add_argument("--json", required=True)
    parser.add_argument("--model", default=str(CONFIGS / "qwen3-next-12l"))
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--drafts", type=int, default=2)
    parser.add_argument("--method", choices=("ngram", "mtp"), default="ngram")
    parser.add_argument("--repetition", action="store_true", help="the second part too")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    repeated = repetition(args.device) if args.repetition else None
    print(json.dumps(repeated), flush=True)
    with LLM(
        args.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        device=args.device,
        max_num_seqs=max(args.batch_sizes),
        max_model_len=2048,
        speculative_config={"method": args.method, "num_speculative_tokens": args.drafts},
    ) as llm:
        assert llm._core.scheduler.drafts is not None
        if args.method == "ngram":
            llm._core.scheduler.drafts.proposer = RandomDrafts(llm.config.model_config.vocab_size)
        rows = [verification(llm, size, args.drafts) for size in args.batch_sizes]
        for row in rows:
            print(json.dumps(row), flush=True)
        result = report.provenance(llm.config.device) | {"config": report.settings(llm.config)}
    report.write_json(Path(args.json), result | {"verification": rows, "repetition": repeated})


if __name__ == "__main__":
    main()
