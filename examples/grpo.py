"""GRPO with Weft as the generator: a small hybrid model learns arithmetic again after its weights were damaged.

    python examples/grpo.py --steps 60 --json FILE
    python examples/grpo.py --steps 20 --server

With --server the generator is ``weft serve`` in a process of its own, and weights reach it through files.

The trainer is transformers' model of the bundled checkpoint, in float32 on the CPU. Each step samples a group of
answers to each problem, rewards right ones, makes one policy-gradient step, and gives the new weights to the engine.
The script checks what a training loop has to trust: log probabilities of engine and trainer for the same tokens, reused
prefixes of old weights (there must be none), and memory.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft import LLM, SamplingParams
from weft.assets import extract_answer
from weft.bench import report
from weft.config.locate import locate

MAX_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer: prompt, tokens, the tokens' log probabilities in the engine, and reward."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    reward: float


@dataclass(frozen=True, slots=True)
class Step:
    """Figures of one step. Differences are of log probabilities, of the engine and of transformers."""

    reward: float
    mean_difference: float
    largest_difference: float
    stale_hits: int
    seconds: float
    update_ms: float
    resident_mib: int


class Problems:
    """Sums and differences of two numbers, with their right answers."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self._tokenizer, self._random = tokenizer, random.Random(seed)

    def draw(self, count: int) -> list[tuple[list[int], int]]:
        found = []
        for _ in range(count):
            a, b = self._random.randint(10, 99), self._random.randint(1, 9)
            sign, right = self._random.choice([("+", a + b), ("-", a - b)])
            chat = [{"role": "user", "content": f"What is {a} {sign} {b}?"}]
            ids = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            found.append((list(ids), right))
        return found


Answers = list[list[tuple[list[int], list[float]]]]
"""For each prompt its answers: tokens, and their log probabilities."""


class InProcess:
    """Weft in the trainer's process."""

    def __init__(self) -> None:
        self._llm = LLM(max_num_seqs=64, device="cpu", dtype="float32", cpu_cache_gib=0.2)

    def cached_tokens(self, prompt: list[int]) -> int:
        """Tokens of a prompt that the prefix cache has."""
        return self._llm.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)[0].num_cached_tokens

    def sample(self, prompts: list[list[int]], group: int, seed: int) -> Answers:
        params = SamplingParams(temperature=1.0, n=group, max_tokens=MAX_TOKENS, logprobs=0, seed=seed)
        found: Answers = []
        for output in self._llm.generate(prompts, params, use_tqdm=False):
            found.append([])
            for answer in output.outputs:
                assert answer.logprobs is not None
                pairs = zip(answer.token_ids, answer.logprobs, strict=True)
                found[-1].append((list(answer.token_ids), [entry[token].logprob for token, entry in pairs]))
        return found

    def update(self, model: Any) -> None:
        self._llm.update_weights(model.state_dict())

    def close(self) -> None:
        self._llm.shutdown()


class Server:
    """``weft serve`` in a process of its own. New weights travel in files."""

    def __init__(self) -> None:
        import httpx

        self._folder = tempfile.TemporaryDirectory()
        flags = ["--device", "cpu", "--dtype", "float32", "--cpu-cache-gib", "0.2", "--max-num-seqs", "64"]
        flags += ["--port", "0", "--enable-admin-api", "--admin-key", "secret"]
        command = [sys.executable, "-m", "weft", "serve", *flags]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        url = next(line.split()[-1] for line in self._process.stderr if "http://" in line)
        threading.Thread(target=self._process.stderr.read, daemon=True).start()
        self._client = httpx.Client(base_url=url, timeout=300, headers={"Authorization": "Bearer secret"})
        while self._client.get("/ready").status_code != 200:
            time.sleep(0.2)

    def _complete(self, prompts: list[list[int]], **fields: Any) -> dict[str, Any]:
        body = {"prompt": prompts, "return_token_ids": True, "logprobs": 1} | fields
        response = self._client.post("/v1/completions", json=body)
        response.raise_for_status()
        found: dict[str, Any] = response.json()
        return found

    def cached_tokens(self, prompt: list[int]) -> int:
        return int(self._complete([prompt], max_tokens=1)["weft"]["prompts"][0]["cached_tokens"])

    def sample(self, prompts: list[list[int]], group: int, seed: int) -> Answers:
        answer = self._complete(prompts, n=group, temperature=1.0, max_tokens=MAX_TOKENS, seed=seed)
        pairs = [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in answer["choices"]]
        return [pairs[first : first + group] for first in range(0, len(pairs), group)]

    def update(self, model: Any) -> None:
        model.save_pretrained(self._folder.name)
        self._client.post("/update_weights_from_disk", json={"model_path": self._folder.name}).raise_for_status()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._folder.cleanup()


def load_trainer(noise: float) -> Any:
    """The trainer's model, with noise of this share of each matrix' own spread."""
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(locate(None), dtype=torch.float32)
    model.config.use_cache = False
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) * (noise * parameter.std()))
    return model.eval()


def sample(engine: InProcess | Server, tokenizer: Any, problems: list[Any], group: int, seed: int) -> list[Sample]:
    """Sample a group of answers to each problem, from the model's own distribution."""
    samples = []
    answers = engine.sample([prompt for prompt, _ in problems], group, seed)
    for (prompt, right), found in zip(problems, answers, strict=True):
        for tokens, logprobs in found:
            reward = 1.0 if extract_answer(tokenizer.decode(tokens, skip_special_tokens=True)) == str(right) else 0.0
            samples.append(Sample(prompt, tokens, logprobs, reward))
    return samples


def trainer_logprobs(model: Any, samples: list[Sample]) -> Tensor:
    """Log probabilities of the samples' tokens in the trainer, ``[N, MAX_TOKENS]``; 0 after the end of a sample."""
    longest = max(len(s.prompt) + len(s.tokens) for s in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, s in enumerate(samples):
        length = len(s.prompt) + len(s.tokens)
        ids[row, :length] = torch.tensor(s.prompt + s.tokens)
        mask[row, :length] = 1
    logprobs = model(ids, attention_mask=mask).logits.log_softmax(-1)
    chosen = logprobs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    rows = [chosen[row, len(s.prompt) - 1 : len(s.prompt) - 1 + len(s.tokens)] for row, s in enumerate(samples)]
    return torch.stack([F.pad(row, (0, MAX_TOKENS - len(row))) for row in rows])


def advantages(samples: list[Sample], group: int) -> Tensor:
    """Each reward less the mean of its group, over the group's spread."""
    rewards = torch.tensor([s.reward for s in samples]).view(-1, group)
    spread = rewards.std(dim=1, keepdim=True)
    return ((rewards - rewards.mean(dim=1, keepdim=True)) / (spread + 1e-4)).flatten()


def learn(model: Any, optimizer: Any, samples: list[Sample], group: int) -> Tensor:
    """Make one policy-gradient step. Returns the trainer's log probabilities before it."""
    logprobs = trainer_logprobs(model, samples)
    lengths = torch.tensor([len(s.tokens) for s in samples])
    loss = -(advantages(samples, group)[:, None] * logprobs).sum() / lengths.sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return logprobs.detach()


def differences(samples: list[Sample], trainer: Tensor) -> tuple[float, float]:
    """Mean and largest difference between the engine's log probabilities and the trainer's."""
    found = [(torch.tensor(s.logprobs) - trainer[row, : len(s.tokens)]).abs() for row, s in enumerate(samples)]
    every = torch.cat(found)
    return every.mean().item(), every.max().item()


def resident_mib() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) // 1024


def train(engine: InProcess | Server, model: Any, tokenizer: Any, args: argparse.Namespace) -> list[Step]:
    """Run the loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, args.steps)  # a constant one forgets again
    problems, steps = Problems(tokenizer, args.seed), []
    engine.update(model)
    for number in range(args.steps):
        began, batch = time.monotonic(), problems.draw(args.problems)
        stale = engine.cached_tokens(batch[0][0])  # nothing of these weights is cached yet
        samples = sample(engine, tokenizer, batch, args.group, number)
        mean_difference, largest = differences(samples, learn(model, optimizer, samples, args.group))
        rate.step()
        updating = time.monotonic()
        engine.update(model)
        update_ms = 1e3 * (time.monotonic() - updating)
        reward, seconds = mean(s.reward for s in samples), time.monotonic() - began
        steps.append(
            Step(reward, mean_difference, largest, stale, round(seconds, 2), round(update_ms, 1), resident_mib())
        )
        if number % 10 == 0 or number == args.steps - 1:
            print(f"step {number}: {steps[-1]}", flush=True)
    return steps


def summary(steps: list[Step]) -> dict[str, Any]:
    """The figures that decide: rewards at both ends, differences, stale prefixes, growth."""
    tenth = max(1, len(steps) // 10)
    return {
        "steps": len(steps),
        "first_reward": round(mean(s.reward for s in steps[:tenth]), 3),
        "last_reward": round(mean(s.reward for s in steps[-tenth:]), 3),
        "mean_difference": max(s.mean_difference for s in steps),
        "largest_difference": max(s.largest_difference for s in steps),
        "stale_hits": sum(s.stale_hits for s in steps),
        "median_update_ms": sorted(s.update_ms for s in steps)[len(steps) // 2],
        "resident_mib_after_a_tenth": steps[tenth].resident_mib if len(steps) > tenth else steps[-1].resident_mib,
        "resident_mib_at_the_end": steps[-1].resident_mib,
    }


def parse(argv: list[str] | None = None, *, description: str | None = __doc__, steps: int = 60) -> argparse.Namespace:
    """Parse flags, which ``grpo_trl.py`` has too. ``steps``: without a flag."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--problems", type=int, default=4)
    parser.add_argument("--group", type=int, default=6)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--noise", type=float, default=0.44)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server", action="store_true", help="generate in a server's process")
    parser.add_argument("--json")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the figures."""
    import transformers

    model = load_trainer(args.noise)
    tokenizer = transformers.AutoTokenizer.from_pretrained(locate(None))
    engine = Server() if args.server else InProcess()
    try:
        steps = train(engine, model, tokenizer, args)
    finally:
        engine.close()
    return {"summary": summary(steps), "each_step": [asdict(step) for step in steps]}


def main() -> None:
    args = parse()
    target = report.open_json(args.json)
    found = run(args)
    print(json.dumps(found["summary"], indent=1))
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    report.write_json(target, report.provenance("cpu") | {"settings": settings} | found)


if __name__ == "__main__":
    main()
