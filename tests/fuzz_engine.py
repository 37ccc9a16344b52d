"""Random traffic at whole engines, against transformers: ``make fuzz-engine``.

Job: run one engine per seed, with random settings and pools hardly larger than its context. Requests branch off each
other's prompts and outputs, and there are aborts and preemptions. The invariants are checked after every step. Each
token of a request that ends is checked against the reference's logits for the very tokens before it. Owns: the settings
and the traffic. Does not know: how the engine works, beyond where its pools are.

    python -m tests.fuzz_engine [--seconds 110] [--first 0] [--count N] [--requests N] [--jobs N] [--drafts]
                                [--json FILE] [--device cpu]

A failure says its seed; ``--first SEED --count 1`` repeats it (with ``--drafts`` if every engine had drafts). A time
that ends before half of ``--count`` engines, or of ``--requests``, have run is a failure too.
``make fuzz-speculation`` sends 10,000 requests to engines that all have drafts, in ``JOBS`` processes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.drafters import ByModel, Random, install
from tests.engine.conftest import assert_idle
from tests.engine.simulator import penalised
from tests.fuzz_references import ARCHITECTURES, Reference
from tests.late_compiler import LateCompiler
from tests.late_device import LateDevice
from tests.tiny_tokenizer import EOS_ID, VOCAB_SIZE
from weft import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from weft.bench import report
from weft.messages import SchedulerOutput
from weft.ops.sampling import exponential_noise

MODES = ("NONE", "NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "FULL")
CHOICES = ["one two three", "four", "five six"]
TOLERANCE = 2e-3
"""Logits closer than this may swap places: sums are rounded in another order than in the reference."""
MAX_STEPS = 4000
UNLIMITED = 10**9


@dataclass
class Sent:
    """A request on its way."""

    prompt: list[int]
    params: SamplingParams
    aborted: bool = False


@dataclass
class Episode:
    """One engine and its traffic, all from one seed."""

    seed: int
    references: dict[str, Reference]
    device: str = "cpu"
    always_drafts: bool = False
    sent: dict[str, Sent] = field(default_factory=dict)
    num_tokens: int = 0
    num_late: int = 0
    num_preemptions: int = 0
    num_accepted: int = 0
    num_verified: int = 0
    num_cached: int = 0
    num_followed: int = 0
    method: str = "none"

    def run(self) -> None:
        self.rng = rng = random.Random(self.seed)
        self.reference = self.references[rng.choice(list(self.references))]
        self.settings = self._settings()
        self.corpus = [[rng.randrange(3, VOCAB_SIZE) for _ in range(self.context)]]
        with LLM(str(self.reference.folder), **self.settings) as self.llm:
            self.compiler, late = LateCompiler(self.llm, random.Random(self.seed)), None
            if self.device == "cpu" and rng.random() < 0.7:
                late = LateDevice(self.llm, rng if rng.random() < 0.7 else None, self._poison)
            self.method = self.settings.get("speculative_config", {}).get("method", "none")
            if self.method == "ngram":
                self._install_drafter()
            self._traffic()
            if late is not None:
                self.num_late, self.num_followed = late.num_late, late.num_followed
            stats = self.llm.stats()
            self.num_preemptions = stats.num_preemptions
            self.num_accepted = stats.spec_decode_num_accepted_tokens
            self.num_verified = stats.spec_decode_num_draft_tokens
            assert stats.num_stalls == 0
            assert_idle(self.llm)

    def _settings(self) -> dict[str, Any]:
        rng = self.rng
        page_size, self.context = rng.choice([1, 4, 16, 16]), rng.choice([48, 96, 160])
        pages = -(-self.context // page_size)
        seqs = rng.randint(1, 5)
        mode = rng.choice(MODES)
        settings: dict[str, Any] = {
            "device": self.device,
            "dtype": "float32",
            "page_size": page_size,
            "max_model_len": self.context,
            "num_kv_pages": 1 + pages + rng.choice([0, 1, pages // 2, 3 * pages]),
            "num_state_slots": rng.choice([None, seqs + 1, seqs + 3, seqs + 8]),
            "max_num_seqs": seqs,
            "max_num_batched_tokens": max(seqs, rng.choice([8, 24, 64, 200])),
            "schedule_policy": rng.choice(["fcfs", "fcfs", "priority", "lpm"]),
            "state_checkpoint_policy": rng.choice(["exact", "exact", "aligned", "finish_only"]),
            "eviction_policy": rng.choice(["flops", "lru"]),
            "enable_prefix_caching": rng.random() < 0.9,
            "enable_overlap": rng.random() < 0.7,
            "cuda_graph_mode": mode,
            "seed": self.seed,
        }
        if not settings["enable_prefix_caching"]:
            del settings["state_checkpoint_policy"], settings["eviction_policy"]
            if settings["schedule_policy"] == "lpm":  # refused without a cache
                settings["schedule_policy"] = "fcfs"
        if rng.random() < 0.5 or self.always_drafts:
            low = rng.randint(1, 2)
            method = {"method": "ngram", "prompt_lookup_min": low}
            if self.reference.has_head and rng.random() < 0.5:
                method = {"method": "mtp"}
            settings["speculative_config"] = method | {"num_speculative_tokens": rng.randint(1, 6)}
        if "FULL" in mode:
            settings["cuda_graph_bs"] = [1, 2, 4]
        if mode in ("PIECEWISE", "FULL_AND_PIECEWISE", "FULL"):
            settings["piecewise_cuda_graph_tokens"] = [8, 32]
        return {name: value for name, value in settings.items() if value is not None}

    def _install_drafter(self) -> None:
        """Keep the configured drafter, or install a random drafter or a drafter that is mostly right."""
        choice = self.rng.random()
        if choice < 0.3:
            self.method = "random"
            install(self.llm, Random(self.rng))
        elif choice < 0.6:
            self.method = "mostly right"
            install(self.llm, self._mostly_right())

    def _mostly_right(self) -> Any:
        """A drafter that knows the reference's tokens, and is wrong now and then."""
        return ByModel(lambda tokens: int(self.reference.logits(tokens)[-1].argmax()), self.rng)

    def _poison(self, step: SchedulerOutput) -> None:
        """Fill memory that nobody owns with NaN when a step runs, however late it runs."""
        manager, runner = self.llm._core.manager, self.llm._core._executor._runner  # type: ignore[attr-defined]
        pages, slots = torch.tensor([0, *manager.pages._free]), torch.tensor([0, *manager.slots._free])
        for name, spec in runner.spec.layers.items():
            for tensors, unowned in ((spec.paged, pages), (spec.states, slots)):
                for tensor in tensors:
                    with torch.inference_mode():
                        runner.caches[name][tensor.name].index_fill_(0, unowned, float("nan"))

    # -- traffic -----------------------------------------------------------------------------------------------------

    def _traffic(self) -> None:
        rng, total = self.rng, self.rng.randint(5, 32 if self.always_drafts else 16)
        for _ in range(MAX_STEPS):
            if len(self.sent) < total and (rng.random() < 0.4 or self.llm.is_finished()):
                self._send()
            elif self.llm.is_finished():
                return
            if rng.random() < 0.03 and self.llm._streams:
                name = rng.choice(list(self.llm._streams))
                self.sent[name].aborted = True
                output = self.llm.abort(name)
                assert output is not None
                self._ended(output)
            self.compiler.run_some()
            for output in self.llm.step():
                if output.finished:
                    self._ended(output)
            self.llm._core.scheduler.check()
        raise AssertionError(f"no end after {MAX_STEPS} steps: {self.llm.stats()}")

    def _send(self) -> None:
        rng, name = self.rng, f"r{len(self.sent)}"
        base = rng.choice(self.corpus)
        tokens = base[: rng.randint(0, len(base))]
        tokens = tokens + [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice([0, 1, 2, 17, 40]))]
        tokens = tokens[: self.context - 1] or [5]
        params = self._params(tokens)
        prompt: dict[str, Any] = {"prompt_token_ids": tokens}
        if rng.random() < 0.4:
            count = rng.randint(0, min(3, len(tokens)))
            prompt["checkpoint_positions"] = sorted(rng.sample(range(1, len(tokens) + 1), count))
        if rng.random() < 0.15:
            prompt["cache_salt"] = rng.choice("ab")
        self.sent[name] = Sent(tokens, params)
        self.llm.add_request(prompt, params, request_id=name, priority=rng.randint(0, 2))

    def _params(self, tokens: list[int]) -> SamplingParams:
        rng, room = self.rng, self.context - len(tokens)
        values: dict[str, Any] = {"max_tokens": rng.choice([1, room, rng.randint(1, room)])}
        values["ignore_eos"] = rng.random() < 0.7
        values["temperature"] = rng.choice([0.0, 0.0, 0.7, 1.3])
        values["seed"] = rng.randrange(2**32)
        values["n"] = rng.choice([1, 1, 1, 1, 2, 3])
        if rng.random() < 0.3:
            values |= {"logprobs": rng.randint(0, 3)}
        if rng.random() < 0.2:
            values |= {"prompt_logprobs": rng.randint(0, 2)}
        if rng.random() < 0.2:
            values["ignore_eos"] = False
            values["structured_outputs"] = StructuredOutputsParams(choice=CHOICES)
        elif rng.random() < 0.3:
            values |= {
                "repetition_penalty": rng.choice([1.0, 1.2]),
                "frequency_penalty": rng.choice([0.0, 0.4]),
                "presence_penalty": rng.choice([0.0, -0.3]),
                "logit_bias": {rng.randrange(VOCAB_SIZE): rng.choice([-5.0, 3.0])},
            }
        return SamplingParams(**values)

    # -- what came of it ---------------------------------------------------------------------------------------------

    def _ended(self, output: RequestOutput) -> None:
        sent = self.sent[output.request_id]
        self.num_cached += output.num_cached_tokens or 0
        assert len(output.outputs) == sent.params.n
        for i, completion in enumerate(output.outputs):
            tokens = list(completion.token_ids)
            where = f"{output.request_id}[{i}] {sent.params}: {len(sent.prompt)} prompt tokens, then {tokens}"
            self._check_end(sent, tokens, completion.finish_reason, completion.text, where)
            if tokens:
                self._check_tokens(sent, i, tokens, completion, where)
            self.corpus.append(sent.prompt + tokens)
        if sent.params.prompt_logprobs is not None and not sent.aborted:
            expected = self.reference.logits(sent.prompt).log_softmax(-1)
            for position, entry in enumerate(output.prompt_logprobs or []):
                if position:
                    token = sent.prompt[position]
                    assert abs(entry[token].logprob - float(expected[position - 1, token])) < TOLERANCE, where
        self.corpus = self.corpus[-12:]

    def _check_end(self, sent: Sent, tokens: list[int], reason: str | None, text: str, where: str) -> None:
        if sent.aborted and reason == "abort":
            return
        if sent.params.structured_outputs is not None:
            assert reason in ("stop", "length") and any(c.startswith(text) for c in CHOICES), f"{text!r} {where}"
            assert reason != "stop" or text in CHOICES, where
        elif not sent.params.ignore_eos and tokens[-1] == EOS_ID:
            assert reason == "stop", where
        else:
            assert reason == "length" and len(tokens) == sent.params.max_tokens, f"{reason} {where}"
        if not sent.params.ignore_eos or sent.params.structured_outputs is not None:
            assert EOS_ID not in tokens[:-1], where

    def _check_tokens(self, sent: Sent, index: int, tokens: list[int], completion: Any, where: str) -> None:
        params, self.num_tokens = sent.params, self.num_tokens + len(tokens)
        raw = self.reference.logits(sent.prompt + tokens[:-1])[len(sent.prompt) - 1 :]
        for place, token in enumerate(tokens):
            if completion.logprobs is not None:
                entry = completion.logprobs[place][token].logprob
                assert abs(entry - float(raw[place].log_softmax(-1)[token])) < TOLERANCE, (
                    f"log probability {place} {where}"
                )
            if params.structured_outputs is None:
                lag = self._lag(sent, index, raw[place], tokens[:place], token)
                assert lag <= TOLERANCE, f"token {place} is {lag:.3g} behind the reference's: {where}"

    def _lag(self, sent: Sent, index: int, raw: torch.Tensor, before: list[int], token: int) -> float:
        """By how much the reference would rather have taken another token: in logits, or in those plus noise."""
        params, logits = sent.params, raw.tolist()
        for biased, value in (params.logit_bias or {}).items():
            logits[biased] += value
        logits = penalised(
            logits,
            sent.prompt,
            before,
            params.repetition_penalty or 1.0,
            params.frequency_penalty,
            params.presence_penalty,
        )
        scores = torch.tensor(logits)
        if params.temperature:
            assert params.seed is not None
            seeds = torch.tensor([_seed_of(params.seed, index)])
            noise = exponential_noise(seeds, torch.tensor([len(before)]), len(logits))[0]
            scores = scores / params.temperature - noise.log()
        return float(scores.max() - scores[token])

    def figures(self) -> Counter[str]:
        """Count the traffic and its results."""
        return Counter(
            {
                "engines": 1,
                f"engines with drafts by {self.method}": 1,
                "requests": len(self.sent),
                "aborted": sum(sent.aborted for sent in self.sent.values()),
                "tokens": self.num_tokens,
                "cached_prompt_tokens": self.num_cached,
                "preemptions": self.num_preemptions,
                "steps_that_ran_late": self.num_late,
                "steps_that_followed": self.num_followed,
                "verified_drafts": self.num_verified,
                "accepted_drafts": self.num_accepted,
            }
        )


def _seed_of(seed: int, index: int) -> int:
    from weft.engine.input_processor import _sample_seed

    value = _sample_seed(seed, index)
    return value - 2**64 if value >= 2**63 else value


REFERENCES: dict[str, Reference] = {}
"""The references of this process."""


def prepare(folder: str) -> None:
    """Make the references of a process."""
    torch.set_num_threads(1)
    own = Path(tempfile.mkdtemp(dir=folder))
    REFERENCES.update({arch: Reference(arch, own / arch) for arch in dict.fromkeys(ARCHITECTURES)})


def run_seed(seed: int, device: str, always_drafts: bool) -> tuple[int, Counter[str], str]:
    """One episode: its seed, figures, and what failed (empty if nothing did)."""
    episode, failure = Episode(seed, REFERENCES, device, always_drafts), ""
    try:
        episode.run()
    except Exception as error:
        failure = f"{type(error).__name__}: {error}\n  settings {episode.settings}"
    return seed, episode.figures(), failure


def in_turn(args: argparse.Namespace, folder: str) -> Iterator[tuple[int, Counter[str], str]]:
    """The episodes in this process."""
    prepare(folder)
    for seed in range(args.first, args.first + args.count):
        yield run_seed(seed, args.device, args.drafts)


def side_by_side(args: argparse.Namespace, folder: str) -> Iterator[tuple[int, Counter[str], str]]:
    """Run the episodes in ``args.jobs`` processes, and yield them in the order in which they end. Episodes that have
    not started when the caller has enough are cancelled."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(args.jobs, context, prepare, (folder,))
    seeds, running = iter(range(args.first, args.first + args.count)), set[Future[Any]]()
    try:
        while True:
            for seed in seeds:
                running.add(pool.submit(run_seed, seed, args.device, args.drafts))
                if len(running) == 2 * args.jobs:
                    break
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    finally:
        pool.shutdown(cancel_futures=True)


def conclude(found: Counter[str], failed: list[int], name: str, wanted: int) -> int:
    """Say what came, and by how much the time was too short for ``wanted`` of ``name``. Returns an exit status: 1 if a
    seed failed, or if not even half of a number that was asked for has run."""
    print(", ".join(f"{key.replace('_', ' ')}: {value}" for key, value in found.items()), f"; failed: {failed}")
    if wanted == UNLIMITED or found[name] >= wanted:
        return 1 if failed else 0
    too_few = found[name] * 2 < wanted
    print(f"the time ended after {found[name]} of {wanted} {name}" + (", less than half" if too_few else ""))
    return 1 if failed or too_few else 0


def run_for(
    seconds: float,
    description: str,
    references: Callable[[Path], dict[str, Any]],
    start: Callable[[int, dict[str, Any]], Episode],
    arguments: list[str] | None,
) -> int:
    """Run episodes in turn, each from its seed and the references, which are made once in a folder. Episodes start for
    ``seconds`` seconds unless ``arguments`` say otherwise. Returns an exit status."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seconds", type=float, default=seconds, help="start no episode after that time")
    parser.add_argument("--first", type=int, default=0, help="seed of the first episode")
    parser.add_argument("--count", type=int, default=UNLIMITED, help="episodes")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    started, found, failed = time.monotonic(), Counter[str](), []
    with tempfile.TemporaryDirectory() as folder:
        models = references(Path(folder))
        for seed in range(args.first, args.first + args.count):
            episode = start(seed, models)
            try:
                episode.run()
            except Exception as error:
                failed.append(seed)
                settings = getattr(episode, "settings", None)
                print(f"seed {seed} failed: {type(error).__name__}: {error}\n  settings {settings}", flush=True)
            found += episode.figures()
            if time.monotonic() - started > args.seconds:
                break
    return conclude(found, failed, "engines", args.count)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="random traffic at whole engines, against transformers")
    parser.add_argument("--seconds", type=float, default=110, help="start no episode after that time")
    parser.add_argument("--first", type=int, default=0, help="seed of the first episode")
    parser.add_argument("--count", type=int, default=UNLIMITED, help="episodes")
    parser.add_argument("--requests", type=int, default=UNLIMITED, help="start no episode after so many requests")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--drafts", action="store_true", help="every engine verifies drafts; otherwise half of them")
    parser.add_argument("--json", type=Path, help="write what came and what became of it there")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(arguments)
    started, found, failed, seeds = time.monotonic(), Counter[str](), {}, []
    with tempfile.TemporaryDirectory() as folder:
        episodes = in_turn(args, folder) if args.jobs == 1 else side_by_side(args, folder)
        for seed, figures, failure in episodes:
            seeds.append(seed)
            found += figures
            if failure:
                failed[seed] = failure
                print(f"seed {seed} failed: {failure}", flush=True)
            if time.monotonic() - started > args.seconds or found["requests"] >= args.requests:
                episodes.close()
                break
    name, wanted = ("requests", args.requests) if args.requests < UNLIMITED else ("engines", args.count)
    status = conclude(found, [*failed], name, wanted)
    if args.json is not None:
        figures = {"seeds": [min(seeds), max(seeds)], "seconds": round(time.monotonic() - started, 1)} | dict(found)
        result = report.provenance(args.device) | {"benchmark": "fuzz-engine", "jobs": args.jobs} | figures
        report.write_json(args.json, result | {"failed": failed})
    return status


if __name__ == "__main__":
    sys.exit(main())
