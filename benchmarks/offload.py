"""Measure the tiers below the device on a GPU: long prefixes leave the device and return, and so do agents.

    python -m benchmarks.offload --models qwen3-0.6b qwen3-next-12l --json FILE

Each model has dummy weights and runs in three engines, one after the other: without a tier, with host memory, and with
files below host memory. Every figure is written to the file at once. A run that hits a limit keeps its figures.

- *Prefix*: a prefix of 100,000 tokens is computed and restored. Its first tokens are timed. A restore also runs while
  32 other requests decode, and their steps are timed with and without it.
- *Trace*: agents in 16 sessions send each turn after the answer to the previous turn. Their contexts are four times the
  device's pool. Hit rates, first tokens and tokens per second are measured without a tier, with host memory under both
  write policies, and with files.
- *Restart*: a new process reads a prefix from files, and its first token is timed.

``--parts`` chooses some of them.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import torch

from weft import LLM, SamplingParams
from weft.bench import report, trace
from weft.bench.agent_trace import AgentTrace, write_trace
from weft.cache.nodes import Prefix

CONFIGS = Path(__file__).parent / "configs"
PAGE, BLOCK = 16, 512
PARTS = ["prefix", "trace", "restart"]
CEILING = 55e9
"""Bytes per second of the link, measured on an H200 with PCIe 5."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of one model's measurements.

    Attributes:
        prefix, disk_prefix: tokens of the prefixes that host memory and files restore.
        others, alone: decoding requests, and steps of theirs that are timed without a restore.
        repeats: restores of each kind.
        host_gib, disk_host_gib: host memory, of the engine without and with files.
        trace: the sessions of agents.
        turns: upper bound on the turns of a session.
        policies: write policies of the engine with host memory.
        settings: more settings of the engines.
    """

    prefix: int = 100_000
    disk_prefix: int = 30_000
    others: int = 32
    alone: int = 50
    repeats: int = 3
    host_gib: float = 8.0
    disk_host_gib: float = 2.0
    trace: AgentTrace = AgentTrace(shared_tokens=4096, first_tokens=14_000, output_tokens=120, max_context=60_000)
    turns: int = 3
    policies: tuple[str, ...] = ("write_back",)
    settings: dict[str, Any] = field(default_factory=dict)


SIZES = {
    "qwen3-next-12l": Sizes(settings={"mamba_ssm_dtype": "bfloat16"}),
    "qwen3-0.6b": Sizes(
        host_gib=15.0, disk_host_gib=4.0, policies=("write_back", "write_through_selective"),
        trace=AgentTrace(shared_tokens=1024, first_tokens=3000, turn_tokens=400, output_tokens=120, max_context=12_000),
    ),
    "bundled": Sizes(
        prefix=1500, disk_prefix=700, others=4, alone=10, repeats=2, host_gib=0.3, disk_host_gib=0.1,
        trace=AgentTrace(4, 3, 512, 200, 100, 8, 1500), turns=3,
    ),
}  # fmt: skip


def folder_of(model: str, length: int, into: Path) -> str | None:
    """The configuration of a model, with positions for ``length`` tokens. None stands for the bundled model."""
    if model == "bundled":
        return None
    config = json.loads((CONFIGS / model / "config.json").read_text())
    config["max_position_embeddings"] = max(config["max_position_embeddings"], length)
    folder = into / model
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def tokens(seed: int, count: int, top: int = 400) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(top) for _ in range(count)]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, logprobs=0)


def generate(llm: LLM, prompt: list[int], count: int = 1) -> Any:
    return llm.generate({"prompt_token_ids": prompt}, greedy(count), use_tqdm=False)[0]


def content(llm: LLM, prompt: list[int]) -> list[torch.Tensor]:
    """The KV and the state on the device that the prompt would reuse, in every layer."""
    core: Any = llm._core
    manager, caches = core.manager, core._executor._runner.caches
    match = manager.match(prompt)
    whole, tail = divmod(match.num_tokens, PAGE)
    places = manager.tree.page_list(Prefix(match.prefix.node, match.num_tokens))
    pages = torch.tensor(places[:whole], device=llm.config.device)
    found = []
    for name, layer in manager.spec.layers.items():
        for kind in layer.paged:
            found += [caches[name][kind.name][pages], caches[name][kind.name][places[-1], :tail].clone()]
        found += [caches[name][kind.name][match.checkpoint.slot].clone() for kind in layer.states]
    return found


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(found, expected, strict=True))


def logprob(output: Any) -> float:
    """The log probability of the first token."""
    return output.outputs[0].logprobs[0][output.outputs[0].token_ids[0]].logprob


class Bench:
    """Figures of one model. ``note`` adds some and writes the file."""

    def __init__(self, model: str, folder: str | None, device: str, note: Callable[..., None], parts: set[str]) -> None:
        self.sizes, self.note, self.parts = SIZES[model], note, parts
        self.checks: list[bool] = []
        sizes = self.sizes
        self.sessions = trace_of(sizes)
        self._folder = folder
        pages = (sizes.prefix + sizes.others * 3000) // PAGE + 500
        self._settings: dict[str, Any] = {
            "device": device, "max_model_len": sizes.prefix + 1024, "max_num_seqs": sizes.others + 2,
            "num_kv_pages": pages, "num_state_slots": sizes.others + 48, "eviction_policy": "lru",
        } | sizes.settings  # fmt: skip
        if folder is not None:
            self._settings |= {"load_format": "dummy", "skip_tokenizer_init": True}

    @contextmanager
    def engine(self, name: str, **settings: Any) -> Iterator[LLM]:
        gc.collect()  # the engine before this one
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        began = time.perf_counter()
        llm = LLM(self._folder, **self._settings, **settings)
        self.note(**{f"start_{name}_s": time.perf_counter() - began, f"stages_{name}": llm.startup})
        generate(llm, tokens(77, min(8192, self.sizes.prefix)))  # the clocks rise
        try:
            yield llm
        finally:
            began = time.perf_counter()
            llm.shutdown()
            self.note(**{f"stop_{name}_s": time.perf_counter() - began})
            del llm

    def check(self, is_equal: bool) -> None:
        """Note whether a restored prefix has the bytes that it had before it left the device."""
        self.checks.append(is_equal)
        self.note(restored_bytes_equal=self.checks)

    def run(self, folder: Path) -> None:
        below = {"kv_offloading_size": self.sizes.disk_host_gib, "kv_offloading_dir": folder}
        self.note(sizes=asdict(self.sizes))
        if self.parts & {"prefix", "trace"}:
            self.with_host_memory()
        if "trace" in self.parts:
            self.without_a_tier()
        if self.parts & {"trace", "restart"}:
            first = self.with_files(below)
            self.after_a_restart(below, first)

    def with_host_memory(self) -> None:
        with self.engine("host", kv_offloading_size=self.sizes.host_gib) as llm:
            if "prefix" in self.parts:
                self.note(unused_ms=self.decode_ms(llm))
                self.prefix(llm)
                self.beside_others(llm)
            for policy in self.sizes.policies if "trace" in self.parts else ():
                tier_of(llm).policy = policy
                self.replay(llm, policy)

    def without_a_tier(self) -> None:
        with self.engine("off") as llm:
            self.note(off_ms=self.decode_ms(llm))
            self.replay(llm, "off")

    def with_files(self, below: dict[str, Any]) -> list[torch.Tensor]:
        """Replay with files. Returns the KV and state of the prefix that the restart reads."""
        with self.engine("disk", **below) as llm:
            if "trace" in self.parts:
                self.replay(llm, "disk")
            prompt = tokens(5, self.sizes.disk_prefix)
            computed = generate(llm, prompt)
            self.note(disk_computed_first_token_ms=1e3 * computed.metrics.time_to_first_token)
            return [part.cpu() for part in content(llm, prompt)]

    def after_a_restart(self, below: dict[str, Any], expected: list[torch.Tensor]) -> None:
        with self.engine("restart", **below) as llm:
            prompt = tokens(5, self.sizes.disk_prefix)
            read = generate(llm, prompt)
            if read.cache_report.num_restored_tokens >= self.sizes.disk_prefix - PAGE:  # nothing was computed meanwhile
                self.check(equal([part.cpu() for part in content(llm, prompt)], expected))
            self.note(
                disk_first_token_ms=1e3 * read.metrics.time_to_first_token,
                disk_report=str(read.cache_report),
                disk_loaded_gb=llm.stats().loaded_bytes / 1e9,
            )

    # -- one long prefix -------------------------------------------------------------------------------------------

    def decode_ms(self, llm: LLM) -> float:
        """Median milliseconds of a decoding step of the others."""
        self.begin_others(llm, 2 * self.sizes.alone + 40)
        found = median(step_times(llm, lambda done: done == 2 * self.sizes.alone))
        drain(llm)
        llm.reset_prefix_cache()
        return 1e3 * found

    def begin_others(self, llm: LLM, count: int) -> None:
        for index in range(self.sizes.others):
            llm.add_request({"prompt_token_ids": tokens(1000 + index, 64)}, greedy(count), request_id=f"other{index}")
        step_times(llm, lambda done: done == 20)

    def prefix(self, llm: LLM) -> None:
        prompt, core = tokens(0, self.sizes.prefix), llm._core
        computed = generate(llm, prompt)
        self.note(
            bytes_per_token=core.manager.spec.kv_bytes_per_token, state_bytes=core.manager.spec.slot_bytes,
            computed_first_token_ms=1e3 * computed.metrics.time_to_first_token,
        )  # fmt: skip
        before_eviction = content(llm, prompt)
        self.note(logprobs_of_hits=[logprob(generate(llm, prompt)) for _ in range(2)])
        evict_all(llm)
        stats = core.stats()
        self.note(stored_gb=stats.stored_bytes / 1e9, stores_gb_s=rate(stats.stored_bytes, stats.stored_seconds))
        rows = []
        for _ in range(self.sizes.repeats):
            before = core.stats()
            output = generate(llm, prompt)
            after = core.stats()
            self.check(equal(content(llm, prompt), before_eviction))
            moved = after.restored_bytes - before.restored_bytes
            rows.append(
                {
                    "first_token_ms": 1e3 * output.metrics.time_to_first_token,
                    "restore_ms": 1e3 * output.cache_report.restore_seconds,
                    "tokens": after.num_external_hit_tokens - before.num_external_hit_tokens,
                    "gb": moved / 1e9,
                    "gb_s": rate(moved, output.cache_report.restore_seconds),
                    "copies_gb_s": rate(moved, after.restored_seconds - before.restored_seconds),
                    "logprob": logprob(output),
                }
            )
            self.note(restored=rows, share_of_link=1e9 * median(row["gb_s"] for row in rows) / CEILING)
            evict_all(llm)
        self.note(report=str(output.cache_report))

    def beside_others(self, llm: LLM) -> None:
        """Steps of the others alone, and while the prefix is restored."""
        core, prompt = llm._core, tokens(0, self.sizes.prefix)
        rows: list[dict[str, Any]] = []
        restores = core.scheduler.restores
        assert restores is not None
        self.begin_others(llm, 2600)
        for index in range(2 * self.sizes.repeats):
            alone = step_times(llm, lambda done: done == self.sizes.alone)
            before, last = core.stats().restored_bytes, restores.tier.counts.num_restores
            began = time.perf_counter()
            llm.add_request({"prompt_token_ids": prompt}, greedy(1), request_id=f"returns{index}")
            lookup = step_times(llm, lambda done: restores.tier.counts.num_restores > last or done > 100)  # noqa: B023
            during = lookup + step_times(llm, lambda done: not restores.is_active or done > 400)
            seconds = time.perf_counter() - began
            rows.append(
                {
                    "alone_ms": 1e3 * mean(alone),
                    "alone_median_ms": 1e3 * median(alone),
                    "steps": len(during),
                    "lookup_ms": [1e3 * t for t in lookup],
                    "during_ms": 1e3 * mean(during),
                    "during_median_ms": 1e3 * median(during),
                    "during_max_ms": 1e3 * max(during),
                    "gb_s": rate(core.stats().restored_bytes - before, seconds),
                    "slowdown": mean(during) / mean(alone) - 1,
                    "first_ms": [1e3 * t for t in during[len(lookup) :][:8]],
                    "last_ms": [1e3 * t for t in during[-2:]],
                }
            )
            while f"returns{index}" in llm._streams:
                llm.step()
            core.manager.evict_all()
            step_times(llm, lambda done: done == 10)
            self.note(beside=rows, slowdown=median(row["slowdown"] for row in rows))
        drain(llm)

    # -- agents ----------------------------------------------------------------------------------------------------

    def replay(self, llm: LLM, name: str) -> None:
        """Replay the trace with a pool of a quarter of its contexts."""
        llm.reset_prefix_cache()
        manager, sessions = llm._core.manager, self.sessions
        contexts = sum(session[-1].input_length for session in sessions)
        longest = max(r.input_length + r.output_length for r in itertools.chain(*sessions))
        hog = manager.pages.allocate(manager.pages.num_free - max(contexts // 4, longest + 64) // PAGE)
        assert hog is not None
        before = llm._core.stats()
        found = closed_loop(llm, sessions)
        after = llm._core.stats()
        for page in hog:
            manager.pages.unpin([page])
        manager.pages.release(hog)
        counts = {
            key: getattr(after, key) - getattr(before, key)
            for key in ("num_external_hit_tokens", "num_restores", "num_refused_restores", "num_disk_loads")
        }
        top = {"contexts": contexts, "pool_tokens": max(contexts // 4, longest + 64), "turns": sum(map(len, sessions))}
        self.note(**{f"trace_{name}": top | found | counts})
        llm.reset_prefix_cache()


def trace_of(sizes: Sizes) -> list[list[trace.TraceRequest]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        write_trace(path, sizes.trace)
        sessions = trace.sessions_of(trace.read_trace(path))
    fitting = [[r for r in session if r.input_length <= sizes.trace.max_context] for session in sessions]
    shorter = [request for session in fitting for request in session[: sizes.turns]]
    return trace.sessions_of(trace.with_appended_blocks(shorter, BLOCK))


def closed_loop(llm: LLM, sessions: list[list[trace.TraceRequest]]) -> dict[str, Any]:
    """Send every session's next request as soon as its last one is answered."""
    replay = trace.Replay(block_size=BLOCK, vocab_size=400)
    numbers = itertools.count()
    queues = [[(r, trace.prompt_of(r, next(numbers), replay)) for r in reversed(session)] for session in sessions]

    def send(index: int) -> None:
        if queues[index]:
            request, prompt = queues[index].pop()
            name = f"{index}/{len(queues[index])}"
            llm.add_request({"prompt_token_ids": prompt}, greedy(request.output_length), request_id=name)

    began, outputs = time.perf_counter(), []
    for index in range(len(queues)):
        send(index)
    while not llm.is_finished():
        for output in llm.step():
            if output.finished:
                outputs.append(output)
                send(int(output.request_id.partition("/")[0]))
    seconds = time.perf_counter() - began
    firsts = [1e3 * (output.metrics.time_to_first_token or 0.0) for output in outputs]
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    new_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    hits = sum(output.num_cached_tokens or 0 for output in outputs) / prompt_tokens
    best = trace.reusable_tokens(in_turns(sessions), BLOCK) / prompt_tokens
    return {
        "seconds": seconds, "hit_rate": hits, "theoretical_hit_rate": best, "share_of_theoretical": hits / best,
        "ttft_p50_ms": median(firsts), "ttft_p90_ms": quantiles(firsts, n=10)[-1],
        "output_tokens_per_s": new_tokens / seconds, "prompt_tokens_per_s": prompt_tokens / seconds,
    }  # fmt: skip


def in_turns(sessions: list[list[trace.TraceRequest]]) -> list[trace.TraceRequest]:
    rounds = itertools.zip_longest(*sessions)
    return [request for each in rounds for request in each if request is not None]


def tier_of(llm: LLM) -> Any:
    restores = llm._core.scheduler.restores
    assert restores is not None
    return restores.tier


def evict_all(llm: LLM) -> None:
    """Move everything below the device, and wait for it."""
    llm._core.manager.evict_all()
    for seed in (88, 89):
        generate(llm, tokens(seed, 4))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    generate(llm, tokens(90, 4))


def step_times(llm: LLM, until: Callable[[int], bool]) -> list[float]:
    """Seconds of each step until ``until`` holds."""
    times: list[float] = []
    while not until(len(times)):
        began = time.perf_counter()
        llm.step()
        times.append(time.perf_counter() - began)
    return times


def drain(llm: LLM) -> None:
    for name in list(llm._streams):
        llm.abort(name)
    while not llm.is_finished() or llm._core.has_work:
        llm.step()


def rate(num_bytes: int, seconds: float) -> float:
    return num_bytes / seconds / 1e9 if seconds else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["qwen3-next-12l", "qwen3-0.6b"], choices=sorted(SIZES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--json", required=True)
    args = parser.parse_args()
    result: dict[str, Any] = report.provenance(args.device) | {"benchmark": "offload", "rows": []}
    path = report.open_json(args.json)
    began = time.perf_counter()
    for model in args.models:
        row: dict[str, Any] = {"model": model}
        result["rows"].append(row)

        def note(row: dict[str, Any] = row, **figures: Any) -> None:
            row.update(figures, seconds=time.perf_counter() - began)
            report.write_json(path, result)
            print(json.dumps({k: v[-1] if isinstance(v, list) else v for k, v in figures.items()}), flush=True)

        with tempfile.TemporaryDirectory() as folder:
            files = Path(folder) / "files"
            folder_of_model = folder_of(model, SIZES[model].prefix + 4096, Path(folder))
            bench = Bench(model, folder_of_model, args.device, note, set(args.parts))
            bench.run(files)
            assert all(bench.checks), "a restored prefix has other bytes than before it left the device"


if __name__ == "__main__":
    main()
