"""GRPO with TRL's trainer, and Weft as the generator through ``rollout_func``.

    python -m examples.grpo_trl --steps 50 --json FILE
    python -m examples.grpo_trl --steps 12 --server

Model, problems and checks are those of ``grpo.py``. TRL's ``GRPOTrainer`` computes advantages and losses and steps the
optimizer. Before each batch the engine gets the trainer's weights.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch
import transformers

from examples.grpo import (
    MAX_TOKENS,
    InProcess,
    Sample,
    Server,
    Step,
    differences,
    load_trainer,
    parse,
    resident_mib,
    summary,
    trainer_logprobs,
)
from weft.assets import extract_answer
from weft.bench import report
from weft.config.locate import locate


class Rollouts:
    """TRL's ``rollout_func``: new weights for the engine, then one answer to each prompt.

    TRL repeats a prompt for each answer of its group.
    """

    def __init__(self, engine: InProcess | Server, tokenizer: Any) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self.steps: list[Step] = []

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        began = time.monotonic()
        self._engine.update(trainer.model)
        update_ms = 1e3 * (time.monotonic() - began)
        ids = [
            list(self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
            for chat in prompts
        ]
        stale = self._engine.cached_tokens(ids[0])  # nothing of these weights is cached yet
        group = trainer.num_generations
        found = self._engine.sample(ids[::group], group, len(self.steps))
        answers = [answer for each in found for answer in each]
        samples = [Sample(prompt, *answer, 0.0) for prompt, answer in zip(ids, answers, strict=True)]
        with torch.no_grad():
            gaps = differences(samples, trainer_logprobs(trainer.model, samples))
        seconds = round(time.monotonic() - began, 2)
        self.steps.append(Step(0.0, *gaps, stale, seconds, round(update_ms, 1), resident_mib()))
        return {
            "prompt_ids": ids,
            "completion_ids": [tokens for tokens, _ in answers],
            "logprobs": [logprobs for _, logprobs in answers],
        }


def reward(completions: list[Any], right: list[int], **fields: Any) -> list[float]:
    """1 for a right answer, 0 for any other."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(extract_answer(text) == str(value)) for text, value in zip(texts, right, strict=True)]


def problems(count: int, seed: int) -> list[dict[str, Any]]:
    """Sums and differences of two numbers as TRL's rows."""
    first, second, signs = (torch.randint(low, high, (count,), generator=torch.Generator().manual_seed(seed + place))
                            for place, (low, high) in enumerate([(10, 100), (1, 10), (0, 2)]))  # fmt: skip
    rows = []
    for a, b, minus in zip(first.tolist(), second.tolist(), signs.tolist(), strict=True):
        chat = [{"role": "user", "content": f"What is {a} {'-' if minus else '+'} {b}?"}]
        rows.append({"prompt": chat, "right": a - b if minus else a + b})
    return rows


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the figures."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = transformers.AutoTokenizer.from_pretrained(locate(None))
    engine = Server() if args.server else InProcess()
    rollouts = Rollouts(engine, tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            folder, use_cpu=True, bf16=False, seed=args.seed, max_steps=args.steps, learning_rate=args.lr,
            lr_scheduler_type="linear", per_device_train_batch_size=args.problems * args.group,
            num_generations=args.group, max_completion_length=MAX_TOKENS, beta=0.0, temperature=1.0,
            gradient_checkpointing=False, logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = GRPOTrainer(
            load_trainer(args.noise), reward, config, processing_class=tokenizer, rollout_func=rollouts,
            train_dataset=Dataset.from_list(problems(args.steps * args.problems, args.seed)),
        )  # fmt: skip
        try:
            trainer.train()
        finally:
            engine.close()
    logged = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    steps = [Step(**(asdict(step) | {"reward": value})) for step, value in zip(rollouts.steps, logged, strict=True)]
    return {"summary": summary(steps), "each_step": [asdict(step) for step in steps]}


def main() -> None:
    args = parse(description=__doc__, steps=50)
    target = report.open_json(args.json)
    found = run(args)
    print(json.dumps(found["summary"], indent=1))
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    settings |= {name: version(name) for name in ("trl", "transformers", "accelerate", "datasets")}
    report.write_json(target, report.provenance("cpu") | {"settings": settings} | found)


if __name__ == "__main__":
    main()
