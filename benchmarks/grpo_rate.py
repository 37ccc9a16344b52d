"""Find out why the reward of ``examples/grpo.py`` falls again at a constant learning rate.

    python -m benchmarks.grpo_rate --generator transformers --json FILE
    python -m benchmarks.grpo_rate --skip --json FILE

With ``--generator transformers`` the trainer's own model generates, and Weft is not used at all. With ``--skip`` the
optimizer makes no step for a batch without a signal, in which all answers to each problem have the same reward. Each
step has the reward, the share of such groups, and the lengths of the gradient and of the optimizer's step.
"""

from __future__ import annotations

import argparse
import time
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from examples.grpo import (
    MAX_TOKENS,
    Answers,
    InProcess,
    Problems,
    advantages,
    differences,
    load_trainer,
    sample,
    trainer_logprobs,
)
from weft.bench import report
from weft.config.locate import locate

NOISE, GROUP = 0.44, 6


class Transformers:
    """Generation by the trainer's model, one group at a time."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.no_grad()
    def sample(self, prompts: list[list[int]], group: int, seed: int) -> Answers:
        torch.manual_seed(seed)
        return [[(tokens, [0.0] * len(tokens)) for tokens in self._group(prompt, group)] for prompt in prompts]

    def _group(self, prompt: list[int], group: int) -> list[list[int]]:
        ids = torch.tensor([prompt])
        found = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            num_return_sequences=group, max_new_tokens=MAX_TOKENS, use_cache=True,
        )  # fmt: skip
        ends = self._model.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [ends])
        return [_until_end(row, ends) for row in found[:, len(prompt) :].tolist()]

    def update(self, model: Any) -> None:
        """Nothing to do, since the model is the trainer's."""

    def close(self) -> None:
        """Nothing to free."""


def _until_end(tokens: list[int], ends: set[int]) -> list[int]:
    return tokens[: next((place for place, token in enumerate(tokens, 1) if token in ends), len(tokens))]


def length(tensors: list[Tensor]) -> float:
    """Euclidean length of all numbers together."""
    return float(torch.stack([tensor.norm() for tensor in tensors]).norm())


def run(args: argparse.Namespace, keep: Any) -> None:
    """Train at a constant rate. ``keep`` takes all steps so far after each."""
    import transformers

    model = load_trainer(NOISE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(locate(None))
    engine: Any = InProcess() if args.generator == "weft" else Transformers(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    parameters, problems = list(model.parameters()), Problems(tokenizer, 0)
    steps: list[dict[str, float]] = []
    began = time.monotonic()
    engine.update(model)
    while len(steps) < args.steps and time.monotonic() - began < args.seconds:
        samples = sample(engine, tokenizer, problems.draw(args.problems), GROUP, len(steps))
        logprobs, weights = trainer_logprobs(model, samples), advantages(samples, GROUP)
        num_tokens = sum(len(s.tokens) for s in samples)
        loss = -(weights[:, None] * logprobs).sum() / num_tokens
        optimizer.zero_grad()
        loss.backward()
        gradient = float(torch.nn.utils.clip_grad_norm_(parameters, 1.0))
        before = [p.detach().clone() for p in parameters]
        if weights.any() or not args.skip:
            optimizer.step()
        engine.update(model)
        groups = torch.tensor([s.reward for s in samples]).view(-1, GROUP)
        gap = differences(samples, logprobs.detach())[0] if args.generator == "weft" else None
        steps.append({
            "reward": mean(s.reward for s in samples),
            "agreeing": float((groups == groups[:, :1]).all(dim=1).float().mean()),
            "gradient": round(gradient, 4),
            "step": round(length([now.detach() - old for now, old in zip(parameters, before, strict=True)]), 4),
            "surprise": round(float(-logprobs.detach().sum() / num_tokens), 4),
        } | ({} if gap is None else {"mean_difference": gap}))  # fmt: skip
        keep(steps)
        if len(steps) % 10 == 0:
            print(len(steps), summary(steps)[-1], flush=True)
    engine.close()


def summary(steps: list[dict[str, float]]) -> list[dict[str, float]]:
    """Means of ten steps each."""
    tens = [steps[i : i + 10] for i in range(0, len(steps), 10)]
    names = ("reward", "agreeing", "gradient", "step", "surprise")
    return [{name: round(mean(step[name] for step in ten), 3) for name in names} for ten in tens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generator", choices=["weft", "transformers"], default="weft")
    parser.add_argument("--skip", action="store_true", help="make no step without a signal")
    parser.add_argument("--problems", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no step after as long")
    parser.add_argument("--json")
    args = parser.parse_args()
    target = report.open_json(args.json)
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    head = report.provenance("cpu") | {"settings": settings}

    def keep(steps: list[dict[str, float]]) -> None:
        found = {"means_of_ten": summary(steps), "each_step": steps}
        report.write_json(target, head | found)

    run(args, keep)


if __name__ == "__main__":
    main()
