"""Train the bundled model from scratch on one GPU.

Owns the optimiser, the schedule, checkpoints and the log. Knows nothing of how data is made or layers are computed.
Run: python -m demo.train --out /tmp/weft-mini
The same command continues from the last checkpoint: weights, optimiser and place in the data.
"""

import argparse
import json
import math
import multiprocessing
import os
import shutil
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoTokenizer

from demo import data, evaluate, geometry, make_eval
from demo.model import Trainable

WARMUP, FLOOR = 300, 0.02  # steps to the full rate; the last rate as a share of the full rate
LATE = 9  # a run that starts from weights sees the last tenth of a curriculum, where every kind comes in full
AHEAD = 48  # batches being made while others are trained on
LOG_EVERY = 100


def learning_rate(step: float, total: int, peak: float) -> float:
    """Linear warmup, then a cosine to FLOOR of the peak."""
    if step < WARMUP:
        return peak * (step + 1) / WARMUP
    done = (step - WARMUP) / max(1, total - WARMUP)
    return peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * done)))


def batches(seed: int, start: int, total: int, workers: int, long_only: bool = False) -> Iterator[tuple]:
    """Batches from `start` on, in order, made by other processes a little ahead of their use."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        waiting: deque = deque()
        for index in range(start, total + AHEAD):
            if long_only and data.bucket_of(index, total) is data.SHORT:
                continue
            if index < total:
                waiting.append(pool.submit(data.batch, seed, index, total))
            if index >= start + AHEAD or index >= total:
                if not waiting:
                    return
                yield waiting.popleft().result()


class Trainer:
    """Weights, optimiser and one captured training step per bucket shape."""

    first_batch = 0  # its place in the data

    def __init__(self, args: argparse.Namespace):
        self.args, self.device = args, torch.device(args.device)
        cuda = self.device.type == "cuda"
        self.model, self.trainable = self.build(torch.bfloat16 if cuda else torch.float32, cuda and not args.eager)
        self.rate = torch.tensor(args.rate, device=self.device)
        self.optimiser = self._new_optimiser()
        self.losses = torch.zeros(3, device=self.device)  # sums of loss, of balance; number of steps
        self.graphs: dict[tuple, tuple] = {}
        self.step = 0

    def build(self, dtype: torch.dtype, compiled: bool) -> tuple[torch.nn.Module, Trainable]:
        """Return the module to train, and its loss in `dtype`."""
        if self.args.start is None:
            model = geometry.new_model(self.args.seed).to(self.device)
        else:
            self.first_batch = LATE * self.args.steps
            model = geometry.started_from(self.args.start).to(self.device)
        return model, Trainable(model, dtype, compiled)

    def _new_optimiser(self) -> torch.optim.AdamW:
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": self.args.decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        capturable = self.device.type == "cuda"
        return torch.optim.AdamW(groups, lr=self.rate, betas=(0.9, 0.95), fused=True, capturable=capturable)

    def train_on(self, ids: torch.Tensor, labels: torch.Tensor) -> None:
        """One step, computed directly."""
        self.optimiser.zero_grad(set_to_none=True)
        loss, balance = self.trainable.loss(ids, labels)
        (loss + self.args.balance * balance).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.losses += torch.stack([loss.detach(), balance.detach(), torch.ones_like(loss)])

    def capture(self) -> None:
        """Record a step per bucket as a CUDA graph: launching thousands of small kernels one by one is the slow part.

        The trial steps this takes spoil weights and optimiser, so `restore` must follow.
        """
        for bucket in (data.LONG,) if self.args.finish else (data.SHORT, data.LONG):
            shape = (bucket.rows, bucket.length)
            ids = torch.randint(0, 2000, shape, device=self.device, dtype=torch.int16)
            labels = ids.clone()
            started = time.time()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self.train_on(ids, labels)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.train_on(ids, labels)
            self.graphs[shape] = (graph, ids, labels)
            print(f"captured {shape} in {time.time() - started:.0f} s", flush=True)

    def run_step(self, ids, labels, spent: float = 0.0) -> None:
        """One step on a batch of numpy arrays; `spent` is the share of the time, for runs that must end with it."""
        ids, labels = torch.from_numpy(ids), torch.from_numpy(labels)
        place = max(self.step, spent * self.args.steps)
        for group in self.optimiser.param_groups:
            group["lr"].fill_(learning_rate(place, self.args.steps, self.args.rate))
        if (captured := self.graphs.get(tuple(ids.shape))) is None:
            self.train_on(ids.to(self.device), labels.to(self.device))
        else:
            graph, static_ids, static_labels = captured
            static_ids.copy_(ids.pin_memory(), non_blocking=True)
            static_labels.copy_(labels.pin_memory(), non_blocking=True)
            graph.replay()
        self.step += 1

    @torch.no_grad()
    def restore(self, weights: dict, moments: dict | None, step: int) -> None:
        """Put weights and optimiser back in place; a new run starts with empty moments."""
        self.step = step
        for name, p in self.model.named_parameters():
            p.copy_(weights[name])
            for key, tensor in self.optimiser.state[p].items():
                tensor.zero_() if moments is None else tensor.copy_(moments[name][key])
        self.losses.zero_()

    def save(self) -> None:
        """The checkpoint to continue from, and the model folder as it would be published now."""
        if not self.args.finish:
            self._save_checkpoint()
        folder = self.args.out / "model"
        folder.mkdir(exist_ok=True)
        self.publish(folder)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(data.MODEL_DIR / name, folder / name)

    def _save_checkpoint(self) -> None:
        named = dict(self.model.named_parameters())
        moments = {name: dict(self.optimiser.state[p]) for name, p in named.items()}
        state = {"step": self.step, "weights": {n: p.data for n, p in named.items()}, "moments": moments}
        torch.save(state, self.args.out / "checkpoint.tmp")
        os.replace(self.args.out / "checkpoint.tmp", self.args.out / "checkpoint.pt")

    def publish(self, folder: Path) -> None:
        """Write weights and configurations as they are published."""
        geometry.save(self.model, folder)

    @cached_property
    def dev_problems(self) -> list[dict]:
        return make_eval.dev_records(self.args.dev)

    def check(self) -> dict:
        """Greedy accuracy on the development set, with the weights as they are."""
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        self.model.eval()
        texts = evaluate.replies(self.model, AutoTokenizer.from_pretrained(data.MODEL_DIR), self.dev_problems)
        torch.set_float32_matmul_precision(precision)
        figures = evaluate.score(self.dev_problems, texts)
        for miss in figures["wrong"][-8:]:
            print(f"  {miss['question']} -> {miss['reply']!r}", flush=True)
        return {"dev_accuracy": figures["seen_templates"], "dev_new_wordings": figures["unseen_templates"]}


def prepare(args: argparse.Namespace, kind: type[Trainer] = Trainer) -> Trainer:
    """A trainer at its starting point: new, or where the checkpoint left off."""
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = kind(args)
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    if trainer.device.type == "cuda" and not args.no_graph:
        trainer.capture()
    else:
        trainer.train_on(*(torch.zeros(1, 64, dtype=torch.int16, device=args.device) for _ in range(2)))
    saved = args.out / "checkpoint.pt"
    if saved.exists():
        state = torch.load(saved, map_location="cpu")
        trainer.restore(state["weights"], state["moments"], state["step"])
        print(f"continuing at step {trainer.step}", flush=True)
    else:
        trainer.restore(weights, None, 0)
    return trainer


class Log:
    """Lines of figures, printed and kept in log.jsonl."""

    def __init__(self, path: Path):
        self.path, self.started, self.tokens = path, time.time(), 0

    def write(self, **figures) -> None:
        """Add a line."""
        line = json.dumps({"seconds": round(time.time() - self.started, 1), **figures})
        print(line, flush=True)
        with self.path.open("a") as file:
            file.write(line + "\n")


def train(args: argparse.Namespace, kind: type[Trainer] = Trainer) -> None:
    """The run: steps, and between them the log, the checks and checkpoints."""
    torch.set_float32_matmul_precision("high")
    trainer, log = prepare(args, kind), Log(args.out / "log.jsonl")
    first = trainer.first_batch
    next_check, last_step, last_time = args.check_every * 60, trainer.step, time.time()
    limit = args.minutes * 60
    for ids, labels in batches(args.seed, first + trainer.step, first + args.steps, args.workers, args.finish):
        trainer.run_step(ids, labels, (time.time() - log.started) / limit if args.finish else 0.0)
        log.tokens += int((labels >= 0).sum())
        seconds = time.time() - log.started
        if trainer.step % LOG_EVERY == 0:
            loss, balance, count = trainer.losses.tolist()
            trainer.losses.zero_()
            speed = (trainer.step - last_step) / (time.time() - last_time)
            last_step, last_time = trainer.step, time.time()
            log.write(step=trainer.step, loss=round(loss / count, 5), balance=round(balance / count, 4),
                      steps_per_second=round(speed, 2), learned_tokens=log.tokens)  # fmt: skip
        if seconds > next_check:
            log.write(step=trainer.step, **trainer.check())
            trainer.save()
            next_check, last_step, last_time = seconds + args.check_every * 60, trainer.step, time.time()
        if seconds > limit:
            break
    trainer.save()
    log.write(step=trainer.step, **trainer.check(), done=trainer.step == args.steps)


def parser(description: str, steps: int, rate: float) -> argparse.ArgumentParser:
    """The flags of a training run."""
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument("--out", type=Path, required=True, help="checkpoint, log and model folder go here")
    flags.add_argument("--steps", type=int, default=steps)
    flags.add_argument("--minutes", type=float, default=60, help="stop (to be continued) after this long")
    flags.add_argument("--finish", action="store_true", help="long rows only; end within --minutes, the rate falling")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--rate", type=float, default=rate)
    flags.add_argument("--decay", type=float, default=0.1)
    flags.add_argument("--balance", type=float, default=0.01, help="weight of the router's auxiliary loss")
    flags.add_argument("--dev", type=int, default=96, help="problems in the development set")
    flags.add_argument("--check-every", type=float, default=2.5, help="minutes between checks")
    flags.add_argument("--workers", type=int, default=6)
    flags.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    flags.add_argument("--eager", action="store_true", help="do not compile")
    flags.add_argument("--no-graph", action="store_true", help="do not capture CUDA graphs")
    return flags


if __name__ == "__main__":
    flags = parser(__doc__.splitlines()[0], steps=8000, rate=2e-3)
    flags.add_argument("--start", type=Path, help="go on from the weights of a published folder, with data in full")
    train(flags.parse_args())
