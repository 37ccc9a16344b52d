"""Conversations that return to pools far too small, against transformers: ``make fuzz-restores``.

Every seed is one engine with random settings. Its prompts come back again and again, so that nearly every prompt is
restored. Half of the engines have files. Engines with files are killed (SIGKILL) at a random moment and started again
on the same folder, after some files were truncated or had a bit flipped. Some of their disks are full at times. Some
have two ranks.

    python -m tests.fuzz_restores [--restores 10000] [--seconds 900] [--first 0] [--json FILE]

Every answer must have the tokens of a cold run of transformers in float32. A failure says its seed.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests import x_matrix as matrix
from tests.engine.conftest import assert_idle
from tests.offload.always import AlwaysRestore
from tests.ranks import fork_ranks
from weft import LLM, SamplingParams
from weft.bench import report
from weft.cache.spec import CacheSpec
from weft.config import resolve
from weft.offload import disk

KINDS = ("Qwen3Next", "Qwen3_5", "Lfm2", "Bamba", "KimiLinear", "Mamba2", "Jamba", "MiniMax", "BailingHybrid", "GptOss")
WITH_RANKS = (matrix.HYBRID, matrix.DENSE)
ARCHITECTURES = (*(f"{kind}ForCausalLM" for kind in KINDS), matrix.DENSE, matrix.WITH_HEAD)
CONTEXT, VOCAB, NEW_TOKENS, NUM_SETS = 160, 200, 3, 2
RETURNS = 100
TOLERANCE = 2e-3
"""Logits closer than this may swap places: sums are rounded in another order than in the reference."""


@dataclass(frozen=True)
class Turn:
    """A prompt, and the tokens that follow in a cold run."""

    prompt: list[int]
    answer: list[int]


def turns_of(reference: matrix.Reference, seed: int) -> list[Turn]:
    """Three turns of each of eight conversations, half of which share their beginning."""
    rng, turns = random.Random(seed), []
    shared = [rng.randrange(VOCAB) for _ in range(rng.randint(5, 60))]
    for number in range(8):
        prompt = (shared if number % 2 else []) + [rng.randrange(VOCAB) for _ in range(rng.randint(3, 60))]
        for _ in range(3):
            turns.append(Turn(prompt, reference(prompt, NEW_TOKENS)))
            prompt = prompt + turns[-1].answer + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
    return turns


def settings_of(seed: int, arch: str, model: str, folder: str) -> dict[str, Any]:
    """Settings of the engine of one seed: a pool for one context, and host memory for a few."""
    rng = random.Random(seed)
    page_size, seqs = rng.choice([1, 4, 16]), rng.randint(1, 3)
    settings: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "page_size": page_size,
        "max_model_len": CONTEXT, "num_kv_pages": 2 + -(-CONTEXT // page_size), "max_num_seqs": seqs,
        "max_num_batched_tokens": rng.choice([24, 64, 200]), "eviction_policy": rng.choice(["flops", "lru"]),
        "state_checkpoint_policy": rng.choice(["exact", "exact", "exact", "aligned", "finish_only"]),
        "enable_overlap": rng.random() < 0.7, "cuda_graph_mode": rng.choice(["NONE", "NONE", "NONE", "FULL"]),
        "kv_offloading_policy": rng.choice(["write_back"] * 4 + ["write_through_selective"]),
    }  # fmt: skip
    if settings["cuda_graph_mode"] == "FULL":
        settings |= {"cuda_graph_bs": [1, 2, 4], "piecewise_cuda_graph_tokens": [8, 32]}
    if arch == matrix.WITH_HEAD:
        settings["speculative_config"] = matrix.drafts_of(arch)
    elif seqs > 1 and rng.random() < 0.2:
        settings["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}
    drafts = settings.get("speculative_config", {}).get("num_speculative_tokens", 0)
    spec = CacheSpec.of(resolve(model=model, **settings))
    if spec.has_states:
        settings["num_state_slots"] = seqs * (1 + drafts) + rng.choice([2, 3, 6])
    contexts = rng.choice([3, 6, 12, 30])
    slots = 4 * contexts * (spec.slot_bytes + spec.page_bytes)  # a quarter of the memory is for states
    size = contexts * CONTEXT * spec.kv_bytes_per_token + 4 * slots
    settings["kv_offloading_size"] = (size + 5 * spec.page_bytes) / 2**30
    if folder:
        settings["kv_offloading_dir"] = folder
        if arch in WITH_RANKS and rng.random() < 0.5:
            settings["tensor_parallel_size"] = 2  # which share the memory
    return settings


class Life:
    """One process of an engine: prompts come back until it ends or is killed."""

    def __init__(self, seed: int, life: int, reference: matrix.Reference, settings: dict[str, Any]) -> None:
        self.rng = random.Random(1000 * seed + life)
        self.reference, self.settings = reference, settings
        self.counts: Counter[str] = Counter()

    def run(self, turns: list[Turn]) -> Iterator[Counter[str]]:
        """Serve the turns in random order. Yields what happened since the last time."""
        rng, told = self.rng, Counter[str]()
        with fork_ranks(), LLM(str(self.reference.folder), **self.settings) as llm:
            engine = matrix.Poisoned(llm, self.reference, self.settings["enable_overlap"])
            restores = llm._core.scheduler.restores
            assert restores is not None
            restores.tier.costs = AlwaysRestore()
            restores._slice_pages = rng.randint(1, 20)
            for _ in range(RETURNS):
                self.serve(engine, [rng.choice(turns) for _ in range(rng.choice([1, 1, 2, 3]))])
                counts = self.counts + tier_counts(llm)
                yield counts - told
                told = counts
            assert_idle(llm)

    def serve(self, engine: matrix.Poisoned, turns: list[Turn]) -> None:
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        sent = {engine.llm.add_request({"prompt_token_ids": turn.prompt}, params): turn for turn in turns}
        if self.rng.random() < 0.05:
            engine.llm.step()
            self.counts["aborted"] += engine.llm.abort(next(iter(sent))) is not None
        while not engine.llm.is_finished():
            for output in engine.llm.step():
                if output.finished:
                    self.check(sent[output.request_id], list(output.outputs[0].token_ids))
            engine.llm._core.scheduler.check()
        engine.steps.clear()

    def check(self, turn: Turn, tokens: list[int]) -> None:
        self.counts["requests"] += 1
        if tokens == turn.answer:
            return
        at = next(i for i, (token, expected) in enumerate(zip(tokens, turn.answer, strict=True)) if token != expected)
        with torch.no_grad():
            logits = self.reference._model(torch.tensor([turn.prompt + tokens[:at]]), use_cache=False).logits[0, -1]
        lag = float(logits.max() - logits[tokens[at]])
        assert lag <= TOLERANCE, f"{tokens} instead of {turn.answer}, {lag:.3g} behind, after {len(turn.prompt)} tokens"
        self.counts["near_ties"] += 1


def tier_counts(llm: LLM) -> Counter[str]:
    stats = llm.stats()
    return Counter(
        restores=stats.num_restores - stats.num_failed_restores, failed_restores=stats.num_failed_restores,
        restored_tokens=stats.num_external_hit_tokens, files_read=stats.num_disk_loads,
        files_written=stats.num_disk_saves, rejected_files=stats.num_rejected_files,
        failed_writes=stats.num_failed_saves,
    )  # fmt: skip


def fill_disk(rng: random.Random) -> None:
    """Let some writes fail, as on a full disk."""
    write, share = disk.write, rng.choice([0.0, 0.0, 0.3])

    def full(*args: Any) -> None:
        if random.random() < share:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*args)

    disk.write = full  # type: ignore[assignment]


def damage(folder: Path, rng: random.Random) -> int:
    """Truncate some files of the folder, or flip a bit of them. Returns their number."""
    files = sorted(folder.glob("*/*/*"))
    chosen = rng.sample(files, min(len(files), rng.choice([0, 2, len(files) // 20])))
    for path in chosen:
        content = bytearray(path.read_bytes())
        if content and rng.random() < 0.5:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        else:
            del content[rng.randint(0, len(content)) :]
        path.write_bytes(content)
    return len(chosen)


def in_a_process(life: Life, turns: list[Turn], kill_after: int | None) -> tuple[Counter[str], str]:
    """Run a life in a forked process, and kill that after so many reports. Returns its counts and its failure."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.close(reader)
        with os.fdopen(writer, "w", buffering=1) as file:
            try:
                if "kv_offloading_dir" in life.settings:
                    fill_disk(life.rng)
                for counts in life.run(turns):
                    file.write(json.dumps(counts) + "\n")
            except BaseException:
                file.write(json.dumps({"failure": traceback.format_exc()}) + "\n")
        os._exit(0)
    os.close(writer)
    found, failure = Counter[str](engines=1), ""
    with os.fdopen(reader) as file:
        for number, line in enumerate(file):
            if "failure" in (values := json.loads(line)):
                failure = values["failure"]
            else:
                found.update(values)
            if number == kill_after:
                os.kill(child, signal.SIGKILL)
                found["killed"] += 1
                break
    os.waitpid(child, 0)
    return found, failure


def run_seed(seed: int, arch: str, reference: matrix.Reference) -> tuple[Counter[str], str]:
    """All lives of one engine."""
    rng, found, failure = random.Random(seed), Counter[str](), ""
    turns = turns_of(reference, seed % NUM_SETS)
    with tempfile.TemporaryDirectory(prefix="weft-tier-") as folder:
        lives = rng.choice([1, 2, 4]) if seed // len(ARCHITECTURES) % 2 else 0
        settings = settings_of(seed, arch, str(reference.folder), folder if lives else "")
        for number in range(max(1, lives)):
            kill_after = rng.randrange(RETURNS) if number < lives - 1 else None
            counts, failure = in_a_process(Life(seed, number, reference, settings), turns, kill_after)
            found += counts + Counter(damaged_files=damage(Path(folder), rng))
            if failure:
                break
    return found, f"{failure}\n  settings {settings}" if failure else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restores", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=900, help="start no engine after that time")
    parser.add_argument("--first", type=int, default=0, help="seed of the first engine")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path, began = report.open_json(args.json), time.monotonic()
    kinds: dict[str, Counter[str]] = {arch: Counter() for arch in ARCHITECTURES}
    failed: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        references = {arch: matrix.make_reference(arch, Path(folder) / arch) for arch in ARCHITECTURES}
        for seed in itertools.count(args.first):
            total = sum(kinds.values(), Counter[str]())
            if total["restores"] >= args.restores or time.monotonic() - began > args.seconds:
                break
            arch = ARCHITECTURES[seed % len(ARCHITECTURES)]
            counts, failure = run_seed(seed, arch, references[arch])
            kinds[arch] += counts
            if failure:
                failed.append(seed)
                print(f"seed {seed}, {arch}: {failure}", flush=True)
            figures = {"seconds": round(time.monotonic() - began), "failed": failed, "total": total + counts}
            report.write_json(path, report.provenance("cpu") | figures | {"kinds": kinds})
    print(", ".join(f"{key.replace('_', ' ')}: {value}" for key, value in total.items()), f"; failed: {failed}")
    if failed or total["restores"] * 2 < args.restores:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
