"""``scoring``: how near the log probabilities of generated tokens are to those of scoring.

Usage: ``python -m benchmarks.scoring --json FILE`` (a CPU: ten minutes). Each model runs in each dtype, without
``deterministic`` and with it. Prompts are generated from, and prompt and answer are then scored in two ways:

- *prompt*: as one prompt, with ``prompt_logprobs``;
- *forced*: as a generation whose tokens a logits processor fixes, one request after the other. Log probabilities are
  those of the model, before any processor.

The KL divergence is estimated from the sampled tokens: the mean of ``exp(d) - 1 - d``, d being the difference. Models
are the bundled one with its evaluation problems and with random tokens, and tiny random hybrids of ``tests/tiny.py``.

``--count`` needs no weights. It counts decoding steps whose recurrent layers repeat the order of a prompt's sums, so
that they compute the tokens since the last multiple of 64 again.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.tiny import make_checkpoint
from weft import LLM, RequestOutput, SamplingParams
from weft.bench import report
from weft.bench.evaluation import read_problems
from weft.bench.roofline import H200, Roofline
from weft.config.checkpoint import read_checkpoint_config
from weft.config.chunks import CHUNK_SIZE
from weft.config.layer_spec import CacheDtypes

CONFIGS = Path(__file__).parent / "configs"
BUNDLED, RANDOM = "weft-mini, problems", "weft-mini, random tokens"
TINY = {"kimi-linear, tiny": "KimiLinearForCausalLM", "granite-4, tiny": "GraniteMoeHybridForCausalLM"}
MODELS = (BUNDLED, RANDOM, *TINY)
DTYPES = ("float32", "bfloat16")
CONTEXT = 1024
COUNTED = ("qwen3-next-12l", "hybrid-27b", "kimi-linear-12l", "nemotron-h-8b", "granite-4.0-h-tiny")
Prompts = list[list[int]]


def logprobs_of(output: RequestOutput) -> list[float]:
    """The log probabilities of the sampled tokens."""
    completion = output.outputs[0]
    assert completion.logprobs is not None
    return [entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)]


def _params(new_tokens: int, **more: Any) -> SamplingParams:
    given = {"temperature": 1.0, "seed": 3, "ignore_eos": True, "logprobs": 0, "detokenize": False} | more
    return SamplingParams(max_tokens=new_tokens, **given)


def compared(found: Sequence[Sequence[float]], generated: Sequence[Sequence[float]]) -> dict[str, float]:
    """Differences of log probabilities from those of generation."""
    differences = [a - b for x, y in zip(found, generated, strict=True) for a, b in zip(x, y, strict=True)]
    return {
        "equal_share": round(sum(d == 0.0 for d in differences) / len(differences), 4),
        "mean_difference": sum(map(abs, differences)) / len(differences),
        "largest_difference": max(map(abs, differences)),
        "kl": sum(math.expm1(d) - d for d in differences) / len(differences),
    }


def scored_as_prompt(llm: LLM, prompts: Prompts, answers: Prompts) -> list[list[float]]:
    """The log probabilities of the answers in prompts that hold them."""
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    found = []
    for output, text, answer in zip(llm.generate(texts, asked, use_tqdm=False), texts, answers, strict=True):
        assert output.prompt_logprobs is not None
        entries = list(zip(output.prompt_logprobs, text, strict=True))[-len(answer) :]
        found.append([entry[token].logprob for entry, token in entries if entry is not None])
    return found


def _fixing(answer: Sequence[int]) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
    def fix(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        only = torch.full_like(logits, -math.inf)
        only[answer[len(output_token_ids)]] = 0.0
        return only

    return fix


def scored_by_force(llm: LLM, prompts: Prompts, answers: Prompts) -> list[list[float]]:
    """The log probabilities of the answers in generations that cannot choose other tokens."""
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        params = _params(len(answer), logits_processors=[_fixing(answer)])
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert output.outputs[0].token_ids == answer
        found.append(logprobs_of(output))
    return found


def scoring(llm: LLM, prompts: Prompts, new_tokens: int) -> dict[str, float]:
    """Generated log probabilities beside those of scoring prompt and answer as one prompt."""
    outputs = llm.generate(prompts, _params(new_tokens), use_tqdm=False)
    answers = [output.outputs[0].token_ids for output in outputs]
    return compared(scored_as_prompt(llm, prompts, answers), [logprobs_of(output) for output in outputs])


def measure(llm: LLM, prompts: Prompts, new_tokens: int, *, ignore_eos: bool) -> dict[str, Any]:
    """Both ways of scoring. Nothing is reused from generation."""
    outputs = llm.generate(prompts, _params(new_tokens, ignore_eos=ignore_eos), use_tqdm=False)
    answers, generated = [o.outputs[0].token_ids for o in outputs], [logprobs_of(o) for o in outputs]
    assert llm.reset_prefix_cache()
    scored = scored_as_prompt(llm, prompts, answers)
    assert llm.reset_prefix_cache()
    forced = scored_by_force(llm, prompts, answers)
    firsts = [a[0] == b[0] for a, b in zip(scored, generated, strict=True)]
    return {
        "prompts": len(prompts), "prompt_tokens": sum(map(len, prompts)), "answer_tokens": sum(map(len, answers)),
        "certain_tokens": sum(logprob == 0.0 for found in generated for logprob in found),
        "equal_first_tokens": sum(firsts),
        "prompt": compared(scored, generated), "forced": compared(forced, generated),
    }  # fmt: skip


def prompts_of(llm: LLM, name: str, count: int) -> Prompts:
    if name == BUNDLED:
        return [llm.render_chat(problem.messages)["prompt_token_ids"] for problem in read_problems(limit=count)]
    rng, top = random.Random(0), llm.config.model_config.vocab_size - 1
    return [[rng.randint(0, top) for _ in range(rng.randint(40, 200))] for _ in range(count)]


def counted(name: str) -> dict[str, Any]:
    """FLOPs of decoding steps as they are, and with the chunk's order in recurrent layers, with each step's floor.

    A step with that order computes a whole chunk of the recurrence for each sequence. Its bytes are taken as equal: it
    reads the inputs of the chunk, and writes the state once in a chunk.
    """
    model = read_checkpoint_config(CONFIGS / name)
    dtypes = CacheDtypes(model.dtype, model.dtype, "float32")
    recurrence = sum(spec.flops_per_token for spec in model.layer_specs(dtypes).values() if spec.states)
    steps = {}
    for num_seqs in (1, 32, 128):
        work = Roofline(model, dtypes).decode(num_seqs, CONTEXT)
        repeated = replace(work, flops=work.flops + (CHUNK_SIZE - 1) * num_seqs * recurrence)
        floors = [work.floor_s(H200), repeated.floor_s(H200)]
        steps[str(num_seqs)] = {
            "gflops": round(work.flops / 1e9, 2), "gflops_in_chunks": round(repeated.flops / 1e9, 2),
            "floor_ratio": round(floors[1] / floors[0], 3),
        }  # fmt: skip
    return {"model": name, "recurrence_gflops_per_token": recurrence / 1e9, "steps": steps}


def rows_of(name: str, folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows, settings = [], dict[str, Any]()
    if name in TINY:
        settings = {"model": str(make_checkpoint(TINY[name], folder)), "skip_tokenizer_init": True}
    for dtype in args.dtypes:
        for deterministic in (False, True):
            with LLM(**settings, dtype=dtype, device=args.device, deterministic=deterministic) as llm:
                prompts = prompts_of(llm, name, args.prompts)
                found = measure(llm, prompts, args.new_tokens, ignore_eos=name != BUNDLED)
                row = {"model": name, "dtype": dtype, "deterministic": deterministic} | found
                print(row, flush=True)
                rows.append(row | {"settings": report.settings(llm.config) | {"model": name}})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="on a GPU bfloat16 alone")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--count", action="store_true", help="count the cost of equal bits, and measure nothing")
    parser.add_argument("--json", required=True)
    args = parser.parse_args()
    target = report.open_json(args.json)
    head = {"benchmark": "scoring", **report.provenance(args.device)}
    if args.count:
        rows = [counted(name) for name in COUNTED]
        print(*rows, sep="\n")
        report.write_json(target, head | {"counted": rows})
        return
    rows = []
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            rows += rows_of(name, Path(folder), args)
        report.write_json(target, head | {"rows": rows})


if __name__ == "__main__":
    main()
